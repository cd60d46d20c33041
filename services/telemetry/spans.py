"""Spans with explicit contexts and an explicit end, and the table of the steps of a request's life."""

import asyncio
from collections.abc import Mapping, Sequence
from enum import Enum
from types import TracebackType
from typing import Final, Self

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, StatusCode

from headrace.errors import EngineRequestError, JobCancelledError, RequestError
from headrace.telemetry import names

__all__ = [
    "Attribute",
    "Span",
    "Step",
    "inference_result",
    "inference_span",
    "job_attributes",
    "start_span",
    "step_span",
    "use_tracer",
]

Attribute = str | int | float | bool | Sequence[str]
"""A span attribute's value. Strings are cut at `MAX_ATTRIBUTE_CHARS`, so no mistake can ship a whole prompt."""

MAX_ATTRIBUTE_CHARS: Final = 256

_CANCELLED: Final = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, JobCancelledError)

_tracer: trace.Tracer | None = None


def use_tracer(tracer: trace.Tracer | None) -> trace.Tracer | None:
    """Start all further spans of the process from `tracer`; returns the one used so far.

    None is the tracer of the application's own provider, which records nothing where it has none.
    """
    global _tracer
    previous, _tracer = _tracer, tracer
    return previous


class Span:
    """A span that ends once, when told: by `end`, or as a context manager at the end of its block.

    It is never made current, so it may end in another task than it began in. As a context manager it records how the
    block ended unless that was said before: an exception as an error with its type's name, never its text, which
    may hold a prompt; a cancelled task or a closed generator as `headrace.outcome` = `cancelled`.
    """

    __slots__ = ("_has_result", "_is_ended", "_span")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._is_ended = False
        self._has_result = False

    @property
    def context(self) -> Context:
        """Parent for further spans and for `inject`."""
        return trace.set_span_in_context(self._span, Context())

    @property
    def trace_id(self) -> str:
        """32 hex digits, or "" where there is no trace."""
        context = self._span.get_span_context()
        return trace.format_trace_id(context.trace_id) if context.is_valid else ""

    @property
    def is_recording(self) -> bool:
        """Whether anything set on it will be seen; false once it ended."""
        return self._span.is_recording()

    def set(self, attributes: Mapping[str, Attribute | None]) -> None:
        """Set attributes; None values are left out."""
        if self._span.is_recording():
            self._span.set_attributes(_bounded(attributes))

    def add_event(self, name: str, attributes: Mapping[str, Attribute | None] | None = None) -> None:
        """Add an event, now."""
        if self._span.is_recording():
            self._span.add_event(name, _bounded(attributes or {}))

    def fail(self, error_type: str) -> None:
        """Mark it as failed with a wire code or a type's name: a constant of ours, never text."""
        self._has_result = True
        self.set({names.ERROR_TYPE: error_type})
        self._span.set_status(StatusCode.ERROR, error_type)

    def cancel(self) -> None:
        """Mark it as cancelled, which is no error."""
        self._has_result = True
        self.set({names.HEADRACE_OUTCOME: names.OUTCOME_CANCELLED})

    def record(self, exc: BaseException) -> None:
        """Mark it as cancelled or failed, by what ended it."""
        if isinstance(exc, _CANCELLED):
            self.cancel()
        elif isinstance(exc, RequestError | EngineRequestError):
            self.fail(exc.code)
        else:
            self.fail(type(exc).__name__)

    def end(self, end_time_ns: int | None = None) -> None:
        """End it, now or at a time in nanoseconds since the epoch. Only the first call counts."""
        if not self._is_ended:
            self._is_ended = True
            self._span.end(end_time_ns)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if exc is not None and not self._has_result:
            self.record(exc)
        self.end()


def start_span(
    name: str,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    parent: Context | None = None,
    attributes: Mapping[str, Attribute | None] | None = None,
    start_time_ns: int | None = None,
    links: Sequence[Context] = (),
) -> Span:
    """Start a span. `name` is of low cardinality: never a job id, a tenant or an unknown model.

    A parent of None is the caller's own current span, if its instrumentation has one; services pass what `extract`
    gave them. `start_time_ns` counts from the epoch. Links to contexts without a trace are left out.
    """
    tracer = _tracer or trace.get_tracer("headrace", schema_url=names.SCHEMA_URL)
    linked = [trace.get_current_span(context).get_span_context() for context in links]
    span = tracer.start_span(
        name,
        context=parent,
        kind=kind,
        attributes=_bounded(attributes or {}),
        links=[trace.Link(context) for context in linked if context.is_valid],
        start_time=start_time_ns,
    )
    if not span.get_span_context().is_valid:  # some releases' no-op tracer forgets the parent
        span = trace.NonRecordingSpan(trace.get_current_span(parent).get_span_context())
    return Span(span)


