"""The broker's side of our policy: a queue for each lane and tenant, first in, first out."""

from collections import deque
from collections.abc import Mapping

from headrace.discipline.choice import QueueView
from headrace.schemas.subjects import QueueName
from headrace.simulator.requests import Request

__all__ = ["Queues"]


class _Queue:
    """Those that were handed back, in the order in which they came back, and then the others."""

    def __init__(self) -> None:
        self.returned: deque[Request] = deque()
        self.new: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self.returned) + len(self.new)

    @property
    def next(self) -> deque[Request]:
        """Where its head stands."""
        return self.returned or self.new


class Queues:
    """Requests that wait, by queue; as the broker does, it gives those that were handed back before the others."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._queues: dict[QueueName, _Queue] = {}
        self.num_waiting = 0

    def put(self, request: Request, *, is_handed_back: bool = False) -> None:
        """It waits from now on."""
        queue = self._queues.setdefault(request.queue, _Queue())
        (queue.returned if is_handed_back else queue.new).append(request)
        self.num_waiting += 1

    def fetch(self, name: QueueName) -> Request | None:
        """Take the head of a queue; None if there is none."""
        queue = self._queues.get(name)
        if not queue:
            return None
        self.num_waiting -= 1
        return queue.next.popleft()

    def views(self, now_s: float) -> list[QueueView]:
        """All that have something waiting."""
        return [
            QueueView(
                name=name,
                num_waiting=len(queue),
                oldest_wait_s=now_s - queue.next[0].arrival.time_s,
                weight=self._weights.get(name.queue, 1.0),
            )
            for name, queue in self._queues.items()
            if queue
        ]
