"""What a request asks for, read from its subject, headers and body: pure checks, before anything is stored."""

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from headrace.schemas import subjects
from headrace.schemas.openai import OPERATIONS, InferenceRequest, Operation, RequestLimits, parse_request
from headrace.schemas.refusals import Refusal
from headrace.schemas.subjects import INBOX, LANES, QueueName, Tenant, is_job_id, is_model_name, is_name
from headrace.settings import Settings

__all__ = ["Wish", "check_reply", "read_wish"]

MAX_HEADER_BYTES: Final = 8_192
"""All headers of a request together."""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """A well-formed request. `job` is None where the client left the id to us, `pool` where it names none.

    As read, `model` is the name asked for, and of `queue` only the lane is known; `placement` settles both.
    """

    tenant: Tenant
    op: Operation
    model: str
    request: InferenceRequest
    queue: QueueName
    job: str | None
    pool: str | None
    queue_timeout_s: float
    deadline_s: float
    fallback: str | None


def check_reply(reply: str, tenant: str, other_tenants: frozenset[str], *, is_secured: bool = False) -> Refusal | None:
    """Whether answers may go to this subject.

    It must be an inbox, not one of the services' own, and not inside another tenant's: NATS does not check what
    subject a client names as its reply, so whoever answers there must. In a secured deployment, where the broker knows
    who is who, it must be the tenant's own.
    """
    parts = reply.split(".")
    if len(parts) < 2 or parts[0] != INBOX or any(part in ("", "*", ">") for part in parts):
        return Refusal(code="invalid_value", message="the reply subject must be an inbox (_INBOX.…)", param="reply")
    is_own = parts[1] == tenant and len(parts) > 2
    if (is_secured and not is_own) or parts[1].startswith("_") or (parts[1] != tenant and parts[1] in other_tenants):
        return Refusal(
            code="invalid_value", message="the reply subject lies in an inbox of somebody else", param="reply"
        )
    return None


def read_wish(
    subject: str,
    headers: Mapping[str, str],
    data: bytes,
    *,
    names: subjects.Names,
    settings: Settings,
    limits: RequestLimits,
) -> Wish | Refusal:
    """The request, or the first thing wrong with it."""
    ingress = names.parse_infer(subject)
    if ingress is None:
        return _invalid("subject", "must end in .<tenant>.<op>.<model>, the model encoded as one token")
    op = next((known for known in OPERATIONS if known == ingress.op), None)
    if op is None:
        return _invalid("op", f"must be one of {', '.join(OPERATIONS)}")
    num_header_bytes = sum(len(name) + len(value) for name, value in headers.items())
    if num_header_bytes > MAX_HEADER_BYTES:
        return Refusal(code="header_too_large", message=f"headers must be at most {MAX_HEADER_BYTES} bytes together")
    job = headers.get(subjects.HDR_ID)
    if job is not None and not is_job_id(job):
        return _invalid(subjects.HDR_ID, "must be 1 to 64 of A-Z a-z 0-9 _ -")
    lane = next((known for known in LANES if known == headers.get(subjects.HDR_PRIORITY, subjects.DEFAULT_LANE)), None)
    if lane is None:
        return _invalid(subjects.HDR_PRIORITY, f"must be one of {', '.join(LANES)}")
    pool = headers.get(subjects.HDR_POOL)
    if pool is not None and not is_name(pool):
        return _invalid(subjects.HDR_POOL, "names a pool that does not exist")
    queue_timeout_s = _seconds(
        headers, subjects.HDR_QUEUE_TIMEOUT, settings.queue_timeout_s, settings.max_queue_timeout_s
    )
    if isinstance(queue_timeout_s, Refusal):
        return queue_timeout_s
    deadline_s = _seconds(headers, subjects.HDR_DEADLINE, settings.deadline_s, settings.max_deadline_s)
    if isinstance(deadline_s, Refusal):
        return deadline_s
    fallback = headers.get(subjects.HDR_FALLBACK)
    if fallback is not None and not is_model_name(fallback):
        return _invalid(subjects.HDR_FALLBACK, "is not a model name")
    request = parse_request(op, data, limits=limits)
    if isinstance(request, Refusal):
        return request
    return Wish(
        tenant=ingress.tenant,
        op=op,
        model=ingress.model,
        request=request,
        queue=QueueName(lane=lane),
        job=job,
        pool=pool,
        queue_timeout_s=queue_timeout_s,
        deadline_s=deadline_s,
        fallback=fallback,
    )


def _seconds(headers: Mapping[str, str], name: str, default: float, most: float) -> float | Refusal:
    text = headers.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most:
        return _invalid(name, f"must be a number of seconds, above 0 and at most {most:g}")
    return value


def _invalid(param: str, rule: str) -> Refusal:
    return Refusal(code="invalid_value", message=f"{param} {rule}", param=param)
