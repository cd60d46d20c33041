"""A stream that is watched while its worker is lost: who took over, when, and that no token was lost or doubled."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import msgspec

from headrace.client import Delta, Done, Started, StreamEvent
from headrace.errors import HeadraceError

__all__ = ["Start", "Watched"]


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt: who runs it, since when, how many tokens there were by then. Times are seconds on the reader's clock.

    `last_token_at` is when the last token before it came, `first_token_at` when the first one after it did.
    """

    worker: str
    attempt: int
    at: float
    num_tokens: int
    last_token_at: float | None
    first_token_at: float | None = None

    @property
    def gap_s(self) -> float | None:
        """From the last token of the attempt before to the first of this one; None unless there were both."""
        if self.last_token_at is None or self.first_token_at is None:
            return None
        return self.first_token_at - self.last_token_at


class Watched:
    """One stream as it is read. `reached` is set once `threshold` tokens have come, or the stream is over."""

    def __init__(self, *, threshold: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.starts: list[Start] = []
        self.num_tokens = 0
        self.text = ""
        self.done: Done | None = None
        self.reached = asyncio.Event()
        self._threshold = threshold
        self._clock = clock
        self._last_token_at: float | None = None

    async def read(
        self, events: AsyncIterator[StreamEvent], *, on_event: Callable[[StreamEvent], None] = lambda event: None
    ) -> None:
        """Read to the end. Raises HeadraceError where a token is missing, came twice, or is not in the whole answer."""
        try:
            async for event in events:
                self._take(event)
                on_event(event)
        finally:
            self.reached.set()

    def _take(self, event: StreamEvent) -> None:
        if isinstance(event, Started):
            start = Start(
                worker=event.worker,
                attempt=event.attempt,
                at=self._clock(),
                num_tokens=self.num_tokens,
                last_token_at=self._last_token_at,
            )
            self.starts.append(start)
        elif isinstance(event, Delta):
            self._take_tokens(event)
        elif isinstance(event, Done):
            if event.text != self.text:
                raise HeadraceError(f"job {event.job}: the answer is not what was streamed")
            self.done = event

    def _take_tokens(self, delta: Delta) -> None:
        if delta.offset != self.num_tokens:
            raise HeadraceError(f"job {delta.job}: token {delta.offset} came after {self.num_tokens} tokens")
        self.num_tokens += delta.num_tokens
        self.text += delta.text
        if delta.num_tokens:
            self._last_token_at = self._clock()
            if self.starts and self.starts[-1].first_token_at is None:
                self.starts[-1] = msgspec.structs.replace(self.starts[-1], first_token_at=self._last_token_at)
        if self.num_tokens >= self._threshold:
            self.reached.set()
