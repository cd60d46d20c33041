"""The client: one connection, any number of streams."""

import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from opentelemetry.context import Context

from headrace.bus.connection import DEFAULT_PENDING, Bus, Pending
from headrace.bus.connection import connect as connect_bus
from headrace.bus.server import discover
from headrace.client.control import JobControl
from headrace.client.events import Done
from headrace.client.stream import JobStream, Submission
from headrace.errors import BrokerUnavailableError, RequestError
from headrace.schemas import subjects
from headrace.schemas.jobs import JobStatus
from headrace.schemas.openai import Operation
from headrace.schemas.refusals import Refusal
from headrace.schemas.subjects import DEFAULT_TENANT, INBOX, is_job_id, is_model_name, is_name
from headrace.settings import Settings, load

__all__ = ["Client", "connect"]


@contextlib.asynccontextmanager
async def connect(
    url: str | None = None,
    *,
    tenant: str = DEFAULT_TENANT,
    credentials: str | None = None,
    settings: Settings | None = None,
    name: str = "headrace-client",
) -> AsyncIterator["Client"]:
    """A connected client of one tenant.

    Without `url`: HEADRACE_NATS_URL, else the broker that `headrace up` runs for this user. A secured broker asks for
    the tenant's credential: the file `credentials`, else HEADRACE_NATS_CREDENTIALS. Raises BrokerUnavailableError where
    none answers, ConfigError for settings, a credential or a tenant name that cannot be.
    """
    settings = settings if settings is not None else load()
    if credentials is not None:
        settings = msgspec.structs.replace(settings, nats_credentials=credentials)
    if not is_name(tenant):
        raise _invalid("tenant", "must be 1 to 40 of a-z 0-9 -")
    url, settings = (url, settings) if url is not None else _located(settings)
    async with connect_bus(url, settings, name=name, inbox_prefix=f"{INBOX}.{tenant}") as bus:
        yield Client(bus, tenant)


def _located(settings: Settings) -> tuple[str, Settings]:
    """Where the broker is, by setting, else the embedded one, and what to connect with: the owner of a secured embedded
    broker may be any tenant. Raises BrokerUnavailableError where neither is there.
    """
    if settings.nats_url is not None:
        return settings.nats_url, settings
    found = discover(Path(settings.state_dir))
    if found is None:
        raise BrokerUnavailableError(
            "no broker is running: start everything with `headrace up`, or set HEADRACE_NATS_URL"
        )
    if settings.nats_credentials is None and found.credentials is not None:
        settings = msgspec.structs.replace(settings, nats_credentials=found.credentials)
    return found.url, settings


