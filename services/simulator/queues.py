"""The broker's side of our policy: a queue for each lane and tenant, first in, first out."""

from collections import deque
from collections.abc import Mapping

from headrace.discipline.choice import QueueView
from headrace.schemas.subjects import QueueName
from headrace.simulator.requests import Request

__all__ = ["Queues"]


class Queues:
    """Requests that wait, by queue; one that is handed back stands at the head again."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._waiting: dict[QueueName, deque[Request]] = {}
        self.num_waiting = 0

    def put(self, request: Request, *, at_head: bool = False) -> None:
        """It waits from now on."""
        queue = self._waiting.setdefault(request.queue, deque())
        if at_head:
            queue.appendleft(request)
        else:
            queue.append(request)
        self.num_waiting += 1

    def fetch(self, name: QueueName) -> Request | None:
        """The head of a queue; None if it is empty."""
        queue = self._waiting.get(name)
        if not queue:
            return None
        self.num_waiting -= 1
        return queue.popleft()

    def views(self, now_s: float) -> list[QueueView]:
        """All that have something waiting."""
        return [
            QueueView(
                name=name,
                num_waiting=len(queue),
                oldest_wait_s=now_s - queue[0].arrival.time_s,
                weight=self._weights.get(name.queue, 1.0),
            )
            for name, queue in self._waiting.items()
            if queue
        ]
