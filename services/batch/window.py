"""How many lines of a batch are under way at once."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final

__all__ = ["Window"]

_SHRINK: Final = 0.7
_SHRINK_EVERY_S: Final = 0.5
_MAX_BYTES: Final = 16 * 1024 * 1024
"""Of the bodies of all lines under way, which their runner holds; one line alone may be larger."""


class Window:
    """At most `size` lines at once; fewer for a while where they find no room, so that a batch fills no queue.

    What finds none makes it smaller, twice a second at most; as many answers as it has lines make it one larger. Lines
    that are refused stay in it, but no more of them ask again at once than it has room for by then, and none before the
    last refusal has had its time, unless an answer shows that there is room.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_open = 0
        self._num_bytes = 0
        self._num_refused = 0
        self._held_until = -math.inf
        self._freed = asyncio.Event()
        self._shrunk_at = -math.inf
        self.limit = float(size)

    async def enter(self, num_bytes: int = 0) -> None:
        """Wait until one more line, with a body of that size, may be sent."""
        await self._until(
            lambda: self._num_open < self._room and (not self._num_open or self._num_bytes + num_bytes <= _MAX_BYTES)
        )
        self._num_open += 1
        self._num_bytes += num_bytes

    def leave(self, num_bytes: int = 0) -> None:
        """A line of that size is done with."""
        self._num_open -= 1
        self._num_bytes -= num_bytes
        self._freed.set()

    async def again(self, after_s: float) -> None:
        """A line that was refused waits so long, and then until it is among the lines that may ask."""
        self.refused()
        self._num_refused += 1
        held_until = self._held_until = time.monotonic() + after_s
        try:
            await asyncio.sleep(after_s)
            if self._held_until == held_until:
                self._held_until = -math.inf
            self._freed.set()
            await self._until(lambda: self._may_ask)
        finally:
            self._num_refused -= 1

    def refused(self) -> None:
        """A line was refused, or waited in vain, for want of room."""
        now = time.monotonic()
        if now - self._shrunk_at >= _SHRINK_EVERY_S:
            self._shrunk_at = now
            self.limit = max(1.0, self.limit * _SHRINK)

    def answered(self) -> None:
        """A line has its answer."""
        self.limit = min(float(self._size), self.limit + 1 / self.limit)
        self._held_until = -math.inf
        self._freed.set()

    @property
    def _room(self) -> int:
        return max(1, int(self.limit))

    @property
    def _may_ask(self) -> bool:
        return self._num_open - self._num_refused < self._room and time.monotonic() >= self._held_until

    async def _until(self, is_free: Callable[[], bool]) -> None:
        while not is_free():
            self._freed.clear()
            await self._freed.wait()
