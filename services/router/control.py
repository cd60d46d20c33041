"""Status of a job, and its cancelling (table C)."""

import logging
from typing import Final

import msgspec

from headrace.bus.connection import Bus, Stored
from headrace.bus.joblog import JobLog
from headrace.bus.services import IncomingRequest, refuse, reply_with
from headrace.discipline.position import position, waiting_of
from headrace.errors import BrokerError
from headrace.lifecycle import Backoff
from headrace.router.models import Models
from headrace.schemas import events, subjects
from headrace.schemas.endings import deadline_exceeded, end_of
from headrace.schemas.events import Event
from headrace.schemas.jobs import CancelRequest, Job, JobStatus, StatusRequest, decode_job
from headrace.schemas.refusals import Refusal
from headrace.schemas.states import JobState, step
from headrace.schemas.subjects import QueueName, is_job_id, is_model_name, is_name, is_reply, is_reply_to_tenant
from headrace.schemas.workers import WorkerNudge

__all__ = ["Control"]

log = logging.getLogger(__name__)

_RETRY_FIRST_S: Final = 0.01
_RETRY_MAX_S: Final = 0.5


class Control:
    """Answers status and cancel requests; any router can, the log decides."""

    def __init__(self, bus: Bus, models: Models) -> None:
        self._bus = bus
        self._log = JobLog(bus)
        self._models = models

    async def status(self, incoming: IncomingRequest) -> None:
        """Answer with the job's `JobStatus`, or `job_not_found`; have the broker answer what asks for events."""
        if not self._may_answer(incoming):
            return
        found = _job_of(incoming.subject)
        wish = _status_request(incoming.data)
        if found is None or wish is None:
            await refuse(self._bus, incoming, _not_found() if found is None else _bad_status_body())
            return
        tenant, job = found
        if wish.last_event or wish.events_from is not None:
            await self._send(incoming.reply, tenant, job, wish)
            return
        state = await self._log.state(tenant, job)
        if state.last is None:
            await refuse(self._bus, incoming, _not_found())
            return
        queued = None if state.is_terminal else await self._message(tenant, job, state)
        if queued is not None and self._bus.clock.now() > queued.deadline_at:
            if await self._append(tenant, state, end_of(state, queued, deadline_exceeded(queued)), queued):
                await self._after_end(tenant, job, state, queued)
            state = await self._log.state(tenant, job)
        await reply_with(self._bus, incoming, await self._describe(tenant, job, state))

    async def cancel(self, incoming: IncomingRequest) -> None:
        """Append `cancelled` unless the job ended already; answer with what it is now.

        A worker may append many times a second, each of which wins over an append that was prepared before. So only
        the first look is at the whole log; after a lost race nothing but the last event is read before the next try.
        """
        if not self._may_answer(incoming):
            return
        found = _job_of(incoming.subject)
        wish = _cancel_request(incoming.data)
        if found is None or wish is None:
            refusal = _not_found() if found is None else _bad_body()
            await refuse(self._bus, incoming, refusal)
            return
        tenant, job = found
        state = _with_wish(await self._log.state(tenant, job), wish)
        queued = None if state.is_terminal else await self._message(tenant, job, state)
        if state.last is None and queued is None:
            await refuse(self._bus, incoming, _not_found())
            return
        retries = Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S, for_s=self._bus.settings.retry_for_s)
        while not state.is_terminal and not retries.is_over:
            event = events.ended(
                "cancelled",
                job,
                attempt=state.attempt,
                offset=state.num_tokens,
                error=None,
                body_hash=queued.body_hash if queued is not None else state.body_hash,
            )
            if await self._append(tenant, state, event, queued):
                await self._after_end(tenant, job, state, queued)
                state = step(state, event)
                break
            last = await self._log.last_from_leader(tenant, job)
            if last is not None and last.sequence > state.sequence:
                before, state = state, step(state, last)
                if queued is None or _place_of(before) != _place_of(state):  # its number counts in one stream only
                    queued = await self._message(tenant, job, state)
            else:
                await retries.pause()
        if state.is_terminal:
            await reply_with(self._bus, incoming, await self._describe(tenant, job, state))
            return
        await refuse(self._bus, incoming, Refusal(code="internal", message="the broker gave no clear answer in time"))

    def _may_answer(self, incoming: IncomingRequest) -> bool:
        """Whether the answer goes to who may ask; NATS does not check what a client names as its reply."""
        tenant = incoming.subject.split(".")[-2]
        if not self._bus.settings.is_secured or not incoming.reply or is_reply_to_tenant(incoming.reply, tenant):
            return True
        log.info("a request of tenant %s was dropped: its reply subject is not the tenant's own", tenant)
        return False

    async def _send(self, inbox: str, tenant: str, job: str, wish: StatusRequest) -> None:
        if not is_reply(inbox, self._bus.names.prefix):
            return
        if wish.events_from is not None:
            await self._log.send(tenant, job, inbox, from_sequence=wish.events_from)
        else:
            await self._log.send_last(tenant, job, inbox)

    async def _append(self, tenant: str, state: JobState, event: Event, queued: Job | None) -> bool:
        # A terminal event may outlive the others, never the other way round: the longest deadline is the safe guess.
        deadline_s = queued.deadline_s if queued is not None else self._bus.settings.max_deadline_s
        ttl_s = state.ttl_s or deadline_s + self._bus.settings.log_retention_s
        return isinstance(await self._log.append(tenant, event, expected=state.sequence, ttl_s=ttl_s), Stored)

    async def _after_end(self, tenant: str, job: str, state: JobState, queued: Job | None) -> None:
        if queued is not None and state.queue_sequence is not None:
            await self._models.queue(queued.model).delete(state.queue_sequence)
        if state.owner is not None:
            nudge = WorkerNudge(kind="cancelled", tenant=tenant, job=job)
            await self._bus.publish(self._bus.names.ctl(state.owner.worker), msgspec.json.encode(nudge))

    async def _message(self, tenant: str, job: str, state: JobState) -> Job | None:
        """The job's queue message, checked to be its own (subjects are shared); None if it is not there."""
        if not state.model or state.queue_sequence is None:
            return None
        headers = await self._message_headers(state.model, state.queue_sequence)
        queued = decode_job(headers, b"")
        if headers is None or queued is None:
            return None
        is_handed_over = queued.handed_from is not None
        own = self._bus.names.message_id(tenant, job, is_handed_over=is_handed_over)
        return queued if headers.get(subjects.HDR_MSG_ID) == own else None

    async def _message_headers(self, model: str, sequence: int) -> dict[str, str] | None:
        if not await self._models.is_known(model):
            return None
        return await self._models.queue(model).headers_of(sequence)

    async def _describe(self, tenant: str, job: str, state: JobState) -> JobStatus:
        status = JobStatus(
            job=job,
            state=state.state,
            attempt=state.attempt,
            num_tokens=state.num_tokens,
            worker=state.owner.worker if state.owner is not None else None,
        )
        if state.state == "queued":
            return await self._with_position(status, state)
        if state.state in ("failed", "expired") and state.last is not None:
            return msgspec.structs.replace(status, error=msgspec.Raw(state.last.data))
        if state.last is not None and state.is_terminal and state.last.owner is not None:
            return msgspec.structs.replace(status, worker=state.last.owner.worker)
        return status

    async def _with_position(self, status: JobStatus, state: JobState) -> JobStatus:
        if not state.model or state.queue_sequence is None:
            return status
        status = msgspec.structs.replace(status, paused=self._models.is_paused(state.model))
        try:
            headers = await self._message_headers(state.model, state.queue_sequence)
            queue = QueueName.from_subject((headers or {}).get(subjects.HDR_SUBJECT, ""))
            if queue is None:
                return status
            num_ahead = await self._models.queue(state.model).num_ahead(queue, state.queue_sequence)
            workers = self._models.workers_of(state.model, queue.pool)
            waiting = waiting_of(await self._models.counts(state.model), workers)
        except BrokerError as error:
            log.info("the position of job %s is not known: %s", status.job, error)
            return status
        before = position(waiting, queue, num_ahead=num_ahead or 0)
        eta = self._models.eta_s(before, state.model, queue.pool)
        return msgspec.structs.replace(status, position=before, eta_s=eta)


