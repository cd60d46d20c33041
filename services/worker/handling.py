"""From a fetched message to its settlement: the I/O around the decisions of W1."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import msgspec

from headrace import metrics, telemetry
from headrace.bus.connection import Bus
from headrace.bus.handover import publish_to_fallback
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.joblog import JobLog
from headrace.bus.jobqueue import Delivery, JobQueue
from headrace.discipline.affinity import RecentPrefixes, landmarks, prefix_hashes
from headrace.errors import BrokerError
from headrace.schemas import events
from headrace.schemas.conversation import conversation_texts
from headrace.schemas.endings import deadline_exceeded, faults_exhausted, queue_timeout
from headrace.schemas.events import Owner
from headrace.schemas.handover import standing
from headrace.schemas.jobs import Job
from headrace.schemas.refusals import Refusal
from headrace.schemas.states import JobState
from headrace.schemas.subjects import QueueName
from headrace.telemetry import Span, Step, job_attributes, step_span
from headrace.telemetry.names import EVENT_REQUEUED, HEADRACE_REASON
from headrace.worker.appending import Appended
from headrace.worker.aside import Asides
from headrace.worker.claim import Action, Decision, Situation, decide
from headrace.worker.engines.base import Engine
from headrace.worker.entrance import Entrance, Entry
from headrace.worker.execution import Claimed, Execution, Outcome, ResultKind
from headrace.worker.gate import Gate
from headrace.worker.held import Held, HeldSet
from headrace.worker.neighbours import Neighbours
from headrace.worker.planning import NotNow, Plan, Planner
from headrace.worker.puller import is_fresh
from headrace.worker.reading import LogReader, Read
from headrace.worker.settling import Settler
from headrace.worker.wellbeing import Wellbeing

__all__ = ["Handler"]

log = logging.getLogger(__name__)

_MAX_REFUSED: Final = 8
"""Refused appends that send us back to the top before the message is dropped."""
_FIRST_RETRY_S: Final = 0.5
_BUSY_RETRY_S: Final = 0.25
_MAX_RETRY_S: Final = 30.0
_SERVICE_TIME_WEIGHT: Final = 0.1
_MAX_PARKED_HANDS: Final = 3
"""Workers with a parked pull that may get a job one after the other and leave it to the one it names."""


class Handler:
    """Takes fetched messages to their end. One per worker.

    `servers_of` says which pools' workers may run a pool's requests. `identity` gives this registration as an owner for
    a queue sequence; `beat_settled` waits for beats older than a number; `room_changed` is called when memory or a slot
    is freed, `refund` with a queue and tokens that it was charged for and did not use here, `undo` with those of a
    choice that was not one; `is_full` says that nothing more starts here. `settle_doubt` is awaited after each fault.
    Nothing it does with one message can hurt another.
    `seconds_per_job` is a moving average over the jobs it ran to their end.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        queue: JobQueue,
        pool: str,
        servers_of: Callable[[str], Iterable[str]],
        engine: Engine,
        gate: Gate,
        neighbours: Neighbours,
        served: RecentPrefixes,
        wellbeing: Wellbeing,
        held: HeldSet,
        identity: Callable[[int], Owner],
        beat_settled: Callable[[int], Awaitable[None]],
        room_changed: Callable[[], None],
        is_full: Callable[[], bool],
        settle_doubt: Callable[[], Awaitable[None]],
        refund: Callable[[QueueName, int], None],
        undo: Callable[[QueueName, int], None],
        leave_to_another: Callable[[Delivery], None],
    ) -> None:
        self._bus = bus
        self._settings = bus.settings
        self._log = JobLog(bus)
        self._bucket = WorkersBucket(bus)
        self._queue = queue
        self._engine = engine
        self._gate = gate
        self._served = served
        self._wellbeing = wellbeing
        self._held = held
        self._identity = identity
        self._beat_settled = beat_settled
        self._room_changed = room_changed
        self._settle_doubt = settle_doubt
        self._refund = refund
        self._planner = Planner(engine, default_max_tokens=bus.settings.default_max_tokens)
        self._settler = Settler(
            bus,
            queue=queue,
            held=held,
            identity=identity,
            leave_to_another=leave_to_another,
        )
        self._entrance = Entrance(
            gate=gate,
            neighbours=neighbours,
            settler=self._settler,
            pool=pool,
            max_faults=bus.settings.max_attempts,
            servers_of=servers_of,
            refund=refund,
            room_changed=room_changed,
        )
        self._asides = Asides(
            pool=pool,
            gate=gate,
            entrance=self._entrance,
            neighbours=neighbours,
            served=served,
            draining=self._settler.draining,
            is_full=is_full,
            room_changed=room_changed,
            undo=undo,
        )
        self._reader = LogReader(self._log, retry_for_s=bus.settings.retry_for_s)
        self.seconds_per_job: float | None = None

    def hold(self, delivery: Delivery) -> Held | None:
        """List a fetched message, before anything is done with it; None where there is nothing to hold.

        That is a redelivery of what we hold (our renewals count for it), or no job at all.
        """
        job = delivery.job
        if job is None or delivery.sequence in self._held:
            return None
        held = Held(delivery, job)
        self._held.add(held)
        return held

    async def handle(self, delivery: Delivery, held: Held | None) -> None:
        """Take one message to its end, after `hold`; never raises but for cancellation."""
        job = delivery.job
        if job is None:
            log.error("message %d of %s is no job; terminating it", delivery.sequence, self._queue.stream)
            await self._queue.terminate(delivery)
            return
        if held is None:
            return
        parent = telemetry.extract(delivery.headers)
        try:
            with step_span(Step.PROCESS, job.model, parent=parent, attributes=self._attributes(delivery, job)) as span:
                await self._process(held, job, span)
        except (BrokerError, TimeoutError) as error:
            log.warning("job %s: %s; the broker will deliver it again", job.job, error or "no beat was acknowledged")
        except Exception:
            log.exception("job %s: unexpected error", job.job)
            await self._after_defect(held, job)
        finally:
            self._held.remove(held)
            self._gate.leave(held)
            self._room_changed()

    async def _after_defect(self, held: Held, job: Job) -> None:
        """A defect of ours counts as a fault of the job that met it, or it would meet it for ever."""
        try:
            state = await self._log.state(job.tenant, job.job)
            if state.owner is not None and state.owner.is_same(self._identity(0)) and not held.is_void:
                event = events.requeued(
                    job.job,
                    attempt=state.attempt + 1,
                    offset=state.num_tokens,
                    reason="internal",
                    lost=state.owner,
                    by=state.owner,
                )
                await self._settler.writer(job, state).append(event)
            await self._entrance.hand_back(held, job, _FIRST_RETRY_S)
        except (BrokerError, TimeoutError) as error:
            log.warning("job %s: %s; the broker will deliver it again", job.job, error)

    @property
    def num_aside(self) -> int:
        """Jobs that fit here and are left to warmer workers for a moment."""
        return len(self._asides)

    def look(self) -> None:
        """The room changed, or what is in it."""
        self._asides.look()

    def drain(self) -> None:
        """Hand back what waits and stop taking more; what runs goes on until `stop` is called on it."""
        self._settler.draining.set()
        self._gate.close()

    async def _process(self, held: Held, job: Job, span: Span) -> None:
        """Follow W1 until a row is the last; each pass begins with a fresh read of the log."""
        if self._is_for_another(held, job):
            self._refund(held.delivery.queue, job.need_tokens)
            await self._entrance.hand_back(held, job, to=job.preferred)
            return
        plan: Plan | None = None
        may_leave = True
        num_refused = 0
        while num_refused < _MAX_REFUSED and not held.is_void:
            read = await self._reader.before_claim(job, held.delivery.sequence)
            state = read.state
            decision = await self._decide(held, job, state)
            if decision.action is Action.RUN or decision.action is Action.CLAIM:
                if may_leave and not state.was_started and await self._asides.leaves(held, job):
                    return
                may_leave = False
                if plan is None:
                    planned = await self._planner.plan(job)
                    if isinstance(planned, NotNow):
                        await self._entrance.hand_back(held, job, _BUSY_RETRY_S if planned.is_busy else _FIRST_RETRY_S)
                        return
                    if isinstance(planned, Refusal):
                        if await self._settler.end(held, job, state, planned, span):
                            return
                        num_refused += 1
                        continue
                    plan = planned
                entry = await self._entrance.enter(held, job, plan, state, span)
                if entry is Entry.GONE:
                    return
                if entry is Entry.AGAIN:
                    continue
                go = self._run if decision.action is Action.RUN else self._claim_and_run
                if await go(held, job, plan, read, span):
                    return
                self._gate.leave(held)
            elif await self._without_running(held, job, state, decision, span):
                return
            num_refused += 1
        log.info("job %s: others keep writing to its log; dropping the message", job.job)

    def _is_for_another(self, held: Held, job: Job) -> bool:
        """Whether a worker that has its beginning in its cache was just woken for it; it is left to that one, once.

        One that came by a parked pull may go through several such hands, of whom none asked for it.
        """
        delivery = held.delivery
        is_named = job.preferred not in (None, self._identity(0).worker)
        is_early = delivery.num_delivered <= (_MAX_PARKED_HANDS if delivery.is_parked else 1)
        return is_named and is_early and is_fresh(delivery, now=self._bus.clock.now())

    async def _without_running(self, held: Held, job: Job, state: JobState, decision: Decision, span: Span) -> bool:
        """Follow a row that does not run the job; False means back to the top."""
        end = self._settler.end
        match decision.action:
            case Action.ACK:
                await self._settler.settle_ended(held, job, state)
                return True
            case Action.REQUEUE:
                await self._requeue(held, job, state, decision.lost, span)
                return False
            case Action.LEAVE:
                await self._queue.ack(held.delivery)
                return True
            case Action.TAKE_OVER:
                await self._hand_over(held, job, state, job.model, held.delivery.sequence, span)
                return False
            case Action.FALL_BACK:
                delivery = held.delivery
                there = await publish_to_fallback(self._bus, job, delivery.queue, delivery.headers)
                if there is None or job.fallback is None:
                    return await end(held, job, state, queue_timeout(job), span)
                await self._hand_over(held, job, state, job.fallback, there, span)
                return False
            case Action.FAIL_DEADLINE:
                return await end(held, job, state, deadline_exceeded(job), span)
            case Action.EXPIRE_QUEUED:
                return await end(held, job, state, queue_timeout(job), span)
            case Action.DEAD_LETTER:
                return await end(held, job, state, faults_exhausted(state), span, is_dead=True)
            case _:  # it runs here or elsewhere: no ack, no NAK
                return True

    async def _requeue(self, held: Held, job: Job, state: JobState, lost: Owner | None, span: Span) -> None:
        event = events.requeued(
            job.job,
            attempt=state.attempt + 1,
            offset=state.num_tokens,
            reason="owner_lost" if lost is not None else "lease_lost",
            lost=lost,
            by=self._identity(held.delivery.sequence),
        )
        await self._settler.writer(job, state).append(event)
        span.add_event(EVENT_REQUEUED, {HEADRACE_REASON: event.reason})

    async def _hand_over(
        self, held: Held, job: Job, state: JobState, model: str, queue_sequence: int, span: Span
    ) -> None:
        event = events.handed_over(
            job.job,
            attempt=state.attempt + 1,
            model=model,
            queue_sequence=queue_sequence,
            body_hash=job.body_hash,
            by=self._identity(held.delivery.sequence),
        )
        await self._settler.writer(job, state).append(event)
        span.add_event(EVENT_REQUEUED, {HEADRACE_REASON: event.reason})

    async def _decide(self, held: Held, job: Job, state: JobState) -> Decision:
        owner_seen = None
        if state.owner is not None and not state.owner.is_same(self._identity(0)):
            owner_seen = await self._bucket.get(state.owner.worker)
        others = [entry for entry in self._held.of_job(job.tenant, job.job) if entry is not held]
        return decide(
            Situation(
                state=state,
                me=self._identity(held.delivery.sequence),
                now=self._bus.clock.now(),
                deadline_at=job.deadline_at,
                queue_until=job.queue_until,
                log_retention_s=self._settings.log_retention_s,
                max_faults=self._settings.max_attempts,
                fits=True,
                is_running_here=any(_has(entry, state) for entry in others),
                is_another_body=bool(state.body_hash) and state.body_hash != job.body_hash,
                standing=standing(state, job),
                has_fallback=job.fallback is not None,
                owner_seen=owner_seen,
            )
        )

    async def _claim_and_run(self, held: Held, job: Job, plan: Plan, read: Read, span: Span) -> bool:
        """False if another event came first (back to the top)."""
        state = read.state
        async with asyncio.timeout(self._settings.retry_for_s):
            await self._beat_settled(held.listed_in)
        may_begin = await self._gate.may_begin()
        if held.is_void:
            return True
        if not may_begin:
            await self._entrance.hand_back(held, job, 0.0)
            return True
        owner = self._identity(held.delivery.sequence)
        held.attempt, held.has_claimed = state.attempt, False
        event = events.started(
            job.job,
            owner,
            attempt=state.attempt,
            offset=state.num_tokens,
            body_hash=job.body_hash,
            model=job.model,
        )
        result = await self._settler.writer(job, state).append(event)
        if held.is_void:
            return True
        if not isinstance(result, Appended):
            return False
        started = msgspec.structs.replace(event, sequence=result.sequence, last_sequence=state.sequence)
        if state.attempt == 1:
            waited_s = max(0.0, self._bus.clock.now() - job.accepted_at)
            metrics.QUEUE_WAIT_S.observe(waited_s, metrics.model_label(job.model), held.delivery.queue.lane)
        step_span(
            Step.WAIT,
            job.model,
            parent=telemetry.extract(held.delivery.headers),
            attributes=self._attributes(held.delivery, job),
            start_time_ns=int(self._bus.clock.to_local(job.accepted_at) * 1e9),
        ).end()
        return await self._run(held, job, plan, read.with_claim(started), span)

    async def _run(self, held: Held, job: Job, plan: Plan, claimed: Read, span: Span) -> bool:
        """Run what is claimed, from where the log says that it stands. False if another event came after the claim."""
        held.attempt, held.has_claimed = claimed.state.attempt, True
        history = await self._reader.history(job, claimed)
        if held.is_void:
            return True
        if history is None:
            refusal = Refusal(code="stream_gap", message="the log of the job has a hole; it cannot be continued")
            return await self._settler.end(held, job, claimed.state, refusal, span)
        if history.is_overtaken:
            return False
        state = history.state
        assert state.owner is not None
        may_begin = await self._gate.may_begin() and not self._settler.draining.is_set()
        if held.is_void:
            return True
        if not may_begin:  # we leave, or the engine failed others meanwhile, which is no fault of this one
            await self._requeue(held, job, state, None, span)
            return False
        course = self._wellbeing.begin()
        held.execution = execution = Execution(
            Claimed(
                delivery=held.delivery,
                job=job,
                request=plan.request,
                owner=state.owner,
                state=state,
                history=history.events,
                num_prompt_tokens=plan.num_prompt_tokens,
                max_tokens=plan.max_tokens,
            ),
            engine=self._engine,
            job_log=self._log,
            log_ttl_s=self._settler.log_ttl_s(job),
            retry_for_s=self._settings.retry_for_s,
            max_event_bytes=self._bus.max_data_bytes,
            clock=self._bus.clock,
            span=span,
            on_progress=lambda num_tokens: self._gate.note_progress(held, num_tokens),
            on_fault=self._gate.doubt,
            course=course,
        )
        self._served.note(landmarks(prefix_hashes(conversation_texts(plan.request))))
        self._room_changed()
        began = time.monotonic()
        try:
            outcome = await execution.run()
        except BaseException:
            if execution.has_faulted:
                self._gate.trust()
            raise
        finally:
            held.execution = None
        if execution.has_faulted:
            await self._settle_doubt()
        if held.is_void:
            outcome = Outcome(kind=ResultKind.FORGET)
        if (ending := _ending(outcome)) in ("done", "fault"):
            course.answer(f"{job.tenant}.{job.job}", is_failure=ending == "fault")
        if outcome.kind is ResultKind.SETTLED:
            self._note_service_time(time.monotonic() - began)
            num_used = plan.num_prompt_tokens + outcome.num_tokens
            self._refund(held.delivery.queue, max(0, job.need_tokens - num_used))
        await self._after_run(held, job, state, outcome, span)
        return True

    async def _after_run(self, held: Held, job: Job, state: JobState, outcome: Outcome, span: Span) -> None:
        metrics.ATTEMPTS.add(metrics.model_label(job.model), _ending(outcome))
        if outcome.kind is ResultKind.FORGET:
            span.fail("fenced")
            return
        if outcome.kind is ResultKind.SETTLED:
            self._settler.record_end(span, outcome.event)
            await self._settler.settle(held)
            return
        span.add_event(EVENT_REQUEUED, {HEADRACE_REASON: outcome.event.reason if outcome.event else ""})
        span.fail("engine_error" if outcome.is_fault else "handed_back")
        delay_s = 0.0
        if outcome.is_busy:
            delay_s = _BUSY_RETRY_S
        elif outcome.is_fault:
            delay_s = min(_FIRST_RETRY_S * 2 ** len(state.faults), _MAX_RETRY_S)
        await self._entrance.hand_back(held, job, delay_s)

    def _note_service_time(self, seconds: float) -> None:
        known = self.seconds_per_job
        self.seconds_per_job = seconds if known is None else known + _SERVICE_TIME_WEIGHT * (seconds - known)

    def _attributes(self, delivery: Delivery, job: Job) -> dict[str, telemetry.spans.Attribute | None]:
        return job_attributes(
            job=job.job,
            tenant=job.tenant,
            pool=delivery.queue.pool,
            lane=delivery.queue.lane,
            queue=delivery.queue.queue,
            delivery_count=delivery.num_delivered,
            worker=self._identity(0).worker,
        )


def _ending(outcome: Outcome) -> str:
    """How an attempt ended, as a label."""
    if outcome.kind is ResultKind.FORGET:
        return "fenced"
    if outcome.kind is ResultKind.SETTLED:
        return outcome.event.kind if outcome.event is not None else "ended"
    return "fault" if outcome.is_fault else "handed_back"


def _has(held: Held, state: JobState) -> bool:
    """Whether another message of the same job runs here, or is just being claimed."""
    is_claiming = state.owner is not None and held.delivery.sequence == state.owner.queue_sequence
    return held.execution is not None or is_claiming
