"""Taking one request in: the steps of table R, in their order."""

import logging
import uuid
from typing import Final

from headrace import metrics, telemetry
from headrace.bus.configuration import ConfigView
from headrace.bus.connection import Bus, Refused, Stored, StoreResult, Unknown
from headrace.bus.joblog import JobLog
from headrace.bus.services import IncomingRequest, refuse, reply_with
from headrace.discipline.affinity import prefix_hashes
from headrace.discipline.position import position, retry_after_s, waiting_of
from headrace.errors import BrokerError, NotProvisionedError
from headrace.lifecycle import Backoff
from headrace.router.admission import Wish, check_reply, read_wish
from headrace.router.attempt import Try
from headrace.router.deliveries import Deliveries
from headrace.router.inflight import InFlight
from headrace.router.models import Models
from headrace.router.placement import Placed, Placement
from headrace.router.settlement import Settlement
from headrace.schemas import events, subjects
from headrace.schemas.conversation import conversation_texts
from headrace.schemas.events import AcceptedBody
from headrace.schemas.jobs import Job, body_hash
from headrace.schemas.openai import RequestLimits
from headrace.schemas.refusals import Refusal
from headrace.schemas.states import JobState
from headrace.schemas.subjects import DEFAULT_POOL, JobId
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
        settlement: Settlement,
        view: ConfigView,
    ) -> None:
        self._bus = bus
        self._settings = bus.settings
        self._names = bus.names
        self._log = JobLog(bus)
        self._models = models
        self._placement = Placement(bus, models, view)
        self._settlement = settlement
        self._in_flight = InFlight(bus)
        self._deliveries = deliveries
        self._view = view

    async def handle(self, incoming: IncomingRequest) -> None:
        """Take one request in, or refuse it; answers exactly once on the request's own inbox."""
        with step_span(Step.ADMIT, parent=telemetry.extract(incoming.headers)) as span:
            refusal = await self._handle_until_clear(incoming, span)
            if refusal is not None:
                span.fail(refusal.code)
                metrics.REQUESTS_REFUSED.add(refusal.code)
                await refuse(self._bus, incoming, refusal)

    async def _handle_until_clear(self, incoming: IncomingRequest, span: Span) -> Refusal | None:
        """Try through a broker's restart; always under one id and in one place, so that no unclear try is doubled."""
        attempt = Try(JobId(uuid.uuid4().hex))
        retries = Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S, for_s=self._settings.retry_for_s)
        while True:
            try:
                return await self._handle(incoming, attempt, span)
            except BrokerError as error:
                if retries.is_over and attempt.is_answered:
                    log.warning("a request was taken in, but not all of it was done: %s", error)
                    return None
                if retries.is_over:
                    self._give_back(attempt)
                    log.warning("a request could not be taken in: %s", error)
                    return Refusal(code="internal", message="the broker did not answer; send the request again")
            await retries.pause()

    async def _handle(self, incoming: IncomingRequest, attempt: Try, span: Span) -> Refusal | None:
        if not incoming.reply and subjects.HDR_ID not in incoming.headers:
            log.info("a request without a reply inbox and without an id was dropped: nobody could read its answer")
            span.fail("invalid_value")
            return None
        if incoming.reply:
            tenant = self._names.tenant_of_infer(incoming.subject)
            if refusal := self._reply_refusal(incoming.reply, tenant):
                log.info("a request of tenant %s was refused: %s", tenant, refusal.message)
                span.fail(refusal.code)
                # In an inbox it is somebody's, who is not told; what else a secured tenant names, it cannot hear.
                if not self._settings.is_secured and not incoming.reply.startswith(f"{subjects.INBOX}."):
                    await refuse(self._bus, incoming, refusal)
                return None
        wish = read_wish(
            incoming.subject,
            incoming.headers,
            incoming.data,
            names=self._names,
            settings=self._settings,
            limits=RequestLimits(max_body_bytes=min(_MAX_BODY_BYTES, self._bus.max_data_bytes)),
        )
        if isinstance(wish, Refusal):
            return wish
        named, job = wish.model, JobId(wish.job) if wish.job is not None else attempt.job
        digest = body_hash(wish.op, named, incoming.data)
        if attempt.placed is None:
            wish = await self._placement.route(wish, named, job)
            if isinstance(wish, Refusal):
                return wish
            span.set({"gen_ai.request.model": wish.model})
            may_be_known = wish.job is not None and subjects.HDR_NEW_ID not in incoming.headers
            if may_be_known and await self._log.last_from_leader(wish.tenant, job) is not None:
                return await self._attach(incoming, wish, job, digest, span, attempt)
            placed = await self._placement.place(wish, job, incoming.data)
            if isinstance(placed, Refusal):
                return placed
            paid = await self._settlement.admit(
                wish.tenant,
                job,
                num_tokens=placed.need_tokens,
                num_new=placed.new_tokens,
                is_streaming=wish.request.stream,
            )
            if isinstance(paid, Refusal):
                return paid
            attempt.asked, attempt.placed, attempt.paid = wish, placed, paid
        refusal = await self._enqueue(incoming, attempt, attempt.placed, digest, span)
        if refusal is not None and refusal.code == "queue_full":
            other = await self._other(attempt, incoming.data)
            if other is not None:
                attempt.placed, attempt.asked = other, None
                second = await self._enqueue(incoming, attempt, other, digest, span)
                refusal = second if second is None or second.code == "internal" else refusal
        if refusal is not None:
            self._give_back(attempt)
        return refusal

    def _reply_refusal(self, reply: str, tenant: str) -> Refusal | None:
        return check_reply(reply, tenant, self._view.tenants, is_secured=self._settings.is_secured)

    def _give_back(self, attempt: Try) -> None:
        """What a try paid is given back once, and only where it is sure that nothing was taken in."""
        if not attempt.is_unclear:
            self._settlement.give_back(attempt.paid)
            attempt.paid = None

    async def _other(self, attempt: Try, data: bytes) -> Placed | None:
        """Where else a request goes when the queue it was placed in is full: once, and if it has a fallback."""
        full, asked = attempt.placed, attempt.asked
        if full is None or asked is None or attempt.is_unclear:
            return None
        if not full.is_fallback:
            return await self._placement.fallback(full, data)
        own = await self._placement.own(asked, attempt.job if asked.job is None else asked.job, data)
        return None if isinstance(own, Refusal) else own

    async def _enqueue(
        self, incoming: IncomingRequest, attempt: Try, placed: Placed, digest: str, span: Span
    ) -> Refusal | None:
        wish, job = placed.wish, self._job(placed, attempt, digest, incoming.data)
        queue = self._models.queue(job.model)
        span.set(
            {
                "gen_ai.request.model": job.model,
                **job_attributes(
                    job=job.job, tenant=job.tenant, pool=wish.queue.pool, lane=wish.queue.lane, queue=wish.queue.queue
                ),
            }
        )
        trace_headers: dict[str, str] = {}
        telemetry.inject(trace_headers, span.context)
        retries = Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S, for_s=self._settings.retry_for_s)
        while True:
            result = await self._publish(wish, job, trace_headers, attempt)
            if result is None:
                return await self._at_limit(incoming, wish, job, attempt, span)
            if isinstance(result, Stored):
                break
            if isinstance(result, Refused):
                if not result.is_full:
                    log.error("the job queue of %s refuses messages: %s", job.model, result.description)
                    return Refusal(code="internal", message="the job queue refused the request")
                return await self._full(incoming, wish, job, attempt, span)
            if result.is_unserved and not await queue.exists():
                self._models.forget(job.model)
                return Refusal(
                    code="model_not_found", message=f"the model {job.model!r} is not known here", param="model"
                )
            attempt.is_unclear = True
            if retries.is_over:
                return Refusal(
                    code="internal",
                    message=f"the broker gave no clear answer; job {job.job} may run: send it again under the same id",
                )
            await retries.pause()
        if result.is_duplicate:
            return await self._duplicate(incoming, wish, job, result, attempt, span)
        attempt.is_unclear = True  # should the broker fail us from here on, the next try finds this message
        self._settlement.take_in(attempt.paid)
        self._models.note_published(job.model, wish.queue)
        metrics.REQUESTS_ACCEPTED.add(metrics.model_label(job.model), wish.queue.pool, wish.queue.lane)
        if job.preferred is not None:
            await queue.wake_worker(job.preferred, wish.queue)
        if self._models.is_room_left(job.model, wish.queue.pool, job.need_tokens):
            body = AcceptedBody(job=job.job, sequence=result.sequence, position=0, eta_s=0.0, model=job.model)
        else:
            body = await self._accepted_body(wish, job.job, result.sequence)
        secured = await self._secure(incoming, job.tenant, job.job)
        await self._answer(incoming, body, attempt)
        await self._append_accepted(job, body)
        await self._deliver(incoming, job.tenant, job.job, secured)
        return None

    async def _publish(self, wish: Wish, job: Job, headers: dict[str, str], attempt: Try) -> StoreResult | None:
        """None where the tenant has as many requests in flight as it may have.

        A try whose outcome was unclear may itself be what is counted, so the next one does not count.
        """
        queue = self._models.queue(job.model)
        limit = self._view.config.tenant(job.tenant).max_in_flight
        if limit is None or attempt.is_unclear:
            return await queue.publish(job, wish.queue, headers)
        try:
            return await self._in_flight.publish(queue, job, wish.queue, headers, limit=limit)
        except NotProvisionedError as error:
            return Unknown(str(error), is_unserved=True)

    async def _duplicate(
        self, incoming: IncomingRequest, wish: Wish, job: Job, result: Stored, attempt: Try, span: Span
    ) -> Refusal | None:
        headers = await self._models.queue(job.model).headers_of(result.sequence)
        if headers is not None:
            if headers.get(subjects.HDR_HASH) != job.body_hash:
                return _other_body()
            body = await self._accepted_body(wish, job.job, result.sequence)
            await self._append_accepted(job, body)  # repairs a router that died between publishing and this
        return await self._attach(incoming, wish, job.job, job.body_hash, span, attempt)

    async def _at_limit(
        self, incoming: IncomingRequest, wish: Wish, job: Job, attempt: Try, span: Span
    ) -> Refusal | None:
        if wish.job is not None and await self._log.last_from_leader(job.tenant, job.job) is not None:
            return await self._attach(incoming, wish, job.job, job.body_hash, span, attempt)
        limit = self._view.config.tenant(job.tenant).max_in_flight
        return Refusal(
            code="rate_limited",
            message=f"tenant {job.tenant} has its limit of {limit} requests of the model in flight; try again later",
            retry_after_s=retry_after_s(self._models.eta_s(0, job.model, wish.queue.pool)),
        )

    async def _full(self, incoming: IncomingRequest, wish: Wish, job: Job, attempt: Try, span: Span) -> Refusal | None:
        if await self._log.last_from_leader(job.tenant, job.job) is not None:
            return await self._attach(incoming, wish, job.job, job.body_hash, span, attempt)
        if attempt.is_unclear:
            return Refusal(
                code="internal",
                message=f"the broker gave no clear answer; job {job.job} may run: send it again under the same id",
            )
        limit = self._models.queue_limit(job.model)
        wait = self._models.eta_s(limit, job.model, wish.queue.pool)
        return Refusal(
            code="queue_full",
            message=f"the queue of the model holds its limit of {limit} requests; try again later",
            retry_after_s=retry_after_s(wait),
        )

    async def _attach(
        self,
        incoming: IncomingRequest,
        wish: Wish,
        job: str,
        digest: str,
        span: Span,
        attempt: Try,
    ) -> Refusal | None:
        state = await self._log.state(wish.tenant, job)
        if state.body_hash and state.body_hash != digest:
            return _other_body()
        self._give_back(attempt)  # sent again: nothing new is taken in
        self._settlement.take_in(attempt.paid)  # unless it was this try that stored it
        span.set({**job_attributes(job=job, tenant=wish.tenant), "headrace.attached": True})
        body = await self._accepted_body(wish, job, state.queue_sequence, state)
        secured = await self._secure(incoming, wish.tenant, job)
        await self._answer(incoming, body, attempt, is_attached=True)
        await self._deliver(incoming, wish.tenant, job, secured)
        return None

    def _job(self, placed: Placed, attempt: Try, digest: str, data: bytes) -> Job:
        wish, fallback = placed.wish, placed.fallback
        hashes = prefix_hashes(conversation_texts(wish.request))
        return Job(
            tenant=wish.tenant,
            job=JobId(wish.job) if wish.job is not None else attempt.job,
            op=wish.op,
            model=wish.model,
            body=data,
            body_hash=digest,
            accepted_at=self._bus.clock.now(),
            queue_timeout_s=wish.queue_timeout_s,
            deadline_s=wish.deadline_s,
            need_tokens=placed.need_tokens,
            fallback=fallback.model if fallback is not None else None,
            fallback_pool=fallback.queue.pool if fallback is not None else DEFAULT_POOL,
            preferred=self._models.preferred(wish.model, wish.queue.pool, hashes, placed.need_tokens),
        )

    async def _accepted_body(
        self, wish: Wish, job: str, sequence: int | None, state: JobState | None = None
    ) -> AcceptedBody:
        if state is not None and state.state != "queued":
            return AcceptedBody(job=job, sequence=sequence, position=0, eta_s=0.0, model=state.model or wish.model)
        workers = self._models.workers_of(wish.model, wish.queue.pool)
        waiting = waiting_of(await self._models.counts(wish.model), workers)
        num_ahead = max(0, waiting.get(wish.queue, 0) - 1)  # itself is there too
        before = position(waiting, wish.queue, num_ahead=num_ahead, weights=self._models.weights(waiting))
        eta = self._models.eta_s(before, wish.model, wish.queue.pool)
        return AcceptedBody(job=job, sequence=sequence, position=before, eta_s=eta, model=wish.model)

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

    async def _answer(
        self, incoming: IncomingRequest, body: AcceptedBody, attempt: Try, *, is_attached: bool = False
    ) -> None:
        if attempt.is_answered:  # the broker failed us after that
            return
        headers = {subjects.HDR_EVENT: "accepted", subjects.HDR_JOB: body.job}
        if is_attached:
            headers[subjects.HDR_ATTACHED] = "1"
        await reply_with(self._bus, incoming, body, headers)
        attempt.is_answered = True

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
