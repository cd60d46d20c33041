"""How many lines of a batch are under way at once, and when the next may be sent."""

import asyncio
import math
import random
import time
from typing import Final

__all__ = ["Window"]

_SHRINK: Final = 0.7
_SHRINK_EVERY_S: Final = 1.0
_GROW: Final = 0.5
_JITTER: Final = 0.25


class Window:
    """At most `size` lines at once; fewer for a while where they find no room, so that a batch fills no queue.

    What finds none makes it smaller, once a second at most, and an answer a little larger again.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_open = 0
        self._freed = asyncio.Event()
        self._calm_at = 0.0
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

    async def calm(self) -> None:
        """Wait until what refused a line may take it."""
        while (left_s := self._calm_at - time.monotonic()) > 0:
            await asyncio.sleep(left_s * random.uniform(1.0, 1.0 + _JITTER))

    def refused(self, retry_after_s: float) -> None:
        """A line was refused, or waited in vain, for want of room; none is sent before that time has passed."""
        now = time.monotonic()
        if now - self._shrunk_at >= _SHRINK_EVERY_S:
            self._shrunk_at = now
            self.limit = max(1.0, self.limit * _SHRINK)
        self._calm_at = max(self._calm_at, now + retry_after_s)

    def answered(self) -> None:
        """A line has its answer."""
        self.limit = min(float(self._size), self.limit + _GROW)
        self._freed.set()