class Client:
    """Sends requests and reads their streams. Made by `connect`; `bus` is its connection."""

    def __init__(self, bus: Bus, tenant: str) -> None:
        self.bus = bus
        self.tenant = tenant
        self._control = JobControl(bus, tenant)

    def stream(
        self,
        *,
        model: str,
        messages: Sequence[dict[str, Any]] | None = None,
        prompt: str | Sequence[int] | None = None,
        input: str | Sequence[str] | None = None,
        job_id: str | None = None,
        priority: str | None = None,
        pool: str | None = None,
        queue_timeout_s: float | None = None,
        deadline_s: float | None = None,
        fallback: str | None = None,
        **parameters: Any,
    ) -> JobStream:
        """Send a request and stream its events. Exactly one of `messages` (chat), `prompt` (completions) or `input`
        (embeddings) says what it is; `parameters` are OpenAI's (max_tokens, temperature, stop, …).

        `job_id` is the idempotency key: the same id again attaches to the same job. Nothing is sent before the
        stream is iterated. Raises RequestError for names that cannot be; see JobStream for the rest.
        """
        op, body = _body(messages, prompt, input, parameters)
        return self.submit(
            op,
            model,
            _encode(body),
            job_id=job_id,
            priority=priority,
            pool=pool,
            queue_timeout_s=queue_timeout_s,
            deadline_s=deadline_s,
            fallback=fallback,
            is_streaming=bool(parameters.get("stream", True)),
        )

    def submit(
        self,
        op: Operation,
        model: str,
        body: bytes,
        *,
        job_id: str | None = None,
        priority: str | None = None,
        pool: str | None = None,
        queue_timeout_s: float | None = None,
        deadline_s: float | None = None,
        fallback: str | None = None,
        is_streaming: bool = True,
        parent: Context | None = None,
        max_pending: Pending = DEFAULT_PENDING,
    ) -> JobStream:
        """Like `stream`, with the JSON body as it is to be sent; `is_streaming` says what its `stream` does.

        `parent` is the trace that the request belongs to; without it, the caller's own.
        """
        if not is_model_name(model):
            raise _invalid("model", "must be 1 to 100 bytes without control characters")
        if job_id is not None and not is_job_id(job_id):
            raise _invalid(subjects.HDR_ID, "must be 1 to 64 of A-Z a-z 0-9 _ -")
        job = job_id or uuid.uuid4().hex
        headers: Mapping[str, str | None] = {
            subjects.HDR_ID: job,
            subjects.HDR_PRIORITY: priority,
            subjects.HDR_POOL: pool,
            subjects.HDR_QUEUE_TIMEOUT: f"{queue_timeout_s:g}" if queue_timeout_s is not None else None,
            subjects.HDR_DEADLINE: f"{deadline_s:g}" if deadline_s is not None else None,
            subjects.HDR_FALLBACK: fallback,
        }
        for name, value in headers.items():
            if value is not None and (not value.isprintable() or len(value) > 256):
                raise _invalid(name, "must be a short text of printable characters")
        submission = Submission(
            op=op,
            model=model,
            body=body,
            headers={name: value for name, value in headers.items() if value is not None},
            is_streaming=is_streaming,
            deadline_s=deadline_s or self.bus.settings.deadline_s,
            is_new_id=job_id is None,
        )
        if len(submission.body) > self.bus.max_data_bytes:
            raise RequestError(
                Refusal(
                    code="request_too_large",
                    message=f"the body has {len(submission.body)} bytes; at most {self.bus.max_data_bytes} can be sent",
                )
            )
        return JobStream(
            self.bus,
            self._control,
            tenant=self.tenant,
            job=job,
            submission=submission,
            parent=parent,
            max_pending=max_pending,
        )

    async def complete(self, *, model: str, **arguments: Any) -> Done:
        """Send a request and wait for its whole answer. Arguments and errors as of `stream`."""
        async with self.stream(model=model, **arguments) as stream:
            async for event in stream:
                if isinstance(event, Done):
                    return event
        raise RequestError(Refusal(code="internal", message="the stream ended without an end"), job=stream.job)

    def attach(
        self, job_id: str, *, after: int = 0, parent: Context | None = None, max_pending: Pending = DEFAULT_PENDING
    ) -> JobStream:
        """The stream of a job that was sent before, running or ended: all of it, or the deltas from offset `after` on.

        Where only the whole answer is left in the log, it comes as one delta (with `after`, as `Done` alone). Raises,
        when iterated, RequestError (`job_not_found`) where the log knows no such job.
        """
        if not is_job_id(job_id):
            raise _invalid("job_id", "must be 1 to 64 of A-Z a-z 0-9 _ -")
        return JobStream(
            self.bus,
            self._control,
            tenant=self.tenant,
            job=job_id,
            submission=None,
            after=after,
            parent=parent,
            max_pending=max_pending,
        )

    async def status(self, job_id: str) -> JobStatus:
        """What a job is now: state, position, attempt, worker. Raises RequestError (`job_not_found`)."""
        return await self._control.status(job_id)

    async def cancel(self, job_id: str, *, sequence: int | None = None, model: str | None = None) -> JobStatus:
        """Cancel a job; with `sequence` (and `model`) from `accepted` even before its log has begun."""
        return await self._control.cancel(job_id, sequence=sequence, model=model)


def _body(
    messages: Sequence[dict[str, Any]] | None,
    prompt: str | Sequence[int] | None,
    input_: str | Sequence[str] | None,
    parameters: dict[str, Any],
) -> tuple[Operation, dict[str, Any]]:
    given = [
        (op, key, value)
        for op, key, value in (
            ("chat", "messages", messages),
            ("completions", "prompt", prompt),
            ("embeddings", "input", input_),
        )
        if value is not None
    ]
    if len(given) != 1:
        raise _invalid("messages", "exactly one of messages, prompt and input must be given")
    op, key, value = given[0]
    return op, {key: value, **parameters}  # type: ignore[return-value]  # op is one of the three literals above


def _encode(body: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise _invalid("body", f"cannot be written as JSON: {type(error).__name__}") from None


def _invalid(param: str, rule: str) -> RequestError:
    return RequestError(Refusal(code="invalid_value", message=f"{param} {rule}", param=param))
