"""The queue message of a job, the router's answers about it, and its two administrative requests."""

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from headrace.schemas.openai import OPERATIONS, Operation
from headrace.schemas.subjects import (
    DEFAULT_POOL,
    HDR_HASH,
    HDR_JOB,
    HDR_PREFERRED,
    JobId,
    Tenant,
    is_job_id,
    is_name,
    model_to_token,
    token_to_model,
)
from headrace.schemas.subjects import HDR_FALLBACK as _HDR_FALLBACK

_HDR_TENANT: Final = "Headrace-Tenant"
_HDR_OP: Final = "Headrace-Op"
_HDR_MODEL: Final = "Headrace-Model"
_HDR_ACCEPTED_AT: Final = "Headrace-Accepted-At"
_HDR_QUEUE_TIMEOUT: Final = "Headrace-Queue-Timeout"
_HDR_DEADLINE: Final = "Headrace-Deadline"
_HDR_NEED: Final = "Headrace-Need"
_HDR_FALLBACK_POOL: Final = "Headrace-Fallback-Pool"
_HDR_HANDED_FROM: Final = "Headrace-Handed-From"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One queued job: sent by a router to the model's job stream, received by a worker.

    Delivery is at least once; the message id `<tenant>.<job>` is its idempotency key. `body` is the client's JSON,
    validated. Times: `accepted_at` is unix seconds UTC by the router's clock, the two limits are seconds from then.
    `need_tokens` is the router's estimate of KV tokens to its last token, `preferred` the worker that has its beginning
    in its cache: a hint. `fallback` is the model, and `fallback_pool` its pool, that get the job if it does not start
    in time; `handed_from` is the model it was so taken over from.
    """

    tenant: Tenant
    job: JobId
    op: Operation
    model: str
    body: bytes
    body_hash: str
    accepted_at: float
    queue_timeout_s: float
    deadline_s: float
    need_tokens: int
    fallback: str | None = None
    preferred: str | None = None
    fallback_pool: str = DEFAULT_POOL
    handed_from: str | None = None

    @property
    def deadline_at(self) -> float:
        """Unix seconds after which it must not run."""
        return self.accepted_at + self.deadline_s

    @property
    def queue_until(self) -> float:
        """Unix seconds after which it must not start for the first time."""
        return self.accepted_at + self.queue_timeout_s

    def headers(self) -> dict[str, str]:
        """Its headers, without NATS's and the trace context."""
        headers = {
            _HDR_TENANT: self.tenant,
            HDR_JOB: self.job,
            _HDR_OP: self.op,
            _HDR_MODEL: model_to_token(self.model),
            HDR_HASH: self.body_hash,
            _HDR_ACCEPTED_AT: f"{self.accepted_at:.6f}",
            _HDR_QUEUE_TIMEOUT: f"{self.queue_timeout_s:.3f}",
            _HDR_DEADLINE: f"{self.deadline_s:.3f}",
            _HDR_NEED: str(self.need_tokens),
        }
        if self.fallback is not None:
            headers[_HDR_FALLBACK] = model_to_token(self.fallback)
            if self.fallback_pool != DEFAULT_POOL:
                headers[_HDR_FALLBACK_POOL] = self.fallback_pool
        if self.preferred is not None:
            headers[HDR_PREFERRED] = self.preferred
        if self.handed_from is not None:
            headers[_HDR_HANDED_FROM] = model_to_token(self.handed_from)
        return headers

    def handed_over(self, now: float) -> "Job":
        """The job as its fallback gets it at `now`: it may wait there as long as it was to wait at first.

        Its deadline stays, and there is no further fallback.
        """
        assert self.fallback is not None
        return msgspec.structs.replace(
            self,
            model=self.fallback,
            handed_from=self.model,
            queue_timeout_s=min(now - self.accepted_at + self.queue_timeout_s, self.deadline_s),
            fallback=None,
            fallback_pool=DEFAULT_POOL,
            preferred=None,
        )


def decode_job(headers: Mapping[str, str] | None, body: bytes) -> Job | None:
    """A job as fetched; None for a message no router of ours made."""
    try:
        if headers is None or headers[_HDR_OP] not in OPERATIONS:
            return None
        job = Job(
            tenant=Tenant(headers[_HDR_TENANT]),
            job=JobId(headers[HDR_JOB]),
            op=headers[_HDR_OP],
            model=token_to_model(headers[_HDR_MODEL]),
            body=body,
            body_hash=headers[HDR_HASH],
            accepted_at=float(headers[_HDR_ACCEPTED_AT]),
            queue_timeout_s=float(headers[_HDR_QUEUE_TIMEOUT]),
            deadline_s=float(headers[_HDR_DEADLINE]),
            need_tokens=int(headers[_HDR_NEED]),
            fallback=token_to_model(headers[_HDR_FALLBACK]) if _HDR_FALLBACK in headers else None,
            preferred=headers.get(HDR_PREFERRED),
            fallback_pool=headers.get(_HDR_FALLBACK_POOL, DEFAULT_POOL),
            handed_from=token_to_model(headers[_HDR_HANDED_FROM]) if _HDR_HANDED_FROM in headers else None,
        )
    except (KeyError, ValueError):
        return None
    are_times = all(map(math.isfinite, (job.accepted_at, job.queue_timeout_s, job.deadline_s)))
    are_names = is_name(job.tenant) and is_name(job.fallback_pool) and is_job_id(job.job)
    return job if are_times and are_names else None


def decode_need(headers: Mapping[str, str]) -> int:
    """Estimated KV tokens of the job that a wake announces; 0 where it does not say."""
    text = headers.get(_HDR_NEED, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def body_hash(op: str, model: str, body: bytes) -> str:
    """What tells two requests under one id apart: BLAKE2b (128 bit) over operation, model and body bytes, as hex."""
    return hashlib.blake2b(b"\0".join((op.encode(), model.encode(), body)), digest_size=16).hexdigest()


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a cancel request; with `sequence` (and `model`) the queued message is deleted at once."""

    sequence: int | None = None
    model: str | None = None


class StatusRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a status request, from a client to any router; empty, or without either, it asks for the `JobStatus`.

    `events_from` asks for the job's events from that log sequence on, `last_event` for the last alone; the broker
    itself answers, as its direct-get API does. It changes nothing.
    """

    events_from: int | None = None
    last_event: bool = False


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the status endpoint, and of a cancel request. `error` is the body of `failed` or `expired`.

    `paused`: it waits, and nothing of its model is started until somebody resumes that; so `eta_s` is not known.
    """

    job: str
    state: str
    attempt: int
    num_tokens: int
    worker: str | None = None
    position: int | None = None
    eta_s: float | None = None
    error: Any = None
    paused: bool = False
