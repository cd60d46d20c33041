"""The same requests, sent to vLLM's own server and through Headrace."""

import asyncio
import re
from types import TracebackType
from typing import Any, Self

import aiohttp

from headrace.client import Client, Delta, Done, Started

MODEL = "smollm2-135m"

_SUBJECTS = (
    "rivers", "mountains", "bread", "clocks", "bees", "the moon", "paper", "glass", "bridges", "tea",
    "rain", "horses", "letters", "salt", "sails", "maps", "wool", "iron", "owls", "mills",
)  # fmt: skip


def bodies(number: int, *, max_tokens: int, **parameters: Any) -> list[dict[str, Any]]:
    """So many chats, no two alike, at temperature 0."""
    return [
        {
            "messages": [{"role": "user", "content": f"Write a short text about {_SUBJECTS[index % 20]}."}],
            "temperature": 0,
            "max_tokens": max_tokens,
            **parameters,
        }
        for index in range(number)
    ]


class Direct:
    """vLLM's own HTTP server. `most_running`: the most requests it was seen to run at once while that was watched."""

    def __init__(self, port: int) -> None:
        self.most_running = 0
        self.url = f"http://127.0.0.1:{port}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(total=240))
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._http.close()

    async def answers(self, requests: list[dict[str, Any]]) -> list[str]:
        """Its answers to all of them at once."""
        return list(await asyncio.gather(*(self._answer(body) for body in requests)))

    async def num_preemptions(self) -> int:
        """As it counts them, since its start."""
        return await self._figure("num_preemptions_total")

    async def watch_running(self) -> None:
        """Look several times a second how many requests it runs, until cancelled."""
        while True:
            self.most_running = max(self.most_running, await self._figure("num_requests_running"))
            await asyncio.sleep(0.1)

    async def _figure(self, name: str) -> int:
        async with self._http.get("/metrics") as response:
            found = re.findall(rf"^vllm:{name}\{{.*\}} (\S+)", await response.text(), re.MULTILINE)
        return int(sum(float(each) for each in found))

    async def _answer(self, body: dict[str, Any]) -> str:
        async with self._http.post("/v1/chat/completions", json={"model": MODEL, **body}) as response:
            assert response.status == 200, await response.text()
            return str((await response.json())["choices"][0]["message"]["content"])

    @property
    def _http(self) -> aiohttp.ClientSession:
        assert self._session is not None
        return self._session


class Stream:
    """One stream through Headrace: its text as it came, and who made it. Events are set as things come."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body
        self.text = ""
        self.num_tokens = 0
        self.workers: list[str] = []
        self.has_some = asyncio.Event()

    async def read(self, client: Client, *, at_least: int = 5) -> str:
        """Read it to its end; what came piece by piece is what the end says. `has_some` after `at_least` tokens."""
        done: Done | None = None
        async for event in client.stream(model=MODEL, deadline_s=280, **self._body):
            if isinstance(event, Started):
                self.workers.append(event.worker)
            elif isinstance(event, Delta):
                assert event.offset == self.num_tokens
                self.text += event.text
                self.num_tokens += event.num_tokens
                if self.num_tokens >= at_least:
                    self.has_some.set()
            elif isinstance(event, Done):
                done = event
        assert done is not None
        assert done.text == self.text
        return self.text


async def read_all(client: Client, streams: list[Stream], *, at_least: int = 5) -> list[str]:
    """All of them at once."""
    return list(await asyncio.gather(*(stream.read(client, at_least=at_least) for stream in streams)))
