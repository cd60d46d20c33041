"""How a held message leaves a worker: settled after its job's end, or handed back."""

import asyncio
from collections.abc import Callable
from typing import Final

from headrace.bus.connection import Bus
from headrace.bus.deadletters import write_dead_letter
from headrace.bus.joblog import JobLog
from headrace.bus.jobqueue import Delivery, JobQueue
from headrace.lifecycle import wait_first
from headrace.schemas.endings import end_of
from headrace.schemas.events import Event, Owner
from headrace.schemas.jobs import Job
from headrace.schemas.refusals import Refusal
from headrace.schemas.states import JobState
from headrace.telemetry import Span
from headrace.worker.appending import Appended, Ended, LogWriter
from headrace.worker.held import Held, HeldSet

__all__ = ["Settler"]

_FAULTS_EXHAUSTED: Final = "faults_exhausted"


class Settler:
    """Ends jobs and gives messages back. A message is acked only after a terminal event is known to be stored.

    `leave_to_another` is told of a message that returns to the head of its queue and is meant for another worker.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        queue: JobQueue,
        held: HeldSet,
        identity: Callable[[int], Owner],
        leave_to_another: Callable[[Delivery], None],
    ) -> None:
        self._bus = bus
        self._settings = bus.settings
        self._log = JobLog(bus)
        self._queue = queue
        self._held = held
        self._identity = identity
        self._leave_to_another = leave_to_another
        self.draining = asyncio.Event()

    async def settle(self, held: Held) -> None:
        """Ack: the job's terminal event is in the log."""
        await self._queue.ack(held.delivery)

    async def settle_ended(self, held: Held, job: Job, state: JobState) -> None:
        """Ack a message of a job that had ended before, once its dead letter is sure to exist if the end was one."""
        if state.last is not None and state.last.is_dead:
            await self._bury(held, job, state)
        await self.settle(held)

    async def end(
        self, held: Held, job: Job, state: JobState, refusal: Refusal, span: Span, *, is_dead: bool = False
    ) -> bool:
        """Append a terminal event and settle; False if another event came first, so that the log must be read again."""
        event = end_of(state, job, refusal, owner=self._identity(held.delivery.sequence), is_dead=is_dead)
        result = await self.writer(job, state).append(event)
        if not isinstance(result, Appended | Ended):
            return False
        final = event if isinstance(result, Appended) else result.event
        self.record_end(span, final)
        if final.is_dead:
            await self._bury(held, job, state)
        await self.settle(held)
        return True

    async def hand_back(self, held: Held, job: Job, *, delay_s: float = 0.0, to: str | None = None) -> None:
        """NAK and wake, after keeping it back for a while: listed and renewed, so that it is not lost with us.

        A drain cuts the while short. `to` names the worker that would start it now; else any of the pool is woken.
        """
        await wait_first(self.draining, timeout_s=delay_s)
        if held.is_void:
            return
        self._held.remove(held)  # first, or its redelivery to us would be taken for one of what we hold
        if to is not None:
            self._leave_to_another(held.delivery)
        await self._queue.nak(held.delivery)
        if to is not None:
            await self._queue.wake_worker(to, held.delivery.queue)
        else:
            await self._queue.wake(held.delivery.queue, job.headers())

    def writer(self, job: Job, state: JobState) -> LogWriter:
        """A writer that goes on after what `state` was read from."""
        return LogWriter(
            self._log,
            job.tenant,
            sequence=state.sequence,
            ttl_s=self.log_ttl_s(job),
            retry_for_s=self._settings.retry_for_s,
        )

    def log_ttl_s(self, job: Job) -> float:
        """Seconds each event of the job lives."""
        return job.deadline_s + self._settings.log_retention_s

    def record_end(self, span: Span, event: Event | None) -> None:
        """Say on the span how the job ended."""
        if event is None or event.kind == "done":
            return
        if event.kind == "cancelled":
            span.cancel()
            return
        error = event.error()
        span.fail(error.code if error is not None else event.kind)

    async def _bury(self, held: Held, job: Job, state: JobState) -> None:
        await write_dead_letter(
            self._bus,
            job,
            queue=held.delivery.queue,
            reason=_FAULTS_EXHAUSTED,
            attempts=len(state.faults),
            faults=state.faults,
        )
