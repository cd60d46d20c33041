"""How many lines of a batch are under way at once."""

import asyncio
import math
import time
from typing import Final

__all__ = ["Window"]

_SHRINK: Final = 0.7
_SHRINK_EVERY_S: Final = 0.5


class Window:
    """At most `size` lines at once; fewer for a while where they find no room, so that a batch fills no queue.

    What finds none makes it smaller, twice a second at most; as many answers as it has lines make it one larger.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_open = 0
        self._freed = asyncio.Event()
        self._shrunk_at = -math.inf
        self.limit = float(size)

    async def enter(self) -> None:
        """Wait until one more line may be sent. One task waits at a time."""
        while self._num_open >= max(1, int(self.limit)):
            self._freed.clear()
            await self._freed.wait()
        self._num_open += 1

    def leave(self) -> None:
        """A line is done with."""
        self._num_open -= 1
        self._freed.set()

    def refused(self) -> None:
        """A line was refused, or waited in vain, for want of room."""
        now = time.monotonic()
        if now - self._shrunk_at >= _SHRINK_EVERY_S:
            self._shrunk_at = now
            self.limit = max(1.0, self.limit * _SHRINK)

    def answered(self) -> None:
        """A line has its answer."""
        self.limit = min(float(self._size), self.limit + 1 / self.limit)
        self._freed.set()
