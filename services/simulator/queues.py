"""The broker's side of our policy: a queue for each lane and tenant, first in, first out."""

import itertools
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

    def heads(self, name: QueueName, number: int) -> list[Request]:
        """The first so many of a queue; fewer if there are no more."""
        return list(itertools.islice(self._waiting.get(name, ()), number))

    def fetch(self, name: QueueName, index: int = 0) -> Request | None:
        """Take the head of a queue, or the one at that index; None if there is none."""
        queue = self._waiting.get(name)
        if queue is None or index >= len(queue):
            return None
        request = queue[index]
        del queue[index]
        self.num_waiting -= 1
        return request

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
