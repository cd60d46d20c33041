"""A small OpenAI-compatible server on loopback that plays scripts: bytes as given, pauses, hangs, resets."""

import asyncio
import json
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import msgspec
from aiohttp import web

from headrace.worker.engines.base import PROBE_PREFIX

DONE: Final = b"data: [DONE]\n\n"


class Hang:
    """A step: nothing more is sent until the client goes away."""


class Reset:
    """A step: the connection is torn down as it stands."""


class Await:
    """A step: go on when the event is set."""

    def __init__(self, event: asyncio.Event) -> None:
        self.event = event


Step = bytes | Hang | Reset | Await


class Script(msgspec.Struct, frozen=True):
    """One answer: status, and what is written, step by step. A `Reset` as first step answers nothing at all."""

    steps: tuple[Step, ...]
    status: int = 200
    content_type: str = "text/event-stream"


def script(*steps: Step) -> Script:
    """A streamed answer."""
    return Script(steps=steps)


def reply(status: int, body: Any) -> Script:
    """A whole JSON answer."""
    return Script(steps=(json.dumps(body).encode(),), status=status, content_type="application/json")


def frame(body: Any) -> bytes:
    """One event."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def chat(text: str | None = None, *, index: int = 0, finish: str | None = None, **delta: Any) -> bytes:
    """One chat chunk."""
    if text is not None:
        delta["content"] = text
    return frame({"choices": [{"index": index, "delta": delta, "finish_reason": finish}]})


def completion(text: str = "", *, index: int = 0, finish: str | None = None, **choice: Any) -> bytes:
    """One completions chunk."""
    return frame({"choices": [{"index": index, "text": text, "finish_reason": finish, **choice}]})


def usage(prompt: int, new: int) -> bytes:
    """The usage chunk."""
    figures = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    return frame({"choices": [], "usage": figures})


class FakeOpenAI:
    """Plays `scripts` in order to whatever is posted below `/v1`, and keeps what was asked.

    `pages` are the other answers, by path: a status and a body (JSON, or text if it is a string). A completion that is
    not to be streamed asks whether tokens are made at all: those are counted, and answered with `token_status`
    once `makes_tokens` is set, as it is at first. A worker's own probes are counted too, and answered with `probe`.
    """

    def __init__(self, *, models: Sequence[dict[str, Any]] = ({"id": "served", "owned_by": "someone"},)) -> None:
        self.scripts: deque[Script] = deque()
        self.pages: dict[str, tuple[int, Any]] = {"/v1/models": (200, {"object": "list", "data": list(models)})}
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.posted: list[tuple[str, dict[str, Any]]] = []
        self.connections: set[object] = set()
        self.num_aborted = 0
        self.num_token_probes = 0
        self.token_status = 200
        self.num_worker_probes = 0
        self.probe = script(completion("a", finish="length"), usage(1, 1), DONE)
        self.makes_tokens = asyncio.Event()
        self.makes_tokens.set()
        self.aborted = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/{op:.*}", self._play)
        app.router.add_route("*", "/{path:.*}", self._page)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _page(self, request: web.Request) -> web.Response:
        if request.method == "POST":
            self.posted.append((request.path, await request.json()))
        status, body = self.pages.get(request.path, (404, {"error": {"message": "no such page"}}))
        if isinstance(body, str):
            return web.Response(status=status, text=body)
        return web.json_response(body, status=status)

    async def _play(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if request.path == "/v1/completions" and not body.get("stream"):
            self.num_token_probes += 1
            await self.makes_tokens.wait()
            return web.json_response({"choices": [{"text": "a"}]}, status=self.token_status)
        if request.headers.get("X-Request-Id", "").startswith(PROBE_PREFIX):
            self.num_worker_probes += 1
            playing = self.probe
        else:
            self.bodies.append(body)
            self.headers.append(request.headers)
            self.connections.add(request.transport)
            playing = self.scripts.popleft()
        response = web.StreamResponse(status=playing.status, headers={"Content-Type": playing.content_type})
        try:
            for step in playing.steps:
                if isinstance(step, Reset):
                    if request.transport is not None:
                        request.transport.abort()
                    return response
                if not response.prepared:
                    await response.prepare(request)
                if isinstance(step, bytes):
                    await response.write(step)
                elif isinstance(step, Await):
                    await step.event.wait()
                else:
                    await asyncio.get_running_loop().create_future()
            await response.write_eof()
        except (asyncio.CancelledError, ConnectionError):
            self.num_aborted += 1
            self.aborted.set()
            raise
        return response
