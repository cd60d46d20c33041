"""Which fetched requests a worker sets aside for a moment, since another has more of their beginning in its cache."""

from collections.abc import Iterable, Sequence
from typing import Final

from headrace.discipline.affinity import num_matching
from headrace.discipline.placement import WorkerView

__all__ = ["MAX_ASIDE", "MAX_ASIDE_DELIVERIES", "aside_s"]

MAX_ASIDE: Final = 8
"""Requests that a worker has set aside at once: how far past the head of the queues it looks."""
MAX_ASIDE_DELIVERIES: Final = 16
"""Deliveries after which a request starts wherever it is fetched; fewer where there are fewer workers."""
_DELIVERIES_PER_WORKER: Final = 2
_SECONDS_PER_BLOCK: Final = 0.004
"""A small part of what reading a block of a prompt takes, on any engine."""


def aside_s(
    hashes: Sequence[str],
    prefixes: frozenset[str],
    others: Iterable[WorkerView],
    need_tokens: int,
    *,
    num_delivered: int,
    num_aside: int,
) -> float:
    """Seconds to set a fetched request aside, 0 for starting it here: 4 ms for each block that another has and we lack.

    `prefixes` are those this worker served last, `others` the other workers of the pool as their heartbeats show them;
    one counts if it is up and could run the request in time, whether or not it has room now. Meanwhile the request
    takes no room, and what comes after it is fetched. As soon as the worker is full it goes back to the head of its
    queue, where the next worker with room looks whether it is warm there (delay scheduling: Zaharia et al., EuroSys
    2010). If there is room when the time is over, it starts here.

    So room is never kept from it for longer than 64 ms, and it is set aside at most twice for each worker of the pool
    and 16 times in all. `num_delivered` is the broker's count, 1 at the first; `num_aside` how many are set aside here.
    """
    if num_aside >= MAX_ASIDE or num_delivered >= MAX_ASIDE_DELIVERIES or not hashes:
        return 0.0
    up = [other for other in others if other.state in ("Ready", "Busy") and other.could_ever_run(need_tokens)]
    if num_delivered > _DELIVERIES_PER_WORKER * len(up):
        return 0.0
    most = max((num_matching(hashes, other.prefixes) for other in up), default=0)
    return max(0, most - num_matching(hashes, prefixes)) * _SECONDS_PER_BLOCK
