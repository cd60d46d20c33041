"""Virtual time: what happens when, in one fixed order."""

import heapq
from collections.abc import Callable

__all__ = ["Clock"]


class Clock:
    """Callbacks in order of their time; those of one time in the order they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_asked = 0

    def at(self, time_s: float, callback: Callable[[], None]) -> None:
        """Call it at that time, or now if that has passed."""
        self._num_asked += 1
        heapq.heappush(self._events, (max(time_s, self.now_s), self._num_asked, callback))

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call it so much later."""
        self.at(self.now_s + delay_s, callback)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now_s, _, callback = heapq.heappop(self._events)
            callback()
