"""Taking one request in: the steps of table R, in their order."""

import logging
import uuid
from collections.abc import Callable
from typing import Final

from headrace import telemetry
from headrace.bus.connection import Bus, Refused, Stored, Unknown
from headrace.bus.joblog import JobLog
from headrace.bus.services import IncomingRequest, refuse, reply_with
from headrace.discipline.position import eta_s, position, retry_after_s, waiting_of
from headrace.errors import BrokerError
from headrace.lifecycle import Backoff
from headrace.router.admission import Wish, check_reply, read_wish
from headrace.router.deliveries import Deliveries
from headrace.router.models import Models
from headrace.router.sizing import Sizing
from headrace.schemas import events, subjects
from headrace.schemas.events import AcceptedBody
from headrace.schemas.jobs import Job, body_hash
from headrace.schemas.openai import RequestLimits
from headrace.schemas.refusals import Refusal
from headrace.schemas.states import JobState
from headrace.schemas.subjects import JobId
from headrace.telemetry import Span, Step, job_attributes, step_span

__all__ = ["Ingress"]

log = logging.getLogger(__name__)

_MAX_BODY_BYTES: Final = 900_000
_RETRY_FIRST_S: Final = 0.25
_RETRY_MAX_S: Final = 2.0


class Ingress:
    """Handles requests. Keeps nothing a client depends on: the queue and the log are the state."""

    def __init__(
        self,
        bus: Bus,
        models: Models,
        deliveries: Deliveries,
        *,
        tenants: Callable[[], frozenset[str]],
    ) -> None:
        self._bus = bus
        self._settings = bus.settings
        self._names = bus.names
        self._log = JobLog(bus)
        self._models = models
        self._sizing = Sizing(bus, models)
        self._deliveries = deliveries
        self._tenants = tenants

    async def handle(self, incoming: IncomingRequest) -> None:
        """Take one request in, or refuse it; answers exactly once on the request's own inbox."""
        with step_span(Step.ADMIT, parent=telemetry.extract(incoming.headers)) as span:
            refusal = await self._handle_until_clear(incoming, span)
            if refusal is not None:
                span.fail(refusal.code)
                await refuse(self._bus, incoming, refusal)

    async def _handle_until_clear(self, incoming: IncomingRequest, span: Span) -> Refusal | None:
        """Try through a broker's restart; always under one id, so a try whose outcome was unclear is not doubled."""
        made_up = JobId(uuid.uuid4().hex)
        retries = Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S, for_s=self._settings.retry_for_s)
        while True:
            try:
                return await self._handle(incoming, made_up, span)
            except BrokerError as error:
                if retries.is_over:
                    log.warning("a request could not be taken in: %s", error)
                    return Refusal(code="internal", message="the broker did not answer; send the request again")
            await retries.pause()

    async def _handle(self, incoming: IncomingRequest, made_up: JobId, span: Span) -> Refusal | None:
        if not incoming.reply and subjects.HDR_ID not in incoming.headers:
            log.info("a request without a reply inbox and without an id was dropped: nobody could read its answer")
            span.fail("invalid_value")
            return None
        ingress = self._names.parse_infer(incoming.subject)
        if incoming.reply:
            tenant = ingress.tenant if ingress is not None else subjects.DEFAULT_TENANT
            if refusal := check_reply(incoming.reply, tenant, self._tenants()):
                log.info("a request of tenant %s was refused: %s", tenant, refusal.message)
                span.fail(refusal.code)
                if not incoming.reply.startswith(f"{subjects.INBOX}."):  # else it is somebody's, and not told
                    await refuse(self._bus, incoming, refusal)
                return None
        wish = read_wish(
            incoming.subject,
            incoming.headers,
            incoming.data,
            names=self._names,
            settings=self._settings,
            pools=self._models.pools(ingress.model) if ingress is not None else frozenset(),
            limits=RequestLimits(max_body_bytes=min(_MAX_BODY_BYTES, self._bus.max_data_bytes)),
        )
        if isinstance(wish, Refusal):
            return wish
        if not await self._models.is_known(wish.model):
            return Refusal(code="model_not_found", message="the model is not known here", param="model")
        span.set({"gen_ai.request.model": wish.model})
        digest = body_hash(wish.op, wish.model, incoming.data)
        if wish.job is not None and await self._log.last_from_leader(wish.tenant, wish.job) is not None:
            return await self._attach(incoming, wish, wish.job, digest, span)
        need = await self._sizing.need_tokens(wish, incoming.data)
        if isinstance(need, Refusal):
            return need
        job = Job(
            tenant=wish.tenant,
            job=JobId(wish.job) if wish.job is not None else made_up,
            op=wish.op,
            model=wish.model,
            body=incoming.data,
            body_hash=digest,
            accepted_at=self._bus.clock.now(),
            queue_timeout_s=wish.queue_timeout_s,
            deadline_s=wish.deadline_s,
            need_tokens=need,
            fallback=wish.fallback,
        )
        span.set(
            job_attributes(
                job=job.job, tenant=job.tenant, pool=wish.queue.pool, lane=wish.queue.lane, queue=wish.queue.queue
            )
        )
        return await self._enqueue(incoming, wish, job, span)

    async def _enqueue(self, incoming: IncomingRequest, wish: Wish, job: Job, span: Span) -> Refusal | None:
        queue = self._models.queue(job.model)
        trace_headers: dict[str, str] = {}
        telemetry.inject(trace_headers, span.context)
        retries = Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S, for_s=self._settings.retry_for_s)
        is_unclear = False
        while True:
            result = await queue.publish(job, wish.queue, trace_headers)
            if isinstance(result, Stored):
                break
            if isinstance(result, Refused):
                if not result.is_full:
                    log.error("the job queue of %s refuses messages: %s", job.model, result.description)
                    return Refusal(code="internal", message="the job queue refused the request")
                return await self._full(incoming, wish, job, is_unclear=is_unclear, span=span)
            if result.is_unserved and not await queue.exists():
                self._models.forget(job.model)
                return Refusal(code="model_not_found", message="the model is not known here", param="model")
            is_unclear = True
            if retries.is_over:
                return Refusal(
                    code="internal",
                    message=f"the broker gave no clear answer; job {job.job} may run: send it again under the same id",
                )
            await retries.pause()
        if not result.is_duplicate:
            self._models.note_published(job.model, wish.queue)
        else:
            return await self._duplicate(incoming, wish, job, result, span)
        body = await self._accepted_body(wish, job.job, result.sequence)
        secured = await self._secure(incoming, job.tenant, job.job)
        await self._answer(incoming, body)
        await self._append_accepted(job, body)
        await self._deliver(incoming, job.tenant, job.job, secured)
        return None

    async def _duplicate(
        self, incoming: IncomingRequest, wish: Wish, job: Job, result: Stored, span: Span
    ) -> Refusal | None:
        headers = await self._models.queue(job.model).headers_of(result.sequence)
        if headers is not None:
            if headers.get(subjects.HDR_HASH) != job.body_hash:
                return _other_body()
            body = await self._accepted_body(wish, job.job, result.sequence)
            await self._append_accepted(job, body)  # repairs a router that died between publishing and this
        return await self._attach(incoming, wish, job.job, job.body_hash, span)

    async def _full(
        self, incoming: IncomingRequest, wish: Wish, job: Job, *, is_unclear: bool, span: Span
    ) -> Refusal | None:
        if await self._log.last_from_leader(job.tenant, job.job) is not None:
            return await self._attach(incoming, wish, job.job, job.body_hash, span)
        if is_unclear:
            return Refusal(
                code="internal",
                message=f"the broker gave no clear answer; job {job.job} may run: send it again under the same id",
            )
        wait = eta_s(self._settings.queue_limit, self._models.workers_of(job.model, wish.queue.pool))
        return Refusal(
            code="queue_full",
            message=f"the queue of the model holds its limit of {self._settings.queue_limit} requests; try again later",
            retry_after_s=retry_after_s(wait),
        )

    async def _attach(self, incoming: IncomingRequest, wish: Wish, job: str, digest: str, span: Span) -> Refusal | None:
        state = await self._log.state(wish.tenant, job)
        if state.body_hash and state.body_hash != digest:
            return _other_body()
        span.set({**job_attributes(job=job, tenant=wish.tenant), "headrace.attached": True})
        body = await self._accepted_body(wish, job, state.queue_sequence, state)
        secured = await self._secure(incoming, wish.tenant, job)
        await self._answer(incoming, body, is_attached=True)
        await self._deliver(incoming, wish.tenant, job, secured)
        return None

    async def _accepted_body(
        self, wish: Wish, job: str, sequence: int | None, state: JobState | None = None
    ) -> AcceptedBody:
        if state is not None and state.state != "queued":
            return AcceptedBody(job=job, sequence=sequence, position=0, eta_s=0.0, model=wish.model)
        workers = self._models.workers_of(wish.model, wish.queue.pool)
        waiting = waiting_of(await self._models.counts(wish.model), workers)
        before = position(waiting, wish.queue, num_ahead=max(0, waiting.get(wish.queue, 0) - 1))  # itself is there too
        return AcceptedBody(job=job, sequence=sequence, position=before, eta_s=eta_s(before, workers), model=wish.model)

    async def _append_accepted(self, job: Job, body: AcceptedBody) -> None:
        event = events.accepted(job.job, body, body_hash=job.body_hash)
        retries = Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S, for_s=self._settings.retry_for_s)
        ttl_s = job.deadline_s + self._settings.log_retention_s
        while not retries.is_over:
            result = await self._log.append(job.tenant, event, expected=0, ttl_s=ttl_s)
            if not isinstance(result, Unknown):
                return  # stored, or a worker was faster
            await retries.pause()
        log.warning("job %s: its `accepted` event is not known to be stored; the job itself is queued", job.job)

    async def _answer(self, incoming: IncomingRequest, body: AcceptedBody, *, is_attached: bool = False) -> None:
        headers = {subjects.HDR_EVENT: "accepted", subjects.HDR_JOB: body.job}
        if is_attached:
            headers[subjects.HDR_ATTACHED] = "1"
        await reply_with(self._bus, incoming, body, headers)

    async def _secure(self, incoming: IncomingRequest, tenant: str, job: str) -> str | None:
        """Provide for a client on an inbox of its own in case we die between the answer and the delivery."""
        if not incoming.reply or incoming.reply == self._names.job_inbox(tenant, job):
            return None
        return await self._deliveries.secure(tenant, job, incoming.reply)

    async def _deliver(self, incoming: IncomingRequest, tenant: str, job: str, secured: str | None) -> None:
        if secured is not None:
            await self._deliveries.add(tenant, job, incoming.reply, instead_of=secured)


def _other_body() -> Refusal:
    return Refusal(
        code="invalid_value",
        message="this id was used for another request; choose a new id or send the same body",
        param=subjects.HDR_ID,
    )
