"""Who starts in a worker's memory: fetched requests wait here until the discipline lets them in."""

import asyncio
import time
from collections.abc import Callable
from typing import Final, Literal

from headrace.discipline.company import NOBODY, Asking, Guest, admissible
from headrace.discipline.room import Room, Waiter, startable
from headrace.schemas.subjects import LANES
from headrace.worker.held import Held
from headrace.worker.ledger import Ledger
from headrace.worker.watermarks import Watermarks, effective_concurrency

__all__ = ["Gate", "PausedBy"]

PausedBy = Literal["engine", "operator"]
"""Why nobody is let in: the engine is down and would fail them at once, or somebody paused the model."""

_NEED_WEIGHT: Final = 0.1
_LANE_RANK: Final = {lane: rank for rank, lane in enumerate(LANES)}


class _Waiting:
    """One request at the gate; `is_in` once its need is reserved, `is_kept_out` while its company would not be fit."""

    def __init__(self, held: Held, need_tokens: int, *, is_interrupted: bool, guest: Guest, number: int) -> None:
        self.held = held
        self.need_tokens = need_tokens
        self.is_interrupted = is_interrupted
        self.guest = guest
        self.number = number
        self.is_kept_out = False
        self.since = time.monotonic()
        self.is_in = asyncio.Event()


