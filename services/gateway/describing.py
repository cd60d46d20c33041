"""Pieces of an OpenAPI document: answers, errors with their headers, parameters."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from headrace.gateway.errors import ORIGIN_NOT_ALLOWED, RETRY_STATUS
from headrace.schemas.refusals import CODES

__all__ = ["JOB_ID", "JSON", "OF_KEYS", "REF", "errors", "get", "in_path", "in_query", "ok", "ref"]

JSON: Final = "application/json"
REF: Final = "#/components/schemas/{name}"
JOB_ID: Final = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
OF_KEYS: Final = ("invalid_api_key", "rate_limited", "shutting_down", "internal")
"""What any request below `/v1/` can be refused with."""

_ALWAYS: Final = (400, ORIGIN_NOT_ALLOWED.status, 431)
"""What any request can be answered with, whatever it is for."""


def get(title: str, answer: type, codes: Iterable[str], *parameters: dict[str, Any]) -> dict[str, Any]:
    """An operation without a body, answered by one object; `codes` are what it can be refused with beside the usual."""
    content = {JSON: {"schema": ref(answer)}}
    return {
        "summary": title,
        "parameters": list(parameters),
        "responses": {"200": ok("What was asked for", content), **errors(codes)},
    }


def ok(text: str, content: dict[str, Any], *, has_job: bool = False) -> dict[str, Any]:
    """A good answer. `has_job`: it may name the job."""
    return {"description": text, "headers": _headers(required=("x-request-id",), has_job=has_job), "content": content}


def errors(codes: Iterable[str], *, has_job: bool = False) -> dict[str, Any]:
    """Refusals by their status, each with its codes; what any request can be refused with is added."""
    by_status: dict[int, list[str]] = {status: [] for status in _ALWAYS}
    by_status[ORIGIN_NOT_ALLOWED.status].append(ORIGIN_NOT_ALLOWED.code)
    for code in ("invalid_value", "header_too_large", *codes):
        known = by_status.setdefault(CODES[code].status, [])
        if code not in known:
            known.append(code)
    return {
        str(status): {
            "description": ", ".join(f"`{code}`" for code in by_status[status]),
            "headers": _error_headers(status, has_job=has_job),
            "content": {JSON: {"schema": {"$ref": REF.format(name="ErrorBody")}}},
        }
        for status in sorted(by_status)
    }


def _error_headers(status: int, *, has_job: bool) -> dict[str, Any]:
    if status in (400, 431):  # what is no request yet has neither
        return _headers(has_job=has_job, may_have=("x-request-id", "x-should-retry"))
    required = ("x-request-id", "x-should-retry", *(("retry-after",) if status in RETRY_STATUS else ()))
    return _headers(required=required, has_job=has_job)


_HEADERS: Final[Mapping[str, dict[str, Any]]] = {
    "x-request-id": {"schema": {"type": "string"}, "description": "The client's own where it is plain, else made up."},
    "x-headrace-job": {"schema": JOB_ID, "description": "The job of this request."},
    "x-should-retry": {"schema": {"enum": ["true", "false"]}, "description": "Whether sending it again can help."},
    "retry-after": {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds to wait before that."},
}


def _headers(*, required: Iterable[str] = (), may_have: Iterable[str] = (), has_job: bool = False) -> dict[str, Any]:
    found = {name: {**_HEADERS[name], "required": True} for name in required}
    optional = (*may_have, *(("x-headrace-job",) if has_job else ()))
    return {**found, **{name: _HEADERS[name] for name in optional}}


def in_path(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter in the path."""
    return {"name": name, "in": "path", "required": True, "schema": schema}


def in_query(name: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    """A parameter behind the path, which may be left out."""
    return {"name": name, "in": "query", "schema": schema, "description": text}


def ref(shape: type) -> dict[str, Any]:
    """Where a type is described."""
    return {"$ref": REF.format(name=shape.__name__)}
