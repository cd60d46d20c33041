"""Where a job stands in its queue, and about how long that takes: pure functions of a snapshot."""

import math
from collections.abc import Iterable, Mapping

from headrace.schemas.subjects import LANES, QueueName
from headrace.schemas.workers import Heartbeat

__all__ = ["eta_s", "num_startable", "position", "retry_after_s", "waiting_of"]


def waiting_of(messages: Mapping[QueueName, int], workers: Iterable[Heartbeat]) -> dict[QueueName, int]:
    """Jobs that wait in each queue: its messages less those that workers say they hold."""
    waiting = dict(messages)
    for beat in workers:
        for held in beat.held:
            queue = QueueName.from_consumer(held.consumer)
            if queue in waiting:
                waiting[queue] = max(0, waiting[queue] - 1)
    return waiting


def position(
    waiting: Mapping[QueueName, int],
    queue: QueueName,
    *,
    num_ahead: int,
    weights: Mapping[QueueName, float] | None = None,
) -> int:
    """Jobs the discipline would start before one that has `num_ahead` others before it in its own queue.

    All of the pool's higher lanes; of each other queue in the lane as many as take their turns meanwhile, by weight
    (1 where it is missing), as if all jobs were of one size and each queue began anew; at equal turns by name, as
    `shares.Shares` does. One look at each queue, however much waits.
    """
    rank = LANES.index(queue.lane)
    own_weight = weights.get(queue, 1.0) if weights else 1.0
    before = num_ahead
    for other, number in waiting.items():
        if other.pool != queue.pool or other == queue:
            continue
        if LANES.index(other.lane) < rank:
            before += number
        elif other.lane == queue.lane:
            turns = num_ahead * (weights.get(other, 1.0) if weights else 1.0) / own_weight
            before += min(number, math.floor(turns) + 1 if other < queue else math.ceil(turns))
    return before


def num_startable(workers: Iterable[Heartbeat], need_tokens: int) -> int:
    """Requests of one size that could start now, by what the workers say. None where a larger one waits already."""
    number = 0
    for beat in workers:
        if beat.waiting:
            continue
        slots = max(0, beat.max_concurrency - beat.running)
        if beat.capacity_tokens is not None:
            slots = min(slots, max(0, beat.capacity_tokens - beat.kv_reserved_tokens) // max(1, need_tokens))
        number += slots
    return number


def eta_s(num_before: int, workers: Iterable[Heartbeat], *, is_paused: bool = False) -> float | None:
    """Seconds until a job with `num_before` others before it starts, by the workers' measured time per job.

    0 where a worker has room for all of them; None where no worker has measured anything yet, and while the model is
    paused: nobody knows until when.
    """
    if is_paused:
        return None
    live = list(workers)
    num_free = sum(max(0, beat.max_concurrency - beat.running - beat.waiting) for beat in live)
    if live and num_before < num_free:
        return 0.0
    rate = sum(beat.max_concurrency / beat.seconds_per_job for beat in live if beat.seconds_per_job)
    return round((num_before - num_free + 1) / rate, 3) if rate > 0 else None


def retry_after_s(eta: float | None) -> int:
    """Whole seconds, at least 1, for the Retry-After of a full queue."""
    return max(1, math.ceil(eta)) if eta is not None else 1