class Gate:
    """Reserves memory for those that `discipline.room.startable` names, the moment there is room for them.

    Those that `discipline.company.admissible` does not name wait aside, and keep nothing from anybody at the gate. What
    is fetched leaves room for them until their patience is at an end; from then on they count as kept back.

    Nothing else reserves, so what runs and what was let in is always within the ledger's capacity. Whoever entered
    leaves again, let in or not. `on_change` is called when somebody begins or ends to wait. Above the high-water mark
    of `marks`, or while those say that the engine is silent, nobody is let in; call `look` when room was made
    otherwise. While it `is_paused`, for whatever reason, nobody is let in either, and everybody at the gate is to be
    handed back. While it is in doubt whether the engine lives, nobody is let in, and whoever was waits to begin
    (`may_begin`).
    """

    def __init__(self, ledger: Ledger, *, ageing_s: float, on_change: Callable[[], None]) -> None:
        self._ledger = ledger
        self._ageing_s = ageing_s
        self._on_change = on_change
        self._waiting: dict[Held, _Waiting] = {}
        self._inside: dict[Held, Guest] = {}
        self._num_entered = 0
        self._is_closed = False
        self._paused_by: set[PausedBy] = set()
        self._num_doubts = 0
        self._is_sure = asyncio.Event()
        self._is_sure.set()
        self._usual_need: float | None = None
        self.marks = Watermarks()

    def __contains__(self, held: Held) -> bool:
        """Whether it was let in."""
        return held in self._ledger

    @property
    def is_paused(self) -> bool:
        """Whether there is a reason to let nobody in."""
        return bool(self._paused_by)

    @property
    def room(self) -> Room:
        """The worker's room now."""
        is_above = self.marks.is_above or self.marks.is_silent or self._num_doubts > 0
        return self._ledger.room(is_above_high_water=is_above)

    @property
    def waiters(self) -> list[Waiter]:
        """Those that wait for room, in the order in which they would start."""
        return [self._as_waiter(each) for each in self._in_order() if not each.is_kept_out]

    @property
    def num_faulted(self) -> int:
        """Requests here, inside or at the gate, that a worker or an engine was lost with before."""
        at_the_gate = (waiting.guest for waiting in self._waiting.values())
        return sum(guest.has_fault for guest in (*self._inside.values(), *at_the_gate))

    @property
    def num_unproven(self) -> int:
        """Requests inside that are on probation."""
        return sum(guest.is_unproven for guest in self._inside.values())

    def enter(self, held: Held, need_tokens: int, *, is_interrupted: bool, guest: Guest = NOBODY) -> bool:
        """Ask to start; whether it was let in at once. `is_interrupted`: it was running before, as `guest` tells."""
        if held in self:  # let in since it last asked
            return True
        if held not in self._waiting:
            self._num_entered += 1
            self._waiting[held] = _Waiting(
                held, need_tokens, is_interrupted=is_interrupted, guest=guest, number=self._num_entered
            )
            self.look()
        if held not in self._waiting:
            return True
        self._tell(self._waiting[held])
        return False

    async def let_in(self, held: Held, *, timeout_s: float) -> bool:
        """Wait until it is let in, and say whether it was; it goes on waiting in its place where it was not.

        Patience runs out without anything else happening, so that is looked at once the time is over.
        """
        waiting = self._waiting.get(held)
        if waiting is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await waiting.is_in.wait()
            except TimeoutError:
                if waiting.guest.has_fault:
                    self.look()
        return held in self

    def note_progress(self, held: Held, num_tokens: int) -> None:
        """One inside has made so many tokens in this attempt, which may end its probation."""
        guest = self._inside.get(held)
        if guest is not None and guest.is_unproven:
            self._inside[held] = guest.after(num_tokens)
            if not self._inside[held].is_unproven:
                self.look()

    def leave(self, held: Held) -> None:
        """It ended, or is handed back: give up its place or its memory, and let others in."""
        self._waiting.pop(held, None)
        self._inside.pop(held, None)
        held.is_waiting = False
        self._ledger.release(held)
        self.look()

    def close(self) -> None:
        """Let nobody in any more, and let nobody wait."""
        self._is_closed = True
        for waiting in self._waiting.values():
            waiting.is_in.set()

    def pause(self, by: PausedBy = "engine") -> None:
        """Let nobody in, and let nobody wait, until `resume` by the same."""
        self._paused_by.add(by)
        for waiting in self._waiting.values():
            waiting.is_in.set()

    def resume(self, by: PausedBy = "engine") -> None:
        """That reason is gone; others may stay."""
        was_paused = self.is_paused
        self._paused_by.discard(by)
        if self.is_paused or not was_paused:
            return
        for waiting in self._waiting.values():
            waiting.is_in.clear()
        self.look()

    def doubt(self) -> None:
        """The engine failed a request, and may be dead: until as many calls of `trust` nobody begins."""
        self._num_doubts += 1
        self._is_sure.clear()

    def trust(self) -> None:
        """One doubt is settled: the engine lives, or the gate is paused by now."""
        self._num_doubts -= 1
        if not self._num_doubts:
            self._is_sure.set()
            self.look()
            self._on_change()

    async def may_begin(self) -> bool:
        """Whether somebody who was let in may begin, once that is known; else it is to be handed back."""
        await self._is_sure.wait()
        return not self.is_paused

    def look(self) -> None:
        """Let in whoever may start now."""
        if self._is_closed or self.is_paused:
            return
        ordered = self._in_order()
        indexes = admissible(self._inside.values(), [self._as_asking(each) for each in ordered])
        admitted = [ordered[index] for index in indexes]
        for waiting in ordered:
            waiting.is_kept_out = True
        for waiting in admitted:
            waiting.is_kept_out = False
        for index in startable(self.room, [self._as_waiter(each) for each in admitted], ageing_s=self._ageing_s):
            waiting = admitted[index]
            if not self._ledger.reserve(waiting.held, waiting.need_tokens):
                break  # the room is less than it seemed; it is measured again soon
            self._note_need(waiting.need_tokens)
            del self._waiting[waiting.held]
            self._inside[waiting.held] = waiting.guest
            waiting.is_in.set()
        for waiting in ordered:
            self._tell(waiting)

    def effective_concurrency(self, *, default_need_tokens: int) -> int:
        """How many requests memory lets run at once; of the usual need here, or of a default before there is one."""
        usual = self._usual_need if self._usual_need is not None else float(default_need_tokens)
        return effective_concurrency(self.room, usual_need_tokens=usual)

    def _tell(self, waiting: _Waiting) -> None:
        held = waiting.held
        is_waiting = held in self._waiting and not waiting.is_kept_out
        is_backing_off = waiting.is_kept_out and time.monotonic() - waiting.since >= waiting.guest.patience_s
        if (held.is_waiting, held.is_backing_off) != (is_waiting, is_backing_off):
            held.is_waiting, held.is_backing_off = is_waiting, is_backing_off
            self._on_change()

    def _note_need(self, need_tokens: int) -> None:
        known = self._usual_need
        self._usual_need = need_tokens if known is None else known + _NEED_WEIGHT * (need_tokens - known)

    def _in_order(self) -> list[_Waiting]:
        return sorted(self._waiting.values(), key=lambda each: (_LANE_RANK[each.held.delivery.queue.lane], each.number))

    @staticmethod
    def _as_asking(waiting: _Waiting) -> Asking:
        return Asking(
            guest=waiting.guest,
            waited_s=time.monotonic() - waiting.since,
            sequence=waiting.held.delivery.sequence,
        )

    @staticmethod
    def _as_waiter(waiting: _Waiting) -> Waiter:
        return Waiter(
            need_tokens=waiting.need_tokens,
            waited_s=time.monotonic() - waiting.since,
            is_interrupted=waiting.is_interrupted,
        )
