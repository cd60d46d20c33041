"""One claimed job from its first token to its terminal event."""

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec

from headrace import metrics
from headrace.bus.clock import BrokerClock
from headrace.bus.joblog import JobLog
from headrace.bus.jobqueue import Delivery
from headrace.errors import EngineBusyError, EngineError, EngineRequestError
from headrace.schemas import events
from headrace.schemas.chunks import ChoiceDelta, EngineChunk, Usage
from headrace.schemas.events import Event, Owner
from headrace.schemas.jobs import Job
from headrace.schemas.openai import InferenceRequest
from headrace.schemas.openai_chunks import ChunkEncoder, decode_chunk
from headrace.schemas.refusals import Refusal
from headrace.schemas.responses import ResponseAssembler
from headrace.schemas.states import JobState
from headrace.schemas.subjects import Lane
from headrace.telemetry import Span, inference_result, inference_span
from headrace.worker.appending import Appended, Ended, Fenced, LogWriter, TooLarge
from headrace.worker.deltas import DeltaFlow
from headrace.worker.engines.base import Engine, Resume
from headrace.worker.wellbeing import Course

__all__ = ["Claimed", "Execution", "Outcome", "ResultKind", "StopReason"]

log = logging.getLogger(__name__)

_TOO_LARGE: Final = Refusal(
    code="engine_error", message="the answer, or a piece of it, is larger than one message of the broker can be"
)
_PRIORITIES: Final[dict[Lane, int]] = {"high": -1, "normal": 0, "low": 1}
"""Of an engine, where less comes first. 0 is what an engine takes a request for that tells none."""
_ID_PREFIX: Final = {"chat": "chatcmpl-", "completions": "cmpl-", "embeddings": "embd-"}

StopReason = Literal["ended", "fenced", "drain", "stalled", "engine_died"]


class ResultKind(enum.Enum):
    """What the worker does with the queue message after an execution."""

    SETTLED = "settled"
    """A terminal event is in the log: ack."""
    FORGET = "forget"
    """Fenced: no ack, no NAK."""
    HAND_BACK = "hand_back"
    """`requeued` is in the log: NAK and wake."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an execution ended; `num_faults` is what the log counts if handed back for a fault."""

    kind: ResultKind
    event: Event | None = None
    is_fault: bool = False
    is_busy: bool = False
    num_tokens: int = 0


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """A job whose `started` is in the log, and all the log said before it."""

    delivery: Delivery
    job: Job
    request: InferenceRequest
    owner: Owner
    state: JobState
    history: tuple[Event, ...]
    num_prompt_tokens: int
    max_tokens: int


