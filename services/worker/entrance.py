"""How a fetched request gets a place in an engine's memory: here, with another worker, or nowhere."""

import enum
import time
from collections.abc import Callable, Iterable
from typing import Final

from headrace.discipline.company import GRACE_S, Guest, guest_of
from headrace.discipline.placement import Placement, place
from headrace.lifecycle import wait_first
from headrace.schemas.jobs import Job
from headrace.schemas.refusals import Refusal
from headrace.schemas.states import JobState
from headrace.schemas.subjects import QueueName
from headrace.telemetry import Span
from headrace.worker.gate import Gate
from headrace.worker.held import Held
from headrace.worker.neighbours import Neighbours
from headrace.worker.planning import Plan
from headrace.worker.settling import Settler

__all__ = ["Entrance", "Entry"]

_LOOK_AROUND_S: Final = 0.1
"""How often one that does not fit here looks for a worker where it would start."""
_LOOK_AROUNDS: Final = 9
"""Looks around after which its log is read again: it may have been cancelled, or its time be up."""
_LENT_RETRY_S: Final = 2.0
_MAY_RETURN_S: Final = 5.0
"""How long one is kept that no live worker could ever run: the one that could may be about to start again."""


class Entry(enum.Enum):
    """What came of asking for a place. AGAIN: it waits in its place, and its log should be read before it waits on.
    GONE: nothing is left to do here.
    """

    IN = "in"
    AGAIN = "again"
    GONE = "gone"


class Entrance:
    """Leads planned requests to the gate, or back to their queues, as `discipline.placement` says.

    `servers_of` says which pools' workers may run a pool's requests, `refund` takes a queue and tokens that it was
    charged for and did not use here, `room_changed` is called when one takes no place here any more.
    """

    def __init__(
        self,
        *,
        gate: Gate,
        neighbours: Neighbours,
        settler: Settler,
        pool: str,
        max_faults: int,
        servers_of: Callable[[str], Iterable[str]],
        refund: Callable[[QueueName, int], None],
        room_changed: Callable[[], None],
    ) -> None:
        self._gate = gate
        self._neighbours = neighbours
        self._settler = settler
        self._pool = pool
        self._max_faults = max_faults
        self._servers_of = servers_of
        self._refund = refund
        self._room_changed = room_changed

    async def enter(self, held: Held, job: Job, plan: Plan, state: JobState, span: Span) -> Entry:
        """Get it a place in the engine's memory, here or with another worker."""
        guest = guest_of(state, max_faults=self._max_faults)
        can_run_here = self._gate.room.could_ever_fit(plan.need_tokens)
        is_in = can_run_here and self._gate.enter(held, plan.need_tokens, is_interrupted=state.was_started, guest=guest)
        if not can_run_here:  # out of the way of those that can
            held.is_backing_off = True
            self._gate.leave(held)
            self._room_changed()
        for number in range(_LOOK_AROUNDS):
            if self._settler.draining.is_set() or self._gate.is_paused:
                await self.hand_back(held, job)
                return Entry.GONE
            if is_in:
                return Entry.IN
            if held.is_void:
                return Entry.GONE
            is_in_grace = guest.is_unproven and number == 0
            entry = await self._elsewhere(held, job, plan, state, guest, span) if not is_in_grace else None
            if entry is not None:
                return entry
            if can_run_here:
                is_in = await self._gate.let_in(held, timeout_s=GRACE_S if is_in_grace else _LOOK_AROUND_S)
            else:
                await wait_first(self._settler.draining, timeout_s=_LOOK_AROUND_S)
        return Entry.IN if is_in else Entry.AGAIN

    async def hand_back(self, held: Held, job: Job, delay_s: float = 0.0, *, to: str | None = None) -> None:
        """Give it back to its queue; it takes no place here from now on."""
        held.is_backing_off = True
        self._gate.leave(held)
        self._room_changed()
        await self._settler.hand_back(held, job, delay_s=delay_s, to=to)

    async def _elsewhere(
        self, held: Held, job: Job, plan: Plan, state: JobState, guest: Guest, span: Span
    ) -> Entry | None:
        """Hand it to a worker that would start it, or end it where none ever could; None: keep it here for now."""
        others = await self._neighbours.of_pools(self._servers_of(held.delivery.queue.pool))
        if others is None or held in self._gate:
            return None
        held_s = time.monotonic() - held.since
        where, other = place(
            plan.need_tokens,
            self._gate.room,
            others,
            num_delivered=held.delivery.num_delivered,
            held_s=held_s,
            guest=guest,
        )
        is_own = held.delivery.queue.pool == self._pool
        if where is Placement.NEVER and not is_own:  # its own pool's workers may come yet
            self._refund(held.delivery.queue, job.need_tokens)
            await self.hand_back(held, job, _LENT_RETRY_S)
            return Entry.GONE
        if where is Placement.NEVER and held_s >= _MAY_RETURN_S:
            is_ended = await self._settler.end(held, job, state, self._too_large(plan), span)
            return Entry.GONE if is_ended else Entry.AGAIN
        if where is Placement.HAND_BACK:
            self._refund(held.delivery.queue, job.need_tokens)
            await self.hand_back(held, job, to=other)
            return Entry.GONE
        return None

    def _too_large(self, plan: Plan) -> Refusal:
        return Refusal(
            code="exceeds_capacity",
            message=f"the request needs {plan.need_tokens} KV tokens; no worker that may run it has that many, "
            f"this one has {self._gate.room.capacity_tokens}",
        )
