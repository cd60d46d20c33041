"""What a tenant used of its limits a minute, as a sliding window that any number of routers write in turn.

Time is cut into slots of half a second. A slot counts until 60 s after its end, so that no 60 seconds, wherever they
begin, have more than the limit.
"""

import math
from typing import Final

import msgspec

__all__ = ["SLOT_S", "WINDOW_S", "Rates", "Slot", "Usage", "Used", "slot_of"]

SLOT_S: Final = 0.5
WINDOW_S: Final = 60.0
_NUM_SLOTS: Final = int(WINDOW_S / SLOT_S) + 1


class Rates(msgspec.Struct, frozen=True):
    """A tenant's limits in any 60 seconds; None is no limit."""

    requests: int | None = None
    tokens: int | None = None

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit."""
        return self.requests is not None or self.tokens is not None


class Used(msgspec.Struct, frozen=True):
    """Requests and their tokens."""

    requests: int = 0
    tokens: int = 0

    def __add__(self, other: "Used") -> "Used":
        return Used(self.requests + other.requests, self.tokens + other.tokens)

    def fits(self, rates: Rates) -> bool:
        """Whether it is within the limits."""
        return (rates.requests is None or self.requests <= rates.requests) and (
            rates.tokens is None or self.tokens <= rates.tokens
        )


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """What was taken within half a second; `at` counts half seconds since 1970 by the broker's clock."""

    at: int
    requests: int
    tokens: int


class Usage(msgspec.Struct, frozen=True):
    """One tenant's record in the usage bucket: written by routers as compare-and-set, slots in order of time."""

    slots: tuple[Slot, ...] = ()

    def used(self, now: float) -> Used:
        """What still counts at `now`."""
        alive = [slot for slot in self.slots if _counts(slot.at, now)]
        return Used(sum(slot.requests for slot in alive), sum(slot.tokens for slot in alive))

    def changed(self, at: int, requests: int, tokens: int, *, now: float) -> "Usage":
        """With that much more taken in slot `at` (less, if negative), without what no longer counts."""
        slots = {slot.at: slot for slot in self.slots if _counts(slot.at, now)}
        if _counts(at, now):
            before = slots.get(at, Slot(at, 0, 0))
            slots[at] = Slot(at, max(0, before.requests + requests), max(0, before.tokens + tokens))
        return Usage(tuple(slots[at] for at in sorted(slots) if slots[at].requests or slots[at].tokens))

    def wait_s(self, wanted: Used, rates: Rates, *, now: float) -> float:
        """Seconds until `wanted` fits, if nobody takes any more; infinite where it is above the limits by itself."""
        if not wanted.fits(rates):
            return math.inf
        used = self.used(now)
        if (used + wanted).fits(rates):
            return 0.0
        for slot in sorted(self.slots, key=lambda slot: slot.at):
            if not _counts(slot.at, now):
                continue
            used = Used(used.requests - slot.requests, used.tokens - slot.tokens)
            if (used + wanted).fits(rates):
                return (slot.at + _NUM_SLOTS) * SLOT_S - now
        return math.inf  # unreachable: without any slot only `wanted` is left


def slot_of(now: float) -> int:
    """The slot of a moment."""
    return int(now // SLOT_S)


def _counts(at: int, now: float) -> bool:
    return now < (at + _NUM_SLOTS) * SLOT_S
