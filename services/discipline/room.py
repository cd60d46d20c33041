"""Room on one worker: what its memory carries to the last token, who starts in it, and what may be fetched for it."""

from collections.abc import Sequence
from typing import Final

import msgspec

__all__ = ["UNLIMITED_TOKENS", "Room", "Waiter", "fetchable_tokens", "num_fetchable", "startable"]

UNLIMITED_TOKENS: Final = 2**53
"""What fits where an engine does not tell its capacity."""


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's memory and slots. Tokens are KV tokens; a capacity of None is not known, so only slots count.

    Above the engine's high-water mark nothing starts, whatever is free. `peak_tokens` is the most the capacity ever
    was, where it follows free memory; None: it stands still.
    """

    capacity_tokens: int | None
    peak_tokens: int | None = None
    reserved_tokens: int = 0
    max_concurrency: int = 1
    num_running: int = 0
    is_above_high_water: bool = False

    @property
    def free_tokens(self) -> int | None:
        """Tokens not reserved; None where the capacity is not known."""
        return None if self.capacity_tokens is None else max(0, self.capacity_tokens - self.reserved_tokens)

    @property
    def has_slot(self) -> bool:
        """Whether one more may run, memory aside."""
        return self.num_running < self.max_concurrency and not self.is_above_high_water

    def could_ever_fit(self, need_tokens: int) -> bool:
        """Whether it fits when nothing else runs."""
        return self.capacity_tokens is None or need_tokens <= self.capacity_tokens

    def may_yet_fit(self, need_tokens: int) -> bool:
        """Whether it fits when nothing else runs, now or once others give memory back that was free before."""
        return self.could_ever_fit(need_tokens) or (self.peak_tokens is not None and need_tokens <= self.peak_tokens)

    def fits(self, need_tokens: int) -> bool:
        """Whether it can be carried to its last token beside what runs now."""
        if not self.has_slot:
            return False
        return self.capacity_tokens is None or self.reserved_tokens + need_tokens <= self.capacity_tokens

    def with_one_more(self, need_tokens: int) -> "Room":
        """The room after one more has started."""
        return msgspec.structs.replace(
            self, reserved_tokens=self.reserved_tokens + need_tokens, num_running=self.num_running + 1
        )


class Waiter(msgspec.Struct, frozen=True, kw_only=True):
    """A request a worker has fetched and not started. `is_interrupted`: it was running before, here or elsewhere."""

    need_tokens: int
    waited_s: float = 0.0
    is_interrupted: bool = False


class _Plan(msgspec.Struct, frozen=True):
    """Who starts, the room after that, and whether it is kept for somebody."""

    starting: list[int]
    room: Room
    is_kept: bool


def startable(room: Room, waiters: Sequence[Waiter], *, ageing_s: float) -> list[int]:
    """Indexes of the waiters to start now, in this order; `waiters` come by lane, then in order of arrival.

    Interrupted ones go first, then as they come. Smaller ones start around one that does not fit, until that one has
    waited `ageing_s`: then the room is kept for it, and nothing behind it starts. For an interrupted one room is kept
    at once. One that does not fit an empty worker keeps nothing from anybody.
    """
    return _plan(room, waiters, ageing_s).starting


def fetchable_tokens(room: Room, waiters: Sequence[Waiter], *, ageing_s: float, max_waiters: int) -> int:
    """KV tokens that a request fetched now may need in order to start at once; 0: fetch nothing.

    What `startable` names counts as started. 0 too while room is kept for a waiter, or `max_waiters` are held: what
    is fetched blind and does not fit becomes one of them. `UNLIMITED_TOKENS` where the capacity is not known.
    """
    plan = _plan(room, waiters, ageing_s)
    num_left = len(waiters) - len(plan.starting)
    if plan.is_kept or num_left >= max_waiters or not plan.room.has_slot:
        return 0
    return UNLIMITED_TOKENS if plan.room.free_tokens is None else plan.room.free_tokens


def num_fetchable(
    room: Room, waiters: Sequence[Waiter], *, need_tokens: int, limit: int, ageing_s: float, max_waiters: int
) -> int:
    """How many requests may be fetched at once, `limit` at most: all would start beside each other, if none needs more
    than `need_tokens`. One may be fetched wherever `fetchable_tokens` lets it, whatever it needs.
    """
    if not fetchable_tokens(room, waiters, ageing_s=ageing_s, max_waiters=max_waiters):
        return 0
    number, left = 1, _plan(room, waiters, ageing_s).room.with_one_more(need_tokens)
    while number < limit and left.fits(need_tokens):
        number, left = number + 1, left.with_one_more(need_tokens)
    return number


def _plan(room: Room, waiters: Sequence[Waiter], ageing_s: float) -> _Plan:
    starting: list[int] = []
    for index in sorted(range(len(waiters)), key=lambda index: not waiters[index].is_interrupted):
        waiter = waiters[index]
        if room.fits(waiter.need_tokens):
            starting.append(index)
            room = room.with_one_more(waiter.need_tokens)
        elif room.could_ever_fit(waiter.need_tokens) and (waiter.is_interrupted or waiter.waited_s >= ageing_s):
            return _Plan(starting, room, is_kept=True)
    return _Plan(starting, room, is_kept=False)
