"""Which queue a free worker takes from next: a pure choice over what is known to wait."""

from collections.abc import Mapping

from headrace.schemas.subjects import LANES, QueueName

__all__ = ["order"]

_LANE_RANK = {lane: rank for rank, lane in enumerate(LANES)}


def order(waiting: Mapping[QueueName, int], *, last_served: Mapping[QueueName, int]) -> list[QueueName]:
    """Queues with something waiting, in the order to try them.

    Lanes are strict. Within a lane the queue served longest ago comes first (`last_served` counts fetches), so
    queues take turns; jobs within a queue keep the broker's order.
    """
    return sorted(
        (queue for queue, number in waiting.items() if number > 0),
        key=lambda queue: (_LANE_RANK[queue.lane], last_served.get(queue, -1), queue),
    )
