"""Which fetched requests a worker sets aside for a moment, since another has more of their beginning in its cache."""

from collections.abc import Iterable, Sequence
from typing import Final

from headrace.discipline.affinity import num_matching
from headrace.discipline.placement import WorkerView

__all__ = ["MAX_ASIDE", "MAX_ASIDE_DELIVERIES", "aside_s"]

MAX_ASIDE: Final = 8
"""Requests that a worker has set aside at once: how far past the head of the queues it looks."""
MAX_ASIDE_DELIVERIES: Final = 16
"""Deliveries at which a request starts wherever it is fetched; fewer where there are fewer workers."""
_DELIVERIES_PER_WORKER: Final = 2
_SECONDS_PER_BLOCK: Final = 0.003
"""A small part of what reading a block of a prompt takes."""
_ENOUGH_S: Final = 0.015
"""In which a worker with more to fetch fills up."""


def aside_s(
    hashes: Sequence[str],
    prefixes: frozenset[str],
    others: Iterable[WorkerView],
    need_tokens: int,
    *,
    num_delivered: int,
    num_aside: int,
) -> float:
    """Seconds to set a fetched request aside at most; 0: start it here.

    To be asked of a request that fits here and never ran. `prefixes` are those this worker served last, `others` the
    other workers of its pool as their heartbeats show them; one counts if it is up and could run the request in time,
    whether or not it has room now. `num_delivered` is the broker's count, 1 at the first, `num_aside` how many are set
    aside here.

    While it is set aside it takes no room, and what comes after it is fetched. As soon as the worker is full it goes
    back to the head of its queue, where the next worker that gets room looks whether it is warm there (delay
    scheduling: Zaharia et al., EuroSys 2010). If there is room when the time is over, it starts here. The time is 3 ms
    for each block that another has and we lack, divided by the number of deliveries, and 15 ms at least: 48 ms at most,
    0.27 s over all deliveries. A request is set aside twice for each of the other workers at most, and 15 times in all.
    """
    if num_aside >= MAX_ASIDE or num_delivered >= MAX_ASIDE_DELIVERIES or not hashes:
        return 0.0
    able = [other for other in others if other.state in ("Ready", "Busy") and other.could_ever_run(need_tokens)]
    if num_delivered > _DELIVERIES_PER_WORKER * len(able):
        return 0.0
    most = max((num_matching(hashes, other.prefixes) for other in able), default=0)
    num_lacking = most - num_matching(hashes, prefixes)
    return max(_ENOUGH_S, num_lacking * _SECONDS_PER_BLOCK / max(1, num_delivered)) if num_lacking > 0 else 0.0
