"""Whether an engine's memory only grows: a pure rule over what was seen of it."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import msgspec

__all__ = ["NUM_SAMPLES", "MemorySample", "growth_of"]

NUM_SAMPLES: Final = 8
"""In a row, each larger than the one before. What an engine keeps for later grows for a while, and then does not."""
_MIN_RATIO: Final = 0.1
_MIN_BYTES: Final = 64 << 20
_SCARCE: Final = 0.1
"""Share of all memory; below it growth under load is an end that can be foreseen."""


class MemorySample(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's processes had at one moment, `num_served` requests after its start.

    `is_idle`: nothing ran then. `free_ratio` is the share of all memory of that kind that was free, if that is known.
    """

    at_s: float
    used_bytes: int
    num_served: int
    is_idle: bool
    free_ratio: float | None = None


def growth_of(samples: Sequence[MemorySample]) -> str:
    """What the last `NUM_SAMPLES` show, for people; empty where they show nothing.

    They grew each time, by a tenth and 64 MiB in all. While it was idle all along that is a leak, for there is nothing
    to keep it for. Under load it may be a cache that fills, so it counts only once memory is scarce.
    """
    last = samples[-NUM_SAMPLES:]
    if len(last) < NUM_SAMPLES:
        return ""
    if any(after.used_bytes <= before.used_bytes for before, after in pairwise(last)):
        return ""
    first, now = last[0], last[-1]
    if now.used_bytes - first.used_bytes < max(_MIN_BYTES, _MIN_RATIO * first.used_bytes):
        return ""
    grown = f"{_gib(first.used_bytes)} → {_gib(now.used_bytes)} GiB in {_duration(now.at_s - first.at_s)}"
    if all(each.is_idle for each in last) and now.num_served == first.num_served:
        return f"{grown} while idle"
    if now.free_ratio is not None and now.free_ratio < _SCARCE:
        return f"{grown}, and {100 * now.free_ratio:.0f} % is free"
    return ""


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.2f}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