class Step(Enum):
    """What happens to a request as a message: operation name, operation type and span kind of each step.

    Types and kinds are those of the messaging conventions; waiting in a queue is nobody's operation and has no type.
    """

    PUBLISH = ("publish", "send", SpanKind.PRODUCER)
    ADMIT = ("admit", "process", SpanKind.CONSUMER)
    WAIT = ("wait", None, SpanKind.INTERNAL)
    FETCH = ("fetch", "receive", SpanKind.CLIENT)
    PROCESS = ("process", "process", SpanKind.CONSUMER)
    SETTLE = ("settle", "settle", SpanKind.CLIENT)


def step_span(
    step: Step,
    model: str | None = None,
    *,
    parent: Context | None,
    attributes: Mapping[str, Attribute | None] | None = None,
    start_time_ns: int | None = None,
    links: Sequence[Context] = (),
) -> Span:
    """Start the span of one step, named `<operation> <model>`; a model's queue is the destination.

    Leave `model` out until it is known to exist. `wait` begins at the time the job was accepted and is started by the
    worker that ends the waiting, so no span is lost with a router.
    """
    operation, operation_type, kind = step.value
    return start_span(
        f"{operation} {model}" if model else operation,
        kind=kind,
        parent=parent,
        attributes={
            names.MESSAGING_SYSTEM: "nats",
            names.MESSAGING_OPERATION_NAME: operation,
            names.MESSAGING_OPERATION_TYPE: operation_type,
            names.GEN_AI_REQUEST_MODEL: model,
            **(attributes or {}),
        },
        start_time_ns=start_time_ns,
        links=links,
    )


def inference_span(
    op: str,
    model: str,
    *,
    provider: str,
    parent: Context | None,
    is_streaming: bool = True,
    max_tokens: int | None = None,
    attributes: Mapping[str, Attribute | None] | None = None,
) -> Span:
    """Start the span of a whole inference as its caller sees it, named `chat <model>` after the GenAI conventions.

    The client starts one over the stream it reads (provider `headrace`), the worker one over its engine's (provider
    `vllm`, `llama.cpp`, …). `op` is the ingress subject's.
    """
    operation = names.OPERATIONS.get(op, op)
    return start_span(
        f"{operation} {model}",
        kind=SpanKind.CLIENT,
        parent=parent,
        attributes={
            names.GEN_AI_OPERATION_NAME: operation,
            names.GEN_AI_PROVIDER_NAME: provider,
            names.GEN_AI_REQUEST_MODEL: model,
            names.GEN_AI_REQUEST_STREAM: True if is_streaming else None,
            names.GEN_AI_REQUEST_MAX_TOKENS: max_tokens,
            **(attributes or {}),
        },
    )


def inference_result(
    *,
    num_input_tokens: int | None = None,
    num_output_tokens: int | None = None,
    finish_reasons: Sequence[str] = (),
    ttft_s: float | None = None,
    response_id: str | None = None,
    response_model: str | None = None,
) -> dict[str, Attribute | None]:
    """Attributes for the end of an inference span; `ttft_s` counts from the span's own start."""
    return {
        names.GEN_AI_USAGE_INPUT_TOKENS: num_input_tokens,
        names.GEN_AI_USAGE_OUTPUT_TOKENS: num_output_tokens,
        names.GEN_AI_RESPONSE_FINISH_REASONS: tuple(finish_reasons) or None,
        names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: ttft_s,
        names.GEN_AI_RESPONSE_ID: response_id,
        names.GEN_AI_RESPONSE_MODEL: response_model,
    }


def job_attributes(
    *,
    job: str | None = None,
    tenant: str | None = None,
    pool: str | None = None,
    lane: str | None = None,
    queue: str | None = None,
    attempt: int | None = None,
    delivery_count: int | None = None,
    worker: str | None = None,
    subject: str | None = None,
    message_id: str | None = None,
) -> dict[str, Attribute | None]:
    """Attributes that say which job a span is about and where it was; what is None is left out."""
    return {
        names.HEADRACE_JOB: job,
        names.HEADRACE_TENANT: tenant,
        names.HEADRACE_POOL: pool,
        names.HEADRACE_LANE: lane,
        names.HEADRACE_QUEUE: queue,
        names.HEADRACE_ATTEMPT: attempt,
        names.HEADRACE_DELIVERY_COUNT: delivery_count,
        names.HEADRACE_WORKER: worker,
        names.MESSAGING_DESTINATION_NAME: subject,
        names.MESSAGING_MESSAGE_ID: message_id,
    }


def _bounded(attributes: Mapping[str, Attribute | None]) -> dict[str, Attribute]:
    return {
        name: value[:MAX_ATTRIBUTE_CHARS] if isinstance(value, str) else value
        for name, value in attributes.items()
        if value is not None
    }
