"""Whether an engine's memory only grows: a pure rule over what was seen of it."""

from collections.abc import Sequence
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
    """What the last of them show that only grew, `NUM_SAMPLES` at least; for people, empty where they show nothing.

    They grew by a tenth and 64 MiB in all. While it was idle all along that is a leak, for there is nothing to keep it
    for. Under load it may be a cache that fills, so it counts only once memory is scarce.
    """
    growing = _growing(samples)
    now = growing[-1] if growing else None
    idle = [each for each in growing if now is not None and each.num_served == now.num_served]
    if all(each.is_idle for each in idle) and (grown := _grown(idle)):
        return f"{grown} while idle"
    if now is not None and now.free_ratio is not None and now.free_ratio < _SCARCE and (grown := _grown(growing)):
        return f"{grown}, and {100 * now.free_ratio:.0f} % is free"
    return ""


def _growing(samples: Sequence[MemorySample]) -> list[MemorySample]:
    """The last ones, each of which is larger than the one before."""
    first = max(0, len(samples) - 1)
    while first > 0 and samples[first - 1].used_bytes < samples[first].used_bytes:
        first -= 1
    return list(samples[first:])


def _grown(samples: Sequence[MemorySample]) -> str:
    """By how much, if by enough."""
    if len(samples) < NUM_SAMPLES:
        return ""
    first, now = samples[0], samples[-1]
    if now.used_bytes - first.used_bytes < max(_MIN_BYTES, _MIN_RATIO * first.used_bytes):
        return ""
    return f"{_gib(first.used_bytes)} → {_gib(now.used_bytes)} GiB in {_duration(now.at_s - first.at_s)}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.2f}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
