"""Trace context in message headers: W3C `traceparent` and `tracestate`, nothing else."""

import re
from collections.abc import Mapping
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

__all__ = ["extract", "inject"]

_TRACEPARENT: Final = "traceparent"
_TRACESTATE: Final = "tracestate"
_MAX_TRACEPARENT_CHARS: Final = 128
_MAX_TRACESTATE_CHARS: Final = 512
"""What W3C asks everyone to pass on at least; a longer one is dropped whole, the trace goes on without it."""
_MAX_TRACESTATE_MEMBERS: Final = 32
_MEMBER: Final = re.compile(
    r"[a-z0-9][a-z0-9_*/@-]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)

_propagator: Final = TraceContextTextMapPropagator()


def inject(headers: dict[str, str], context: Context | None = None) -> None:
    """Write the trace of `context` into `headers`, in place of any there; without a trace they stay as they are.

    None means the context the caller's own instrumentation made current, if it has any.
    """
    fresh: dict[str, str] = {}
    _propagator.inject(fresh, context)
    if fresh:
        for name in [name for name in headers if name.lower() in (_TRACEPARENT, _TRACESTATE)]:
            del headers[name]
        headers.update(fresh)


def extract(headers: Mapping[str, str] | None) -> Context:
    """The context the headers carry; an empty one, so a fresh trace, where they carry none or a malformed one.

    Never raises and never logs what it was sent. Names match in any case: Go's carrier writes `Traceparent`.
    """
    if not headers:
        return Context()
    found = {
        name.lower(): value
        for name, value in headers.items()
        if len(name) == len(_TRACEPARENT) or len(name) == len(_TRACESTATE)
    }
    traceparent = found.get(_TRACEPARENT)
    if not isinstance(traceparent, str) or len(traceparent) > _MAX_TRACEPARENT_CHARS:
        return Context()
    carrier = {_TRACEPARENT: traceparent}
    tracestate = found.get(_TRACESTATE)
    if isinstance(tracestate, str) and _is_tracestate(tracestate):
        carrier[_TRACESTATE] = tracestate
    return _propagator.extract(carrier, Context())


def _is_tracestate(value: str) -> bool:
    """Whether it is short enough to pass on and well-formed, with no key twice."""
    if len(value) > _MAX_TRACESTATE_CHARS:
        return False
    members = [member for part in value.split(",") if (member := part.strip(" \t"))]
    keys = {member.partition("=")[0] for member in members}
    return len(keys) == len(members) <= _MAX_TRACESTATE_MEMBERS and all(map(_MEMBER.fullmatch, members))
