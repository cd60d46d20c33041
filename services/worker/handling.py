"""From a fetched message to its settlement: the I/O around the decisions of W1."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import msgspec

from headrace import telemetry
from headrace.bus.connection import Bus
from headrace.bus.deadletters import write_dead_letter
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.joblog import JobLog
from headrace.bus.jobqueue import Delivery, JobQueue
from headrace.errors import BrokerError, EngineBusyError, EngineError, EngineRequestError
from headrace.lifecycle import wait_first
from headrace.schemas import events
from headrace.schemas.events import Event, Owner
from headrace.schemas.jobs import Job
from headrace.schemas.openai import (
    InferenceRequest,
    RequestLimits,
    num_kv_tokens_needed,
    parse_request,
    resolve_max_tokens,
)
from headrace.schemas.refusals import Refusal
from headrace.schemas.states import JobState, fold
from headrace.schemas.workers import SeenBeat
from headrace.telemetry import Span, Step, job_attributes, step_span
from headrace.worker.appending import Appended, Ended, LogWriter
from headrace.worker.claim import Action, Situation, decide
from headrace.worker.engines.base import Engine
from headrace.worker.execution import Claimed, Execution, Outcome, ResultKind
from headrace.worker.held import Held, HeldSet
from headrace.worker.ledger import Ledger

__all__ = ["Handler"]

log = logging.getLogger(__name__)

_MAX_ROUNDS: Final = 8
"""Times a refused append sends us back to the top before the message is dropped."""
_LOOK_AGAIN_S: Final = 1.0
_HOLE_READS: Final = 10
_HOLE_PAUSE_S: Final = 0.2
_FIRST_RETRY_S: Final = 0.5
_BUSY_RETRY_S: Final = 0.25
_MAX_RETRY_S: Final = 30.0
_SERVICE_TIME_WEIGHT: Final = 0.1


class Plan(NamedTuple):
    """What running a job takes: exact prompt tokens, new tokens at most, KV tokens to the last of them."""

    request: InferenceRequest
    num_prompt_tokens: int
    max_tokens: int
    need_tokens: int


class Handler:
    """Takes fetched messages to their end. One per worker.

    `identity` gives this registration as an owner for a queue sequence; `beat_settled` waits for a beat under way;
    `room_changed` is called when memory or a slot is freed. Nothing it does with one message can hurt another.
    `seconds_per_job` is a moving average over the jobs it ran to their end.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        queue: JobQueue,
        engine: Engine,
        ledger: Ledger,
        held: HeldSet,
        identity: Callable[[int], Owner],
        beat_settled: Callable[[], Awaitable[None]],
        room_changed: Callable[[], None],
        job_ended: Callable[[str, str], None],
    ) -> None:
        self._bus = bus
        self._settings = bus.settings
        self._log = JobLog(bus)
        self._bucket = WorkersBucket(bus)
        self._queue = queue
        self._engine = engine
        self._ledger = ledger
        self._held = held
        self._identity = identity
        self._beat_settled = beat_settled
        self._room_changed = room_changed
        self._job_ended = job_ended
        self._released = asyncio.Event()
        self._draining = asyncio.Event()
        self.seconds_per_job: float | None = None

    async def handle(self, delivery: Delivery) -> None:
        """Take one message to its end; never raises but for cancellation."""
        job = delivery.job
        if job is None:
            log.error("message %d of %s is no job; terminating it", delivery.sequence, self._queue.stream)
            await self._queue.terminate(delivery)
            return
        if delivery.sequence in self._held:
            return  # a redelivery of what we hold; our renewals count for it
        held = Held(delivery, job.tenant, job.job)
        self._held.add(held)
        parent = telemetry.extract(delivery.headers)
        try:
            with step_span(Step.PROCESS, job.model, parent=parent, attributes=self._attributes(delivery, job)) as span:
                await self._process(held, job, span)
        except (BrokerError, TimeoutError) as error:
            log.warning("job %s: %s; the broker will deliver it again", job.job, error or "no beat was acknowledged")
        except Exception:
            log.exception("job %s: unexpected error; the broker will deliver it again", job.job)
        finally:
            self._ledger.release(delivery.sequence)
            self._held.remove(held)
            self._released.set()
            self._room_changed()

    def drain(self) -> None:
        """Hand back what waits and stop taking more; what runs goes on until `stop` is called on it."""
        self._draining.set()
        self._released.set()

    async def _process(self, held: Held, job: Job, span: Span) -> None:
        plan: Plan | None = None
        for _ in range(_MAX_ROUNDS):
            state = await self._log.state(job.tenant, job.job)
            owner_seen = await self._owner_seen(state)
            action, lost = self._decide(held, job, state, owner_seen, fits=True)
            if action is Action.CLAIM:
                if plan is None:
                    planned = await self._plan(held, job)
                    if planned is None:
                        return
                    if isinstance(planned, Refusal):
                        if await self._end(held, job, state, "failed", planned, span):
                            return
                        continue
                    plan = planned
                is_last_chance = len(state.faults) == self._settings.max_attempts - 1 and bool(state.faults)
                if is_last_chance and self._held.has_last_chance:
                    # Two such jobs in one engine would die of each other's faults.
                    await self._hand_back(held, job, delay_s=_FIRST_RETRY_S)
                    return
                held.is_last_chance = is_last_chance
                if not self._ledger.fits(plan.need_tokens):
                    if not await self._hold(held, job, plan):
                        return
                    continue
                self._ledger.reserve(held.delivery.sequence, plan.need_tokens)
                if await self._claim_and_run(held, job, plan, state, span):
                    return
                self._ledger.release(held.delivery.sequence)
            elif action is Action.RUN:
                plan = plan or await self._plan_of_running(held, job)
                if plan is None or not self._ledger.fits(plan.need_tokens):
                    return  # ours by the log, but it cannot run here now: the broker delivers it again
                self._ledger.reserve(held.delivery.sequence, plan.need_tokens)
                await self._run(held, job, plan, state, span)
                return
            elif await self._without_running(held, job, state, action, lost, span):
                return
        log.info("job %s: others keep writing to its log; dropping the message", job.job)

    async def _without_running(
        self, held: Held, job: Job, state: JobState, action: Action, lost: Owner | None, span: Span
    ) -> bool:
        """Follow a row that does not run the job; False means back to the top."""
        if action is Action.ACK:
            if state.last is not None and state.last.is_dead:
                await self._write_dead_letter(job, state)
            await self._settle(held, job)
            return True
        if action in (Action.IGNORE, Action.DROP):
            return True
        if action is Action.REQUEUE:
            owner = self._identity(held.delivery.sequence)
            event = events.requeued(
                job.job,
                attempt=state.attempt + 1,
                offset=state.num_tokens,
                reason="owner_lost" if lost is not None else "lease_lost",
                lost=lost,
                by=owner,
            )
            await self._writer(job, state).append(event)
            span.add_event("requeued", {"headrace.reason": event.reason})
            return False
        if action is Action.FAIL_DEADLINE:
            refusal = Refusal(code="deadline_exceeded", message=f"the deadline of {job.deadline_s:g} s has passed")
            return await self._end(held, job, state, "failed", refusal, span)
        if action is Action.EXPIRE_QUEUED:
            refusal = Refusal(
                code="queue_timeout", message=f"the request did not start within {job.queue_timeout_s:g} s"
            )
            return await self._end(held, job, state, "expired", refusal, span)
        refusal = Refusal(
            code="job_failed",
            message=f"the job was given up after {len(state.faults)} workers or engines failed while running it",
        )
        return await self._end(held, job, state, "failed", refusal, span, is_dead=True)

    def _decide(
        self, held: Held, job: Job, state: JobState, owner_seen: SeenBeat | None, *, fits: bool
    ) -> tuple[Action, Owner | None]:
        others = [entry for entry in self._held.of_job(job.tenant, job.job) if entry is not held]
        decision = decide(
            Situation(
                state=state,
                me=self._identity(held.delivery.sequence),
                now=self._bus.clock.now(),
                deadline_at=job.deadline_at,
                queue_until=job.queue_until,
                log_retention_s=self._settings.log_retention_s,
                max_faults=self._settings.max_attempts,
                fits=fits,
                is_running_here=any(_has(entry, state) for entry in others),
                owner_seen=owner_seen,
            )
        )
        return decision.action, decision.lost

    async def _owner_seen(self, state: JobState) -> SeenBeat | None:
        if state.owner is None or state.owner.is_same(self._identity(0)):
            return None
        return await self._bucket.get(state.owner.worker)

    async def _plan(self, held: Held, job: Job) -> Plan | Refusal | None:
        """What the job takes, or why it can never run; None where the engine cannot say and it was handed back."""
        request = parse_request(job.op, job.body, limits=RequestLimits())
        if isinstance(request, Refusal):
            return request
        try:
            num_prompt_tokens = await self._engine.count_prompt_tokens(request)
        except EngineRequestError as error:
            return error.refusal
        except EngineBusyError:
            await self._hand_back(held, job, delay_s=_BUSY_RETRY_S)
            return None
        except EngineError as error:
            log.warning("job %s: the engine cannot count its tokens: %s", job.job, error)
            await self._hand_back(held, job, delay_s=_FIRST_RETRY_S)
            return None
        facts = self._engine.facts
        max_tokens = resolve_max_tokens(
            request,
            num_prompt_tokens=num_prompt_tokens,
            max_model_len=facts.max_model_len,
            default_max_tokens=self._settings.default_max_tokens,
        )
        if isinstance(max_tokens, Refusal):
            return max_tokens
        need = num_kv_tokens_needed(num_prompt_tokens, max_tokens, request.n, facts.block_size)
        if not self._ledger.could_ever_fit(need):
            return Refusal(
                code="exceeds_capacity",
                message=f"the request needs {need} KV tokens; this worker's engine has {self._ledger.capacity_tokens}",
            )
        return Plan(request, num_prompt_tokens, max_tokens, need)

    async def _plan_of_running(self, held: Held, job: Job) -> Plan | None:
        planned = await self._plan(held, job)
        return planned if isinstance(planned, Plan) else None

    async def _hold(self, held: Held, job: Job, plan: Plan) -> bool:
        """Wait until it may fit or its time may be up; False if it was handed back."""
        held.is_waiting = True
        self._room_changed()
        try:
            while not self._ledger.fits(plan.need_tokens) and not self._draining.is_set():
                self._released.clear()
                try:
                    async with asyncio.timeout(_LOOK_AGAIN_S):
                        await self._released.wait()
                except TimeoutError:
                    break
            if self._draining.is_set():
                await self._hand_back(held, job)
                return False
        finally:
            held.is_waiting = False
        return True

    async def _claim_and_run(self, held: Held, job: Job, plan: Plan, state: JobState, span: Span) -> bool:
        async with asyncio.timeout(self._settings.retry_for_s):
            await self._beat_settled()
        if held.is_void:
            return True
        owner = self._identity(held.delivery.sequence)
        held.attempt = state.attempt
        event = events.started(
            job.job,
            owner,
            attempt=state.attempt,
            offset=state.num_tokens,
            body_hash=job.body_hash,
            model=job.model,
        )
        writer = self._writer(job, state)
        result = await writer.append(event)
        if held.is_void:
            return True
        if not isinstance(result, Appended):
            return False
        started = msgspec.structs.replace(event, sequence=result.sequence)
        claimed = msgspec.structs.replace(
            state, state="running", owner=owner, sequence=result.sequence, last=started, was_started=True
        )
        waited = step_span(
            Step.WAIT,
            job.model,
            parent=telemetry.extract(held.delivery.headers),
            attributes=self._attributes(held.delivery, job),
            start_time_ns=int(job.accepted_at * 1e9),
        )
        waited.end()
        await self._run(held, job, plan, claimed, span)
        return True

    async def _run(self, held: Held, job: Job, plan: Plan, state: JobState, span: Span) -> None:
        assert state.owner is not None
        history = await self._history(job, state) if state.num_tokens or state.attempt > 1 else ()
        if history is None:
            refusal = Refusal(code="stream_gap", message="the log of the job has a hole; it cannot be continued")
            await self._end(held, job, state, "failed", refusal, span)
            return
        held.attempt = state.attempt
        held.execution = execution = Execution(
            Claimed(
                delivery=held.delivery,
                job=job,
                request=plan.request,
                owner=state.owner,
                state=state,
                history=history,
                num_prompt_tokens=plan.num_prompt_tokens,
                max_tokens=plan.max_tokens,
            ),
            engine=self._engine,
            job_log=self._log,
            log_ttl_s=self._log_ttl_s(job),
            retry_for_s=self._settings.retry_for_s,
            max_event_bytes=self._bus.max_data_bytes,
            clock=self._bus.clock,
            span=span,
        )
        self._room_changed()
        began = time.monotonic()
        try:
            outcome = await execution.run()
        finally:
            held.execution = None
        if held.is_void:
            outcome = Outcome(kind=ResultKind.FORGET)
        elif outcome.kind is ResultKind.SETTLED:
            self._note_service_time(time.monotonic() - began)
        await self._after_run(held, job, state, outcome, span)

    async def _after_run(self, held: Held, job: Job, state: JobState, outcome: Outcome, span: Span) -> None:
        if outcome.kind is ResultKind.FORGET:
            span.fail("fenced")
            return
        if outcome.kind is ResultKind.SETTLED:
            self._record_end(span, outcome.event)
            await self._settle(held, job)
            return
        span.add_event("requeued", {"headrace.reason": outcome.event.reason if outcome.event else ""})
        span.fail("engine_error" if outcome.is_fault else "handed_back")
        delay_s = 0.0
        if outcome.is_busy:
            delay_s = _BUSY_RETRY_S
        elif outcome.is_fault:
            delay_s = min(_FIRST_RETRY_S * 2 ** len(state.faults), _MAX_RETRY_S)
        await self._hand_back(held, job, delay_s=delay_s)

    async def _history(self, job: Job, state: JobState) -> tuple[Event, ...] | None:
        """All events up to our own `started`, whole; None where the log has a hole that stays."""
        for _ in range(_HOLE_READS):
            history = await self._log.read(job.tenant, job.job)
            told = fold(history)
            if told.is_whole and any(event.sequence == state.sequence for event in history):
                return tuple(history)
            await asyncio.sleep(_HOLE_PAUSE_S)
        return None

    async def _end(
        self,
        held: Held,
        job: Job,
        state: JobState,
        kind: str,
        refusal: Refusal,
        span: Span,
        *,
        is_dead: bool = False,
    ) -> bool:
        """Append a terminal event and settle; False if another event came first (back to the top)."""
        event = events.ended(
            "expired" if kind == "expired" else "failed",
            job.job,
            attempt=state.attempt,
            offset=state.num_tokens,
            error=refusal,
            body_hash=job.body_hash,
            owner=self._identity(held.delivery.sequence),
            is_dead=is_dead,
        )
        result = await self._writer(job, state).append(event)
        if not isinstance(result, Appended | Ended):
            return False
        final = event if isinstance(result, Appended) else result.event
        self._record_end(span, final)
        if final.is_dead:
            await self._write_dead_letter(job, state)
        await self._settle(held, job)
        return True

    def _note_service_time(self, seconds: float) -> None:
        known = self.seconds_per_job
        self.seconds_per_job = seconds if known is None else known + _SERVICE_TIME_WEIGHT * (seconds - known)

    async def _settle(self, held: Held, job: Job) -> None:
        await self._queue.ack(held.delivery)
        self._job_ended(job.tenant, job.job)

    async def _hand_back(self, held: Held, job: Job, *, delay_s: float = 0.0) -> None:
        """NAK and wake, after keeping it back for a while: listed and renewed, so that it is not lost with us."""
        self._ledger.release(held.delivery.sequence)
        held.is_last_chance = False
        held.is_backing_off = True
        self._room_changed()
        await wait_first(self._draining, timeout_s=delay_s)
        if held.is_void:
            return
        self._held.remove(held)  # first, or its redelivery to us would be taken for one of what we hold
        await self._queue.nak(held.delivery)
        await self._queue.wake(held.delivery.queue, job.headers())

    async def _write_dead_letter(self, job: Job, state: JobState) -> None:
        await write_dead_letter(
            self._bus, job, reason="faults_exhausted", attempts=len(state.faults), faults=state.faults
        )

    def _writer(self, job: Job, state: JobState) -> LogWriter:
        return LogWriter(
            self._log,
            job.tenant,
            sequence=state.sequence,
            ttl_s=self._log_ttl_s(job),
            retry_for_s=self._settings.retry_for_s,
        )

    def _log_ttl_s(self, job: Job) -> float:
        return job.deadline_s + self._settings.log_retention_s

    def _record_end(self, span: Span, event: Event | None) -> None:
        if event is None or event.kind == "done":
            return
        if event.kind == "cancelled":
            span.cancel()
            return
        error = event.error()
        span.fail(error.code if error is not None else event.kind)

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


def _has(held: Held, state: JobState) -> bool:
    """Whether another message of the same job runs here, or is just being claimed."""
    is_claiming = state.owner is not None and held.delivery.sequence == state.owner.queue_sequence
    return held.execution is not None or is_claiming
