"""What a set of samples says: pure, and no more than they support."""

import math
from collections.abc import Iterable, Sequence

import msgspec

__all__ = ["Distribution", "distribution", "in_ms", "middle"]


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """`n` samples by nearest rank: each figure is one of them. Fewer than 100 have their maximum as p99."""

    n: int
    min: float
    p50: float
    p90: float
    p99: float
    max: float


def distribution(samples: Iterable[float]) -> Distribution | None:
    """The distribution of the samples, in their unit; None of none."""
    ordered = sorted(samples)
    if not ordered:
        return None
    return Distribution(
        n=len(ordered),
        min=ordered[0],
        p50=_nearest_rank(ordered, 0.50),
        p90=_nearest_rank(ordered, 0.90),
        p99=_nearest_rank(ordered, 0.99),
        max=ordered[-1],
    )


def middle(samples: Sequence[float]) -> float:
    """The median by nearest rank; of an even number the lower one of the two in the middle."""
    return _nearest_rank(sorted(samples), 0.5)


def in_ms(seconds: Iterable[float]) -> list[float]:
    """Milliseconds, to the microsecond."""
    return [round(1000 * each, 3) for each in seconds]


def _nearest_rank(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