class Execution:
    """Runs one claimed job. `stop` ends it early from outside; everything else it decides itself.

    `last_progress` is the monotonic time of the last piece from the engine, for the watchdog; `has_read_prompt` says
    whether a token came from it. `course` is told how long each took, `on_progress` at each how many tokens this
    attempt has made. `on_fault` is called, and `has_faulted` set, as the engine fails it.
    """

    def __init__(
        self,
        claimed: Claimed,
        *,
        engine: Engine,
        job_log: JobLog,
        log_ttl_s: float,
        retry_for_s: float,
        max_event_bytes: int,
        clock: BrokerClock,
        span: Span,
        on_progress: Callable[[int], None],
        on_fault: Callable[[], None],
        course: Course,
    ) -> None:
        self._claimed = claimed
        self._engine = engine
        self._span = span
        self._on_progress = on_progress
        self._on_fault = on_fault
        self._course = course
        self._max_event_bytes = max_event_bytes
        self._clock = clock
        job = claimed.job
        self._writer = LogWriter(
            job_log, job.tenant, sequence=claimed.state.sequence, ttl_s=log_ttl_s, retry_for_s=retry_for_s
        )
        self._response_id = f"{_ID_PREFIX[job.op]}{job.job}"
        self._created = int(job.accepted_at)
        self._assembler = ResponseAssembler(job.op)
        self._flow = DeltaFlow(
            self._writer,
            ChunkEncoder(job.op, id=self._response_id, created=self._created, model=job.model),
            job=job.job,
            owner=claimed.owner,
            attempt=claimed.state.attempt,
            offset=claimed.state.num_tokens,
            on_refused=self._on_refused,
        )
        self._task: asyncio.Task[Any] | None = None
        self._stop_reason: StopReason | None = None
        self._is_over = False
        self._refused: Ended | Fenced | TooLarge | None = None
        self._usage: Usage | None = None
        self._whole_response: dict[str, Any] | None = None
        self.has_read_prompt = False
        self.has_faulted = False
        self.last_progress = time.monotonic()

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far, those of earlier attempts included."""
        return self._assembler.num_tokens

    @property
    def claimed(self) -> Claimed:
        """What it runs."""
        return self._claimed

    def stop(self, reason: StopReason) -> None:
        """End it early; only the first reason counts, and none once the engine is done with it."""
        if self._is_over or self._stop_reason is not None:
            return
        self._stop_reason = reason
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> Outcome:
        """Run to an outcome. Raises only CancelledError, where the task was cancelled without `stop`."""
        try:
            return await self._run()
        finally:
            model = metrics.model_label(self._claimed.job.model)
            metrics.TOKENS.add(model, "prompt", number=self._claimed.num_prompt_tokens)
            metrics.TOKENS.add(model, "completion", number=self._num_made)

    async def _run(self) -> Outcome:
        writing = asyncio.create_task(self._flow.run(), name=f"deltas of {self._claimed.job.job}")
        try:
            failure = await self._generate_until_stopped()
            # The append under way must be seen to its end, or what follows it cannot know what to expect.
            self._flow.close()
            await writing
        finally:
            writing.cancel()
        if isinstance(self._refused, TooLarge):
            return await self._end("failed", _TOO_LARGE)
        if self._refused is not None:
            return self._after_refusal(self._refused)
        if self._stop_reason == "fenced":
            return self._after_refusal(Fenced("the worker lost its registration"))
        if self._stop_reason is not None:
            return await self._hand_back(self._stop_reason, is_fault=self._stop_reason != "drain")
        if failure is not None:
            return await self._after_failure(failure)
        return await self._done()

    async def _generate_until_stopped(self) -> Exception | None:
        self._task = asyncio.current_task()
        try:
            if self._stop_reason is None:
                async with asyncio.timeout(max(0.0, self._claimed.job.deadline_at - self._clock.now())):
                    await self._generate()
        except asyncio.CancelledError:
            if self._stop_reason is None or self._task is None:
                raise
            self._task.uncancel()
        except (TimeoutError, EngineError) as error:
            return error
        except Exception as error:  # a defect of ours must not loop for ever with the job: it counts as a fault
            log.exception("job %s: unexpected error", self._claimed.job.job)
            return error
        finally:
            self._is_over = True
            self._course.end()
        return None

    async def _generate(self) -> None:
        claimed, request = self._claimed, self._claimed.request
        for event in claimed.history:
            if event.kind == "delta":
                self._assembler.add(decode_chunk(event.data, num_tokens=event.count))
        if self._assembler.num_tokens and not request.is_resumable:
            raise _NotResumableError("the request cannot be continued in mid-answer and part of it was already sent")
        if self._assembler.is_complete(request.n):
            return
        num_left = claimed.max_tokens - self._assembler.num_tokens
        if num_left <= 0 and request.op != "embeddings":
            self._assembler.add((ChoiceDelta(finish_reason="length"),))
            return
        await self._read_engine(num_left)

    async def _read_engine(self, num_left: int) -> None:
        claimed, request = self._claimed, self._claimed.request
        resume = self._resume()
        started = time.monotonic()
        ttft_s: float | None = None
        model = metrics.model_label(claimed.job.model)
        with inference_span(
            claimed.job.op,
            claimed.job.model,
            provider=self._engine.facts.name,
            parent=self._span.context,
            is_streaming=request.stream,
            max_tokens=num_left,
        ) as span:
            pieces = self._engine.generate(
                request,
                max_tokens=num_left,
                request_id=f"{claimed.job.job}-{claimed.state.attempt}",
                resume=resume,
                priority=_PRIORITIES[claimed.delivery.queue.lane],
            )
            self.last_progress = asked = time.monotonic()
            async with contextlib.aclosing(pieces):
                async for chunk in pieces:
                    before, self.last_progress = self.last_progress, time.monotonic()
                    num_tokens = sum(choice.num_tokens for choice in chunk.choices)
                    self._course.take(num_tokens, waited_s=self.last_progress - asked)
                    if ttft_s is None and num_tokens:
                        ttft_s = self.last_progress - started
                        self.has_read_prompt = True
                        if resume is None:
                            metrics.TTFT_S.observe(max(0.0, self._clock.now() - claimed.job.accepted_at), model)
                    elif num_tokens:
                        metrics.INTER_TOKEN_S.observe((self.last_progress - before) / num_tokens, model)
                    await self._take(chunk)
                    asked = time.monotonic()
            span.set(
                inference_result(
                    num_input_tokens=claimed.num_prompt_tokens,
                    num_output_tokens=self._assembler.num_tokens,
                    finish_reasons=list(self._assembler.finish_reasons.values()),
                    ttft_s=ttft_s,
                    response_id=self._response_id,
                )
            )

    async def _take(self, chunk: EngineChunk) -> None:
        if chunk.usage is not None:
            self._usage = chunk.usage
        if chunk.response is not None:
            self._whole_response = chunk.response
        if chunk.choices:
            self._assembler.add(chunk.choices)
            self._on_progress(self._num_made)
            if self._claimed.request.stream:
                await self._flow.add(chunk.choices)

    @property
    def _num_made(self) -> int:
        """Tokens of this attempt."""
        return max(0, self._assembler.num_tokens - self._claimed.state.num_tokens)

    def _resume(self) -> Resume | None:
        if not self._assembler.num_tokens:
            return None
        choice = self._assembler.choice()
        return Resume(
            text=choice.text,
            token_ids=choice.token_ids,
            num_tokens=self._assembler.num_tokens,
            has_reasoning=bool(choice.reasoning),
        )

    def _on_refused(self, refused: Ended | Fenced | TooLarge) -> None:
        self._refused = refused
        self.stop("ended" if isinstance(refused, Ended) else "fenced")

    async def _done(self) -> Outcome:
        claimed = self._claimed
        data = self._response()
        if len(data) > self._max_event_bytes:
            return await self._end("failed", _TOO_LARGE)
        event = events.done(
            claimed.job.job,
            claimed.owner,
            attempt=claimed.state.attempt,
            offset=self._flow.offset,
            data=data,
            body_hash=claimed.job.body_hash,
        )
        return self._outcome(event, await self._writer.append(event))

    def _response(self) -> bytes:
        claimed = self._claimed
        if self._whole_response is not None:
            whole = {**self._whole_response, "model": claimed.job.model}
            return msgspec.json.encode(whole)
        usage = self._total_usage()
        response = self._assembler.response(
            id=self._response_id, created=self._created, model=claimed.job.model, usage=usage
        )
        return msgspec.json.encode(response)

    def _total_usage(self) -> Usage:
        """Usage over all attempts: the engine's own count where one run made the whole answer."""
        claimed, usage = self._claimed, self._usage
        num_earlier = claimed.state.num_tokens
        prompt = claimed.num_prompt_tokens
        completion = self._assembler.num_tokens
        details = None
        if usage is not None:
            completion = num_earlier + usage.completion_tokens
            if not num_earlier:
                prompt, details = usage.prompt_tokens, usage.prompt_tokens_details
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=details,
        )

    def _after_refusal(self, refused: Ended | Fenced) -> Outcome:
        if isinstance(refused, Ended):
            return Outcome(kind=ResultKind.SETTLED, event=refused.event, num_tokens=self._assembler.num_tokens)
        log.info("job %s is not ours any more: %s", self._claimed.job.job, refused.reason)
        return Outcome(kind=ResultKind.FORGET, num_tokens=self._assembler.num_tokens)

    async def _after_failure(self, failure: Exception) -> Outcome:
        if isinstance(failure, TimeoutError):
            refusal = Refusal(
                code="deadline_exceeded", message=f"the deadline of {self._claimed.job.deadline_s:g} s has passed"
            )
            return await self._end("failed", refusal)
        if isinstance(failure, _NotResumableError):
            return await self._end("failed", Refusal(code="not_resumable", message=str(failure)))
        if isinstance(failure, EngineRequestError):
            return await self._end("failed", failure.refusal)
        if isinstance(failure, EngineBusyError):
            return await self._hand_back("engine_busy", is_fault=False, is_busy=True)
        if isinstance(failure, EngineError):
            log.warning("job %s: the engine failed: %s", self._claimed.job.job, failure)
        self.has_faulted = True
        self._on_fault()
        return await self._hand_back("engine_error", is_fault=True)

    async def _end(self, kind: Literal["failed", "expired"], refusal: Refusal) -> Outcome:
        claimed = self._claimed
        event = events.ended(
            kind,
            claimed.job.job,
            attempt=claimed.state.attempt,
            offset=self._flow.offset,
            error=refusal,
            body_hash=claimed.job.body_hash,
            owner=claimed.owner,
        )
        return self._outcome(event, await self._writer.append(event))

    async def _hand_back(self, reason: str, *, is_fault: bool, is_busy: bool = False) -> Outcome:
        claimed = self._claimed
        event = events.requeued(
            claimed.job.job,
            attempt=claimed.state.attempt + 1,
            offset=self._flow.offset,
            reason=reason,
            lost=claimed.owner if is_fault else None,
            by=claimed.owner,
            num_made=0 if claimed.request.stream else self._num_made,
            model=claimed.job.model,
            queue_sequence=claimed.delivery.sequence,
        )
        result = await self._writer.append(event)
        if not isinstance(result, Appended):
            return self._outcome(event, result)
        return Outcome(
            kind=ResultKind.HAND_BACK,
            event=event,
            is_fault=is_fault,
            is_busy=is_busy,
            num_tokens=self._assembler.num_tokens,
        )

    def _outcome(self, event: Event, result: Appended | Ended | Fenced | TooLarge) -> Outcome:
        if isinstance(result, Appended):
            return Outcome(kind=ResultKind.SETTLED, event=event, num_tokens=self._assembler.num_tokens)
        return self._after_refusal(Fenced(result.reason) if isinstance(result, TooLarge) else result)


class _NotResumableError(EngineError):
    code = "not_resumable"
