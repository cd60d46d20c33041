"""What a worker sets aside while it looks for something that is warm in its own cache."""

import asyncio
from collections.abc import Callable
from typing import Final

from headrace.discipline.affinity import RecentPrefixes, prefix_hashes
from headrace.discipline.aside import aside_s
from headrace.lifecycle import wait_first
from headrace.schemas.conversation import conversation_texts
from headrace.schemas.jobs import Job
from headrace.schemas.openai import RequestLimits, parse_request
from headrace.schemas.refusals import Refusal
from headrace.schemas.subjects import QueueName
from headrace.worker.entrance import Entrance
from headrace.worker.gate import Gate
from headrace.worker.held import Held
from headrace.worker.neighbours import Neighbours

__all__ = ["Asides"]

_NEIGHBOURS_S: Final = 1.0
"""How old the news of other workers' caches may be; the simulator finds no difference up to 3 s."""


class Asides:
    """Leaves fetched jobs to workers that have more of their beginning, as `discipline.aside` says.

    A job that is set aside is listed and renewed, and takes no room. `is_full` says that nothing more starts here
    beside what has its place; `undo` takes a queue and the tokens that it was charged for a job that goes back there.
    """

    def __init__(
        self,
        *,
        pool: str,
        gate: Gate,
        entrance: Entrance,
        neighbours: Neighbours,
        served: RecentPrefixes,
        draining: asyncio.Event,
        is_full: Callable[[], bool],
        room_changed: Callable[[], None],
        undo: Callable[[QueueName, int], None],
    ) -> None:
        self._pool = pool
        self._gate = gate
        self._entrance = entrance
        self._neighbours = neighbours
        self._served = served
        self._draining = draining
        self._is_full = is_full
        self._room_changed = room_changed
        self._undo = undo
        self._aside: dict[Held, asyncio.Event] = {}

    def __contains__(self, held: Held) -> bool:
        """Whether it is set aside now."""
        return held in self._aside

    def __len__(self) -> int:
        """Jobs that are set aside now."""
        return len(self._aside)

    def look(self) -> None:
        """Somebody started, or the room is less: what is set aside goes back if nothing more starts here."""
        if self._aside and self._is_full():
            for full in self._aside.values():
                full.set()

    async def leaves(self, held: Held, job: Job) -> bool:
        """Whether the job went back to its queue, or was lost to us, after it was set aside for a moment at most."""
        patience_s = await self._patience_s(held, job)
        if not patience_s:
            return False
        full = self._aside[held] = asyncio.Event()
        held.is_backing_off = True
        try:
            self._room_changed()
            await wait_first(full, self._draining, timeout_s=patience_s)
        finally:
            del self._aside[held]
            held.is_backing_off = False
        if held.is_void:
            return True
        if self._gate.room.fits(job.need_tokens) and not self._draining.is_set():
            return False
        self._undo(held.delivery.queue, job.need_tokens)
        await self._entrance.hand_back(held, job)
        return True

    async def _patience_s(self, held: Held, job: Job) -> float:
        """0 for what another pool lent: its own workers were full, or we would not have it."""
        if held.delivery.queue.pool != self._pool or not self._gate.room.fits(job.need_tokens):
            return 0.0
        request = parse_request(job.op, job.body, limits=RequestLimits())
        if isinstance(request, Refusal):
            return 0.0
        hashes = prefix_hashes(conversation_texts(request))
        if not hashes:
            return 0.0
        others = await self._neighbours.of_pools((self._pool,), max_age_s=_NEIGHBOURS_S)
        return aside_s(
            hashes,
            frozenset(self._served),
            others or (),
            job.need_tokens,
            num_delivered=held.delivery.num_delivered,
            num_aside=len(self._aside),
        )