def _job_of(subject: str) -> tuple[str, str] | None:
    tenant, job = subject.split(".")[-2:]
    return (tenant, job) if is_name(tenant) and is_job_id(job) else None


def _cancel_request(data: bytes) -> CancelRequest | None:
    if not data.strip():
        return CancelRequest()
    try:
        wish = msgspec.json.decode(data, type=CancelRequest)
    except (msgspec.DecodeError, RecursionError):
        return None
    if wish.model is not None and not is_model_name(wish.model):
        return None
    return wish


def _status_request(data: bytes) -> StatusRequest | None:
    if not data.strip():
        return StatusRequest()
    try:
        return msgspec.json.decode(data, type=StatusRequest)
    except (msgspec.DecodeError, RecursionError):
        return None


def _with_wish(state: JobState, wish: CancelRequest) -> JobState:
    return msgspec.structs.replace(
        state, queue_sequence=state.queue_sequence or wish.sequence, model=state.model or wish.model or ""
    )


def _place_of(state: JobState) -> tuple[str, int | None]:
    return state.model, state.queue_sequence


def _not_found() -> Refusal:
    return Refusal(code="job_not_found", message="no such job, or its log has expired")


def _bad_status_body() -> Refusal:
    return Refusal(
        code="invalid_value", message='the body must be empty, {"events_from": SEQUENCE} or {"last_event": true}'
    )


def _bad_body() -> Refusal:
    return Refusal(code="invalid_value", message='the body must be empty or {"sequence": N, "model": NAME}')
