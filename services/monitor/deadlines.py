"""Jobs whose time is up: a heap of moments, fed by the wake subjects and rebuilt from the queues."""

import asyncio
import contextlib
import heapq
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Final

import msgspec

from headrace.bus.batchget import batch_each
from headrace.bus.connection import Bus, Message, Stored
from headrace.bus.handover import publish_to_fallback
from headrace.bus.joblog import JobLog
from headrace.bus.jobqueue import JobQueue
from headrace.bus.overview import list_models
from headrace.errors import BrokerError
from headrace.monitor.judgement import judge_time
from headrace.schemas import events, subjects
from headrace.schemas.events import Event
from headrace.schemas.handover import standing
from headrace.schemas.jobs import Job, decode_job
from headrace.schemas.states import JobState
from headrace.schemas.subjects import QueueName
from headrace.schemas.workers import WorkerNudge

__all__ = ["Deadlines"]

log = logging.getLogger(__name__)

_TICK_S: Final = 0.25
_REBUILD_S: Final = 600.0
"""Wakes are seldom lost, and reading a long queue is dear."""
_GRACE_S: Final = 0.5
"""The worker that holds an overdue job ends it itself; a monitor steps in only after that."""
_AGAIN_S: Final = 5.0
_MAX_APPENDS: Final = 4
_MAX_JOBS: Final = 1_000_000
"""Beyond it wakes are ignored, as nobody checks who sends them; the next rebuild finds what is really queued."""


class Deadlines:
    """Ends jobs past their queue timeout or deadline that nobody else has ended, or hands them to their fallback model.

    Holds two moments a job, bounded by the queue limits; what a lost wake hides is found by the next rebuild. Any
    number of monitors may do this: the log takes one terminal event.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._log = JobLog(bus)
        self._due: list[tuple[float, str, int]] = []
        self._jobs: dict[tuple[str, int], Job] = {}
        self.num_ended = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """End overdue jobs inside this context."""
        wakes = f"{self._bus.names.prefix}.wake.>"
        subscription = await self._bus.subscribe(wakes, cb=self._on_wake)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._end_for_ever(), name="overdue jobs"),
                    group.create_task(self._rebuild_for_ever(), name="deadlines of queues"),
                ]
                try:
                    yield
                finally:
                    for task in tasks:
                        task.cancel()
        finally:
            if not self._bus.nc.is_closed:
                with contextlib.suppress(BrokerError):
                    await subscription.unsubscribe()

    def note(self, job: Job, sequence: int) -> None:
        """Remember a queued message."""
        key = (job.model, sequence)
        if key in self._jobs or len(self._jobs) >= _MAX_JOBS:
            return
        self._jobs[key] = job
        for at in (job.queue_until, job.deadline_at):
            heapq.heappush(self._due, (at, *key))

    async def _on_wake(self, message: Message) -> None:
        headers: Mapping[str, str] = message.headers or {}
        job = decode_job(headers, b"")
        sequence = headers.get(subjects.HDR_SEQUENCE, "")
        if job is not None and sequence.isdigit():
            self.note(job, int(sequence))

    async def _rebuild_for_ever(self) -> None:
        while True:
            try:
                for model in await list_models(self._bus):
                    await self._read_queue(model)
            except BrokerError as error:
                log.info("cannot read the queues now: %s", error)
            await asyncio.sleep(_REBUILD_S)

    async def _read_queue(self, model: str) -> None:
        present: set[tuple[str, int]] = set()
        newest = 0
        names = self._bus.names
        stream, subject = names.jobs_stream(model), names.jobs_filter(model)
        async for message in batch_each(self._bus, stream, subject, from_sequence=1):
            headers = message.headers or {}
            job = decode_job(headers, b"")
            if job is not None:
                sequence = int(headers[subjects.HDR_SEQUENCE])
                present.add((model, sequence))
                newest = sequence
                self.note(job, sequence)
        # What a wake told of meanwhile may be newer than what was read.
        for key in [key for key in self._jobs if key[0] == model and key[1] <= newest and key not in present]:
            del self._jobs[key]

    async def _end_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now = self._bus.clock.now()
            while self._due and self._due[0][0] + _GRACE_S <= now:
                at, model, sequence = heapq.heappop(self._due)
                job = self._jobs.get((model, sequence))
                if job is None:
                    continue
                try:
                    is_settled = await self._end(job, sequence, now)
                except BrokerError as error:
                    log.info("job %s is overdue and cannot be looked at now: %s", job.job, error)
                    is_settled = None
                if is_settled:
                    self._jobs.pop((model, sequence), None)
                elif is_settled is None or at >= job.deadline_at:
                    heapq.heappush(self._due, (now + _AGAIN_S, model, sequence))

    async def _end(self, job: Job, sequence: int, now: float) -> bool | None:
        """Whether nothing is left to watch for: the job ended, by us or before. None where that is not known, since
        others keep writing to its log.

        Anybody may publish a wake, so the stored message decides which job it is and when its time is up.
        """
        queue = JobQueue(self._bus, job.model)
        headers = await queue.headers_of(sequence)
        stored = decode_job(headers, b"")
        if headers is None or stored is None:
            return True
        is_handed_over = stored.handed_from is not None
        own = self._bus.names.message_id(stored.tenant, stored.job, is_handed_over=is_handed_over)
        if headers.get(subjects.HDR_MSG_ID) != own:
            return True
        if stored != job:
            self._jobs.pop((job.model, sequence), None)
            self.note(stored, sequence)
            return False
        for _ in range(_MAX_APPENDS):
            state = await self._log.state(job.tenant, job.job)
            if state.is_terminal:
                return True
            if standing(state, job) == "void":  # handed over, and nobody has removed it since
                await queue.delete(sequence)
                return True
            event = judge_time(state, job, now=now)
            if event is None:
                return False
            if event.kind == "expired" and job.fallback is not None:
                event = await self._to_fallback(job, sequence, state) or event
            ttl_s = state.ttl_s or job.deadline_s + self._bus.settings.log_retention_s
            result = await self._log.append(job.tenant, event, expected=state.sequence, ttl_s=ttl_s)
            if isinstance(result, Stored) and not event.is_terminal:
                log.info("job %s: not started in time, it is %s's now", job.job, event.model)
                await queue.delete(sequence)
                return True
            if isinstance(result, Stored):
                self.num_ended += 1
                log.info("job %s: %s, its time is up", job.job, event.kind)
                await self._after_end(job, sequence, state.owner.worker if state.owner is not None else None)
                return True
        return None

    async def _to_fallback(self, job: Job, sequence: int, state: JobState) -> Event | None:
        """The event that hands the job over, once its fallback has the message; None where it cannot take it."""
        found = await JobQueue(self._bus, job.model).message_of(sequence)
        queue = QueueName.from_subject(found[0].get(subjects.HDR_SUBJECT, "")) if found is not None else None
        whole = decode_job(*found) if found is not None else None
        if found is None or queue is None or whole is None or whole.fallback is None:
            return None
        there = await publish_to_fallback(self._bus, whole, queue, found[0])
        if there is None:
            return None
        return events.handed_over(
            job.job,
            attempt=state.attempt + 1,
            model=whole.fallback,
            queue_sequence=there,
            body_hash=job.body_hash,
        )

    async def _after_end(self, job: Job, sequence: int, worker: str | None) -> None:
        await JobQueue(self._bus, job.model).delete(sequence)
        if worker is not None:
            nudge = WorkerNudge(kind="cancelled", tenant=job.tenant, job=job.job)
            await self._bus.publish(self._bus.names.ctl(worker), msgspec.json.encode(nudge))
