"""The baseline of a central queue with a fixed number of requests per engine, as task queues do it."""

from collections import Counter, deque

from headrace.simulator.engine import Engine
from headrace.simulator.policy import Ground
from headrace.simulator.requests import Request

__all__ = ["FixedConcurrency"]


class FixedConcurrency:
    """First come, first served, to the engine with the fewest requests while one has fewer than the limit."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._limit = ground.options.fixed_concurrency
        self._queue: deque[Request] = deque()
        self._in_flight: Counter[str] = Counter()

    def arrive(self, request: Request) -> None:
        """It starts or waits."""
        self._queue.append(request)
        self._fill()

    def finished(self, engine: Engine, request: Request) -> None:
        """The next one takes its place."""
        self._in_flight[engine.name] -= 1
        self._fill()

    def _fill(self) -> None:
        while self._queue:
            engine = min(self._ground.engines, key=lambda each: self._in_flight[each.name])
            if self._in_flight[engine.name] >= self._limit:
                return
            self._in_flight[engine.name] += 1
            engine.submit(self._queue.popleft())
