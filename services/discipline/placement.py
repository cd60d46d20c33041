"""Where a fetched request belongs that cannot start at once: here, with another worker, or nowhere."""

import enum
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from headrace.discipline.room import Room
from headrace.schemas.workers import Heartbeat, WorkerState

__all__ = [
    "MAX_HAND_BACKS",
    "MAX_HAND_BACKS_TO_IDLE",
    "Placement",
    "WorkerView",
    "hand_back_delay_s",
    "place",
    "view_of",
]

MAX_HAND_BACKS: Final = 3
"""Deliveries after which a request is given only to a worker that does nothing at all."""
MAX_HAND_BACKS_TO_IDLE: Final = 8
"""Deliveries after which one that fits here, in time, stays."""
_FIRST_DELAY_S: Final = 0.25
_MAX_DELAY_S: Final = 8.0


class Placement(enum.Enum):
    """What becomes of it."""

    HOLD = "hold"
    """Keep it until there is room here."""
    HAND_BACK = "hand_back"
    """The worker named would start it now."""
    HAND_BACK_LATER = "hand_back_later"
    """It can never run here; the worker named could run it, not now. Hand back with a delay."""
    NEVER = "never"
    """No live worker of the pool could ever run it."""


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as its last heartbeat shows it. `prefixes` are the hashes it served last."""

    worker: str
    room: Room
    num_waiting: int = 0
    state: WorkerState = "Ready"
    prefixes: frozenset[str] = frozenset()

    @property
    def load_ratio(self) -> float:
        """How full it is, 0 to 1 and above: by slots or by memory, whichever is more; held requests take slots."""
        slots = (self.room.num_running + self.num_waiting) / max(1, self.room.max_concurrency)
        capacity = self.room.capacity_tokens
        return max(slots, self.room.reserved_tokens / capacity) if capacity else slots

    @property
    def is_idle(self) -> bool:
        """Whether it could run something and does nothing."""
        return self.state == "Ready" and self.room.num_running == 0 and self.num_waiting == 0

    def would_start(self, need_tokens: int) -> bool:
        """Whether it starts such a request at once: ready, with room, and nobody held before it."""
        return self.state == "Ready" and self.num_waiting == 0 and self.room.fits(need_tokens)

    def could_ever_run(self, need_tokens: int) -> bool:
        """Whether it is there to stay and fits it when empty; one that is starting may yet."""
        return self.state in ("Starting", "Ready", "Busy") and self.room.could_ever_fit(need_tokens)


def view_of(beat: Heartbeat, *, prefixes: Iterable[str] = ()) -> WorkerView:
    """A worker by its heartbeat, in which a capacity of 0 means that it is not known; a Busy one starts nothing."""
    return WorkerView(
        worker=beat.worker,
        room=Room(
            capacity_tokens=beat.kv_capacity_tokens or None,
            reserved_tokens=beat.kv_reserved_tokens,
            max_concurrency=beat.max_concurrency,
            num_running=beat.running,
            is_above_high_water=beat.state == "Busy",
        ),
        num_waiting=beat.waiting,
        state=beat.state,
        prefixes=frozenset(prefixes),
    )


def place(
    need_tokens: int, room: Room, others: Sequence[WorkerView], *, num_delivered: int
) -> tuple[Placement, str | None]:
    """What to do with a fetched request that does not start now, and the worker it is meant for, if any.

    `others` are the other live workers of the pool; `num_delivered` is the broker's count, 1 at the first. A request
    goes only to a worker that would start it now, the one with most room; after `MAX_HAND_BACKS` deliveries only to
    an idle one, after `MAX_HAND_BACKS_TO_IDLE` it stays. So it cannot go round for ever, even by stale heartbeats.
    One that can never run here goes back in any case.
    """
    able = [other for other in others if other.could_ever_run(need_tokens)]
    ready = [other for other in able if other.would_start(need_tokens)]
    if not room.could_ever_fit(need_tokens):
        if ready:
            return Placement.HAND_BACK, _roomiest(ready).worker
        return (Placement.HAND_BACK_LATER, _roomiest(able).worker) if able else (Placement.NEVER, None)
    if room.fits(need_tokens) or num_delivered > MAX_HAND_BACKS_TO_IDLE:
        return Placement.HOLD, None
    if num_delivered > MAX_HAND_BACKS:
        ready = [other for other in ready if other.is_idle]
    return (Placement.HAND_BACK, _roomiest(ready).worker) if ready else (Placement.HOLD, None)


def hand_back_delay_s(num_delivered: int) -> float:
    """Seconds for which `HAND_BACK_LATER` keeps a request from everybody: 0.25, doubled at each delivery, at most 8."""
    return min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(16, max(0, num_delivered - 1)))


def _roomiest(workers: Sequence[WorkerView]) -> WorkerView:
    return min(workers, key=lambda each: (each.load_ratio, each.worker))
