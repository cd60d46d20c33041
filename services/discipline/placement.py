"""Where a fetched request belongs that cannot start at once: here, with another worker, or nowhere."""

import enum
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from headrace.discipline.company import NOBODY, Guest, is_welcome
from headrace.discipline.room import Room
from headrace.schemas.workers import Heartbeat, WorkerState

__all__ = ["MAX_HAND_BACKS", "MAX_HAND_BACKS_TO_IDLE", "Placement", "WorkerView", "patience_s", "place", "view_of"]

MAX_HAND_BACKS: Final = 3
"""Deliveries after which a request is given at once only to a worker that does nothing at all, to others later."""
MAX_HAND_BACKS_TO_IDLE: Final = 8
"""Deliveries after which one that fits here, in time, rests before it is given to an idle worker too."""
_REST_S: Final = 0.1
"""How long one that went to and fro is held before it goes on: ten hand-backs a second at most."""
_FIRST_PATIENCE_S: Final = 0.25
_MAX_PATIENCE_S: Final = 2.0


class Placement(enum.Enum):
    """What becomes of it."""

    HOLD = "hold"
    """Keep it, and ask again."""
    HAND_BACK = "hand_back"
    """Give it back to its queue and wake the worker named, which would start it, or could in time where this cannot."""
    NEVER = "never"
    """No live worker of the pool could ever run it, not even with the most memory it ever had."""


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as its last heartbeat shows it. `prefixes` are the hashes it served last, `num_faulted` and
    `num_unproven` its company as `discipline.company` counts it.
    """

    worker: str
    room: Room
    num_waiting: int = 0
    num_faulted: int = 0
    num_unproven: int = 0
    state: WorkerState = "Ready"
    fetchable_tokens: int | None = None
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

    def would_start(self, need_tokens: int, guest: Guest = NOBODY) -> bool:
        """Whether it starts such a request at once, in company that is fit for it: by its own word; where it gives none
        if it is ready, has room and holds nobody before it.
        """
        if not is_welcome(guest, num_faulted=self.num_faulted, num_unproven=self.num_unproven):
            return False
        if self.fetchable_tokens is not None:
            return need_tokens <= self.fetchable_tokens
        return self.state == "Ready" and self.num_waiting == 0 and self.room.fits(need_tokens)

    def could_ever_run(self, need_tokens: int) -> bool:
        """Whether it is there to stay and fits it when empty; one that starts, or restarts its engine, may yet."""
        return self.state != "Draining" and self.room.could_ever_fit(need_tokens)

    def may_yet_run(self, need_tokens: int) -> bool:
        """The same, once others give memory back."""
        return self.state != "Draining" and self.room.may_yet_fit(need_tokens)


def view_of(beat: Heartbeat, *, prefixes: Iterable[str] = ()) -> WorkerView:
    """A worker by its heartbeat; a Busy one starts nothing."""
    return WorkerView(
        worker=beat.worker,
        room=Room(
            capacity_tokens=beat.capacity_tokens,
            peak_tokens=beat.peak_tokens,
            reserved_tokens=beat.kv_reserved_tokens,
            max_concurrency=beat.max_concurrency,
            num_running=beat.running,
            is_above_high_water=beat.state == "Busy",
        ),
        num_waiting=beat.waiting,
        num_faulted=beat.faulted,
        num_unproven=beat.unproven,
        state=beat.state,
        fetchable_tokens=beat.fetchable_tokens,
        prefixes=frozenset(prefixes),
    )


def place(
    need_tokens: int,
    room: Room,
    others: Sequence[WorkerView],
    *,
    num_delivered: int,
    held_s: float = 0.0,
    guest: Guest = NOBODY,
) -> tuple[Placement, str | None]:
    """What to do with a fetched request that `startable` does not name, and the worker it is meant for, if any.

    Either it does not fit now, or room is kept for another, or its company here would not be fit for it (`guest`). To
    be asked as it comes, when a heartbeat changes, and at each look around. `others` are the other live workers of the
    pool, `num_delivered` is the broker's count, 1 at the first, and `held_s` how long it has been here this time.

    It goes to the worker with most room of those that would start it now, at each further delivery to another of them.
    At once up to `MAX_HAND_BACKS` deliveries, then, if it could run here in time, to an idle one only, and after
    `MAX_HAND_BACKS_TO_IDLE` to none; but to any once it was held for 0.1 s. So it cannot spin, even by heartbeats that
    are out of date, and stays beside no worker with room. What can never run here goes to one that could run it in
    time where nobody would start it, after a while (`patience_s`).
    """
    able = [other for other in others if other.could_ever_run(need_tokens)]
    ready = [other for other in able if other.would_start(need_tokens, guest)]
    is_quick = num_delivered <= MAX_HAND_BACKS
    could_fit = room.could_ever_fit(need_tokens)
    if not able and not could_fit:
        may_yet = room.may_yet_fit(need_tokens) or any(other.may_yet_run(need_tokens) for other in others)
        return (Placement.HOLD if may_yet else Placement.NEVER), None
    if ready and (is_quick or held_s >= _REST_S):
        goes = ready
    elif could_fit:
        goes = [other for other in ready if other.is_idle] if num_delivered <= MAX_HAND_BACKS_TO_IDLE else []
    elif ready:
        goes = []
    else:
        goes = able if held_s >= patience_s(num_delivered) else []
    return (Placement.HAND_BACK, _next(goes, num_delivered).worker) if goes else (Placement.HOLD, None)


def patience_s(num_delivered: int) -> float:
    """Seconds to hold what can never run here and nobody would start: 0.25, doubled at each delivery, at most 2."""
    return min(_MAX_PATIENCE_S, _FIRST_PATIENCE_S * 2.0 ** min(16, max(0, num_delivered - 1)))


def _next(workers: Sequence[WorkerView], num_delivered: int) -> WorkerView:
    """The one with most room, and at each further delivery another: the one before may not have heard of it."""
    ordered = sorted(workers, key=lambda each: (each.load_ratio, each.worker))
    return ordered[(num_delivered - 1) % len(ordered)]
