"""What an HTTP request asks for: the few things that only HTTP says, read from its headers and its body.

All else in the body is checked where every request is checked, by a router.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from headrace.schemas.json_bounds import decode_object
from headrace.schemas.json_checks import invalid
from headrace.schemas.openai import Operation, RequestLimits
from headrace.schemas.refusals import Refusal
from headrace.schemas.subjects import is_job_id, is_model_name

__all__ = ["Asked", "read_request"]

_HDR_ID: Final = "x-headrace-id"
_HDR_PRIORITY: Final = "x-headrace-priority"
_HDR_POOL: Final = "x-headrace-pool"
_HDR_QUEUE_TIMEOUT: Final = "x-headrace-queue-timeout"
_HDR_DEADLINE: Final = "x-headrace-deadline"
_HDR_FALLBACK: Final = "x-headrace-fallback"

_LANE_OF_TIER: Final = {"priority": "high", "flex": "low"}


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it is to be submitted. `body` says whether it streams, which over NATS is the default."""

    op: Operation
    model: str
    body: bytes
    is_streaming: bool
    has_usage: bool
    job_id: str | None
    priority: str | None
    pool: str | None
    queue_timeout_s: float | None
    deadline_s: float | None
    fallback: str | None


def read_request(op: Operation, headers: Mapping[str, str], data: bytes, *, limits: RequestLimits) -> Asked | Refusal:
    """The request, or what is wrong with it as HTTP. `headers` are found in any case."""
    decoded = decode_object(data, max_bytes=limits.max_body_bytes, max_depth=limits.max_depth)
    if isinstance(decoded, Refusal):
        return decoded
    model = decoded.get("model")
    if model is None:
        return invalid("model", "is required")
    if not isinstance(model, str) or not is_model_name(model):
        return invalid("model", "must be 1 to 100 bytes of text without control characters")
    job_id = headers.get(_HDR_ID)
    if job_id is not None and not is_job_id(job_id):
        return _bad_header("X-Headrace-Id", "must be 1 to 64 of A-Z a-z 0-9 _ -")
    queue_timeout_s = _seconds(headers.get(_HDR_QUEUE_TIMEOUT))
    deadline_s = _seconds(headers.get(_HDR_DEADLINE))
    for name, value in (("X-Headrace-Queue-Timeout", queue_timeout_s), ("X-Headrace-Deadline", deadline_s)):
        if value is not None and value <= 0:
            return _bad_header(name, "must be a number of seconds above 0")
    is_streaming = decoded.get("stream") is True
    if not is_streaming and op != "embeddings" and decoded.get("stream") is None:
        data = msgspec.json.encode({**decoded, "stream": False})
    return Asked(
        op=op,
        model=model,
        body=data,
        is_streaming=is_streaming and op != "embeddings",
        has_usage=_has_usage(decoded),
        job_id=job_id,
        priority=headers.get(_HDR_PRIORITY) or _lane(decoded.get("service_tier")),
        pool=headers.get(_HDR_POOL),
        queue_timeout_s=queue_timeout_s,
        deadline_s=deadline_s,
        fallback=headers.get(_HDR_FALLBACK),
    )


def _lane(tier: Any) -> str | None:
    return _LANE_OF_TIER.get(tier) if isinstance(tier, str) else None


def _has_usage(decoded: dict[str, Any]) -> bool:
    options = decoded.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _seconds(text: str | None) -> float | None:
    """None where none is named; 0, which is none, for what is no number. A router knows the upper limit."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if value > 0 else 0.0


def _bad_header(name: str, rule: str) -> Refusal:
    return Refusal(code="invalid_value", message=f"{name} {rule}", param=name)
