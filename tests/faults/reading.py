"""A stream as its reader sees it, with a check at each event that nothing is lost or repeated."""

import asyncio
import time
from typing import Any

from headrace.client import Client, Delta, Done, Requeued, Started
from tests.deployment import MODEL
from tests.faults.checking import sim_answer

__all__ = ["Reading"]


class Reading:
    """One stream of a `sim` engine, read by `read`.

    `attempts` has who started each attempt and when it was seen, `reasons` why it was requeued; `started`,
    `first_token` and `requeued` are set as those come.
    """

    def __init__(self, prompt: str, num_tokens: int, **arguments: Any) -> None:
        self._prompt = prompt
        self._num_tokens = num_tokens
        self._arguments = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, **arguments}
        self.job = str(arguments.get("job_id", ""))
        self.attempts: dict[int, tuple[str, float]] = {}
        self.reasons: list[str] = []
        self.requeued_at: list[float] = []
        self.started = asyncio.Event()
        self.first_token = asyncio.Event()
        self.requeued = asyncio.Event()
        self.done: Done | None = None

    async def read(self, client: Client) -> None:
        """Read it to its end and check the text against an undisturbed run's. Raises what the stream raises."""
        offset, text = 0, ""
        async for event in client.stream(**self._arguments):
            if isinstance(event, Started):
                assert event.attempt not in self.attempts
                self.attempts[event.attempt] = (event.worker, time.monotonic())
                self.started.set()
            elif isinstance(event, Requeued):
                self.reasons.append(event.reason)
                self.requeued_at.append(time.monotonic())
                self.requeued.set()
            elif isinstance(event, Delta):
                assert event.offset == offset
                offset += event.num_tokens
                text += event.text
                self.first_token.set()
            elif isinstance(event, Done):
                assert event.text == sim_answer(self._prompt, self._num_tokens)
                if self._arguments.get("stream", True):
                    assert (text, offset) == (event.text, self._num_tokens)
                assert event.usage is not None
                assert event.usage.completion_tokens == self._num_tokens
                self.done = event
            else:
                self.job = event.job
        assert self.done is not None

    @property
    def workers(self) -> list[str]:
        """Who ran it, in the order of the attempts."""
        return [worker for worker, _ in self.attempts.values()]
