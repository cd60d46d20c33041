"""One job as its reader sees it: a stream that repairs itself from the log and never yields a hole."""

import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from types import TracebackType
from typing import Final, Self

import msgspec
from opentelemetry.context import Context

from headrace import telemetry
from headrace.bus.connection import DEFAULT_PENDING, Bus, Message, Pending, Subscription
from headrace.bus.joblog import event_of_republish
from headrace.client.chain import Chain, Link
from headrace.client.control import JobControl
from headrace.client.events import Accepted, Delta, Done, StreamEvent, as_chunk, chunk_text, from_event
from headrace.client.reading import LogReader
from headrace.errors import (
    BrokerError,
    BrokerUnavailableError,
    JobCancelledError,
    JobExpiredError,
    JobFailedError,
    RequestError,
    StreamGapError,
)
from headrace.lifecycle import Backoff
from headrace.schemas import subjects
from headrace.schemas.events import AcceptedBody, Event
from headrace.schemas.jobs import JobStatus
from headrace.schemas.openai import Operation
from headrace.schemas.refusals import ErrorBody, Refusal
from headrace.telemetry import Span, Step, inference_result, inference_span, job_attributes, step_span

__all__ = ["JobStream", "Submission"]

log = logging.getLogger(__name__)

_SILENCE_FIRST_S: Final = 1.0
_SILENCE_MAX_S: Final = 5.0
_RETRY_FIRST_S: Final = 0.1
_RETRY_MAX_S: Final = 2.0
_PAST_DEADLINE_S: Final = 10.0
_STATUS_NO_RESPONDERS: Final = "503"


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A request to publish: body and headers as they go over the wire. `is_new_id`: nobody can have used its id."""

    op: Operation
    model: str
    body: bytes
    headers: dict[str, str]
    is_streaming: bool
    deadline_s: float
    is_new_id: bool = False


class JobStream:
    """The events of one job, each once and in order; iterate it once.

    Raises, while iterated: RequestError (refused), JobFailedError, JobExpiredError, JobCancelledError, StreamGapError
    (tokens are missing and gone from the log), BrokerError. Leaving early leaves the job running; `cancel` ends it.
    """

    def __init__(
        self,
        bus: Bus,
        control: JobControl,
        *,
        tenant: str,
        job: str,
        submission: Submission | None,
        after: int = 0,
        parent: Context | None = None,
        max_pending: Pending = DEFAULT_PENDING,
    ) -> None:
        self.job = job
        self._bus = bus
        self._control = control
        self._tenant = tenant
        self._submission = submission
        self._after = after
        self._parent = parent
        self._max_pending = max_pending
        self._log = LogReader(bus, tenant)
        self._chain = Chain()
        self._early: deque[Event] = deque()
        self._num_repairing = 0
        self._num_chars = 0
        self._subscription: Subscription | None = None
        self._accepted: AcceptedBody | None = None
        self._is_attached = submission is None
        self._started_at = time.monotonic()
        self._ttft_s: float | None = None
        self._events: AsyncGenerator[StreamEvent, None] | None = None

    @property
    def is_attached(self) -> bool:
        """Whether the job was there before: it is somebody else's request, or was sent earlier under the same id.

        One under an id that was made up for this request is its own, also where its first sending got no answer.
        """
        return self._is_attached and not (self._submission is not None and self._submission.is_new_id)

    @property
    def has_more(self) -> bool:
        """Whether the next event is here already, so that a reader may take it before it does anything slow. A hint."""
        if self._num_repairing or self._early:
            return True
        return self._subscription is not None and self._bus.has_message(self._subscription)

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        if self._events is None:
            self._events = self._run()
        return self._events

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._events is not None:
            await self._events.aclose()

    async def cancel(self) -> JobStatus:
        """Cancel the job; returns what it is now (it may have ended before)."""
        accepted = self._accepted
        return await self._control.cancel(
            self.job,
            sequence=accepted.sequence if accepted is not None else None,
            model=accepted.model or None if accepted is not None else None,
        )

    async def _run(self) -> AsyncGenerator[StreamEvent, None]:
        submission = self._submission
        inbox = self._bus.names.job_inbox(self._tenant, self.job)
        subscription = self._subscription = await self._bus.subscribe(inbox, max_pending=self._max_pending)
        try:
            with self._span(submission) as span:
                if submission is not None:
                    yield await self._submit(subscription, submission, span)
                async for event in self._follow(subscription):
                    seen = self._see(event, span)
                    if seen is not None:
                        yield seen
                    if event.is_terminal:
                        return
        finally:
            if not self._bus.nc.is_closed:
                await subscription.unsubscribe()

    def _span(self, submission: Submission | None) -> Span:
        attributes = job_attributes(job=self.job, tenant=self._tenant)
        if submission is None:
            return telemetry.start_span("attach", parent=self._parent, attributes=attributes)
        return inference_span(
            submission.op,
            submission.model,
            provider="headrace",
            parent=self._parent,
            is_streaming=submission.is_streaming,
            attributes=attributes,
        )

    async def _submit(self, subscription: Subscription, submission: Submission, span: Span) -> Accepted:
        """Publish until a router answers; the same id every time, so it runs once."""
        subject = self._bus.names.infer(self._tenant, submission.op, submission.model)
        retries = Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S, for_s=self._bus.settings.retry_for_s)
        with step_span(Step.PUBLISH, submission.model, parent=span.context) as publishing:
            headers = dict(submission.headers)
            telemetry.inject(headers, publishing.context)
            if submission.is_new_id:
                headers[subjects.HDR_NEW_ID] = "1"
            while True:
                inbox = self._bus.names.job_inbox(self._tenant, self.job)
                await self._bus.publish(subject, submission.body, reply=inbox, headers=headers)
                answer = await self._await_answer(subscription)
                headers.pop(subjects.HDR_NEW_ID, None)
                if answer is not None:
                    self._accepted = answer
                    return Accepted(
                        job=self.job, sequence=answer.sequence, position=answer.position, eta_s=answer.eta_s
                    )
                if self._bus.is_denied(subject):
                    raise BrokerUnavailableError(f"the broker does not permit {subject} to this credential")
                if retries.is_over:
                    raise RequestError(
                        Refusal(code="internal", message="no router answered; is one running? (`headrace up`)"),
                        job=self.job,
                    )
                await retries.pause()

    async def _await_answer(self, subscription: Subscription) -> AcceptedBody | None:
        """The router's answer; None if none came in time or no router runs. Events that come before it are kept."""
        until = time.monotonic() + self._bus.settings.request_timeout_s
        while True:
            message = await self._bus.next_message(subscription, until - time.monotonic())
            if message is None:
                return None
            headers: Mapping[str, str] = message.headers or {}
            if headers.get("Status") == _STATUS_NO_RESPONDERS:
                return None
            event = self._own_event(message)
            if event is not None:
                self._early.append(event)
                continue
            try:
                if headers.get(subjects.HDR_EVENT) == "accepted":
                    self._is_attached = self._is_attached or subjects.HDR_ATTACHED in headers
                    return msgspec.json.decode(message.data, type=AcceptedBody)
                if headers.get(subjects.HDR_EVENT) == "error":
                    raise _refused(headers, message.data, self.job)
            except msgspec.DecodeError:
                log.warning("an undecodable answer for job %s was ignored", self.job)

    async def _follow(self, subscription: Subscription) -> AsyncIterator[Event]:
        """Events in order, without a hole: live ones, and what is missing from the log."""
        if self._is_attached:
            async for event in self._repair():
                yield event
        silence_s = _SILENCE_FIRST_S
        while True:
            live = await self._next_live(subscription, silence_s)
            if live is None:
                silence_s = min(silence_s * 2, _SILENCE_MAX_S)
                if await self._is_behind():
                    async for event in self._repair():
                        yield event
                continue
            silence_s = _SILENCE_FIRST_S
            link = self._chain.link(live, is_from_log=False)
            if link is Link.NEXT:
                self._chain.take(live)
                yield live
            elif link is not Link.KNOWN:
                async for event in self._repair():
                    yield event

    async def _next_live(self, subscription: Subscription, silence_s: float) -> Event | None:
        if self._early:
            return self._early.popleft()
        until = time.monotonic() + silence_s
        while True:
            message = await self._bus.next_message(subscription, until - time.monotonic())
            if message is None:
                return None
            event = self._own_event(message)
            if event is not None:
                return event

    def _own_event(self, message: Message) -> Event | None:
        """The event in a message of the job's inbox. Deployments under other prefixes use the same inboxes."""
        subject = (message.headers or {}).get(subjects.HDR_SUBJECT)
        return event_of_republish(message) if subject == self._bus.names.log(self._tenant, self.job) else None

    async def _is_behind(self) -> bool:
        """Whether the log has something we did not see; a lost last message shows no later gap."""
        try:
            last = await self._log.last(self.job)
        except BrokerError as error:
            log.debug("job %s: the log cannot be read now: %s", self.job, error)
            return False
        if last is not None and last.sequence > self._chain.sequence:
            return True
        if last is None and (self._chain.sequence or self._submission is None):
            raise self._gone()
        await self._mind_the_deadline()
        return False

    async def _mind_the_deadline(self) -> None:
        deadline_s = self._submission.deadline_s if self._submission is not None else self._bus.settings.deadline_s
        overdue_s = time.monotonic() - self._started_at - deadline_s
        if overdue_s <= 0:
            return
        with contextlib.suppress(BrokerError, RequestError):
            await self._control.status(self.job)  # a router that meets an overdue job ends it
        if overdue_s > _PAST_DEADLINE_S and self._submission is not None:
            raise JobFailedError(
                Refusal(
                    code="deadline_exceeded", message=f"no end of the job was seen {overdue_s:.0f} s after its deadline"
                ),
                job=self.job,
            )

    async def _repair(self) -> AsyncIterator[Event]:
        events = await self._missing()
        for number, event in enumerate(events, start=1):
            self._num_repairing = len(events) - number
            yield event

    async def _missing(self) -> list[Event]:
        """Read on from the log; empty while it cannot be read, which the next silence tries again."""
        try:
            events = await self._log.read(self.job, from_sequence=self._chain.sequence + 1)
        except BrokerError as error:
            log.warning("job %s: its log cannot be read now: %s", self.job, error)
            return []
        if not events and not self._chain.sequence and self._submission is None:
            raise self._gone()
        found: list[Event] = []
        for event in events:
            link = self._chain.link(event, is_from_log=True)
            if link is Link.LOST and event.kind == "done":
                if filler := self._filler(event):
                    found.append(filler)
                link = Link.NEXT
            if link is Link.LOST:
                raise self._gap()
            if link is Link.NEXT:
                self._chain.take(event)
                found.append(event)
        return found

    def _filler(self, done: Event) -> Event | None:
        """The tokens that only `done` still holds, as one delta; None where the reader asked for what is after them."""
        response = done.json()
        has_many = len(response.get("choices", ())) != 1
        if self._after or (has_many and self._chain.num_tokens):
            if self._after:
                return None
            raise self._gap()
        chunk = as_chunk(response, skip_chars=self._num_chars)
        return msgspec.structs.replace(
            done,
            kind="delta",
            offset=self._chain.num_tokens,
            count=done.offset - self._chain.num_tokens,
            data=msgspec.json.encode(chunk),
        )

    def _see(self, event: Event, span: Span) -> StreamEvent | None:
        """What the reader is given of an event, if anything. Raises what the stream raises for a bad end."""
        if event.kind == "accepted" and self._accepted is not None:
            return None  # the router said so already
        if event.kind in ("failed", "expired", "cancelled"):
            raise _bad_end(event)
        seen = from_event(event)
        if isinstance(seen, Delta):
            self._num_chars += len(chunk_text(seen.chunk))
            if self._ttft_s is None:
                self._ttft_s = time.monotonic() - self._started_at
            if event.offset < self._after:
                return None
        if isinstance(seen, Done):
            span.set(
                inference_result(
                    num_input_tokens=seen.usage.prompt_tokens if seen.usage else None,
                    num_output_tokens=seen.usage.completion_tokens if seen.usage else None,
                    finish_reasons=[seen.finish_reason] if seen.finish_reason else [],
                    ttft_s=self._ttft_s,
                )
            )
        return seen

    def _gap(self) -> StreamGapError:
        refusal = Refusal(
            code="stream_gap", message=f"tokens after offset {self._chain.num_tokens} are gone from the job's log"
        )
        return StreamGapError(refusal, job=self.job)

    def _gone(self) -> RequestError:
        if self._chain.sequence:
            return self._gap()
        return RequestError(Refusal(code="job_not_found", message="no such job, or its log has expired"), job=self.job)


def _refused(headers: Mapping[str, str], data: bytes, job: str) -> RequestError:
    detail = msgspec.json.decode(data, type=ErrorBody).error
    retry_after = headers.get(subjects.HDR_RETRY_AFTER, "")
    return RequestError(
        Refusal(
            code=detail.code,
            message=detail.message,
            param=detail.param,
            retry_after_s=int(retry_after) if retry_after.isdigit() else None,
        ),
        job=job,
    )


def _bad_end(event: Event) -> RequestError:
    refusal = event.error()
    if event.kind == "cancelled":
        return JobCancelledError(refusal or Refusal(code="job_failed", message="the job was cancelled"), job=event.job)
    refusal = refusal or Refusal(code="job_failed", message=f"the job {event.kind}")
    error = JobExpiredError if event.kind == "expired" else JobFailedError
    return error(refusal, job=event.job)
