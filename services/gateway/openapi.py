"""The OpenAPI 3.1 document of what the gateway serves, made from the checks and types that serve it."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import headrace
from headrace.gateway import shapes
from headrace.gateway.errors import ORIGIN_NOT_ALLOWED, RETRY_STATUS
from headrace.schemas.jobs import JobStatus
from headrace.schemas.openai import Operation, RequestLimits
from headrace.schemas.openai_params import body_schema
from headrace.schemas.refusals import CODES, ErrorBody
from headrace.schemas.subjects import LANES

__all__ = ["OpenApi", "document"]

_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"

_ANSWERS: Final[Mapping[Operation, tuple[type, type | None]]] = {
    "chat": (shapes.ChatCompletion, shapes.ChatCompletionChunk),
    "completions": (shapes.Completion, shapes.Completion),
    "embeddings": (shapes.Embeddings, None),
}
_PATHS: Final[Mapping[Operation, tuple[str, str]]] = {
    "chat": ("/v1/chat/completions", "Answer a chat"),
    "completions": ("/v1/completions", "Continue a text"),
    "embeddings": ("/v1/embeddings", "Turn texts into vectors"),
}
_STRUCTS: Final = (
    shapes.ChatCompletion, shapes.ChatCompletionChunk, shapes.Completion, shapes.Embeddings, shapes.Model,
    shapes.Models, shapes.Health, JobStatus, ErrorBody,
)  # fmt: skip
_REF: Final = "#/components/schemas/{name}"

_ALWAYS: Final = (400, ORIGIN_NOT_ALLOWED.status, 431)
"""What any request can be answered with, whatever it is for."""

_OF_KEYS: Final = ("invalid_api_key", "rate_limited", "shutting_down", "internal")
_OF_JOBS: Final = (*_OF_KEYS, "job_not_found")
_OF_INFERENCE: Final = tuple(code for code in CODES if code != "job_not_found")

_JOB_ID: Final = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
_MODEL_NAME: Final = {"type": "string", "minLength": 1, "maxLength": 100}
_TIME: Final = {"type": "number", "exclusiveMinimum": 0}


class OpenApi:
    """Serves the document."""

    def __init__(self) -> None:
        self._data = msgspec.json.encode(document())

    async def show(self, request: Request) -> Response:
        """The document, as JSON."""
        return Response(self._data, media_type=_JSON)


def document() -> dict[str, Any]:
    """The document. Of bodies it says what each parameter may be; what they must be together only a request tells."""
    _, components = msgspec.json.schema_components(_STRUCTS, ref_template=_REF)
    bodies = {f"{op.title()}Request": _body(op) for op in _PATHS}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": headrace.__version__,
            "description": "OpenAI's API over a durable queue, and jobs by their id.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {
            **{path: {"post": _infer(op, title)} for op, (path, title) in _PATHS.items()},
            "/v1/models": {"get": _get("List the models", shapes.Models, _OF_KEYS)},
            "/v1/models/{model}": {
                "get": _get("Show a model", shapes.Model, (*_OF_KEYS, "model_not_found"), _path("model", _MODEL_NAME))
            },
            "/v1/jobs/{job}": {
                "get": _get("Say what a job is now", JobStatus, _OF_JOBS, _path("job", _JOB_ID)),
                "delete": _get("End a job, unless it has ended", JobStatus, _OF_JOBS, _path("job", _JOB_ID)),
            },
            "/v1/jobs/{job}/stream": {"get": _follow()},
            "/healthz": {"get": _probe("Whether the process answers", {200})},
            "/readyz": {"get": _probe("Whether a request would be taken in", {200, 503})},
            "/openapi.json": {"get": _self()},
        },
        "components": {
            "schemas": {**components, **bodies},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _body(op: Operation) -> dict[str, Any]:
    schema = body_schema(op, max_n=RequestLimits().max_n)
    schema["properties"]["model"] = _MODEL_NAME
    return schema


def _infer(op: Operation, title: str) -> dict[str, Any]:
    answer, chunk = _ANSWERS[op]
    content: dict[str, Any] = {_JSON: {"schema": _ref(answer)}}
    if chunk is not None:
        content[_EVENTS] = {"schema": _events(_ref(chunk))}
    return {
        "summary": title,
        "operationId": op,
        "parameters": _request_headers(),
        "requestBody": {
            "required": True,
            "content": {
                _JSON: {"schema": {"$ref": _REF.format(name=f"{op.title()}Request")}, "examples": _examples(op)}
            },
        },
        "responses": {"200": _ok("The answer", content, has_job=True), **_errors(_OF_INFERENCE, has_job=True)},
    }


def _get(title: str, answer: type, codes: Iterable[str], *parameters: dict[str, Any]) -> dict[str, Any]:
    content = {_JSON: {"schema": _ref(answer)}}
    return {
        "summary": title,
        "parameters": list(parameters),
        "responses": {"200": _ok("What was asked for", content), **_errors(codes)},
    }


def _follow() -> dict[str, Any]:
    chunks = {"anyOf": [_ref(shapes.ChatCompletionChunk), _ref(shapes.Completion), _ref(shapes.Embeddings)]}
    return {
        "summary": "Read the stream of a job, from its begin or from an offset on",
        "parameters": [
            _path("job", _JOB_ID),
            _query("after", {"type": "integer", "minimum": 0, "maximum": 99_999_999_999}, "Tokens the reader has."),
            _query("include_usage", {"enum": ["true", "false"]}, "Whether usage comes last."),
        ],
        "responses": {
            "200": _ok("The stream", {_EVENTS: {"schema": _events(chunks)}}, has_job=True),
            **_errors((*_OF_JOBS, "stream_gap", "job_failed", "queue_timeout", "deadline_exceeded", "engine_error")),
        },
    }


def _probe(title: str, statuses: set[int]) -> dict[str, Any]:
    content = {_JSON: {"schema": _ref(shapes.Health)}}
    answers = {str(status): _ok("What is so", content) for status in sorted(statuses)}
    return {"summary": title, "responses": {**answers, **_errors(())}, "security": [{}]}


def _self() -> dict[str, Any]:
    content = {_JSON: {"schema": {"type": "object", "required": ["openapi", "paths"]}}}
    return {"summary": "This document", "responses": {"200": _ok("It", content), **_errors(())}, "security": [{}]}


def _ok(text: str, content: dict[str, Any], *, has_job: bool = False) -> dict[str, Any]:
    return {"description": text, "headers": _headers(required=("x-request-id",), has_job=has_job), "content": content}


def _errors(codes: Iterable[str], *, has_job: bool = False) -> dict[str, Any]:
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
            "content": {_JSON: {"schema": {"$ref": _REF.format(name="ErrorBody")}}},
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
    "x-headrace-job": {"schema": _JOB_ID, "description": "The job of this request."},
    "x-should-retry": {"schema": {"enum": ["true", "false"]}, "description": "Whether sending it again can help."},
    "retry-after": {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds to wait before that."},
}


def _headers(*, required: Iterable[str] = (), may_have: Iterable[str] = (), has_job: bool = False) -> dict[str, Any]:
    found = {name: {**_HEADERS[name], "required": True} for name in required}
    optional = (*may_have, *(("x-headrace-job",) if has_job else ()))
    return {**found, **{name: _HEADERS[name] for name in optional}}


def _request_headers() -> list[dict[str, Any]]:
    described: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("X-Headrace-Id", _JOB_ID, "Names the job; the same id again attaches to the same job."),
        ("X-Headrace-Priority", {"enum": list(LANES)}, "The lane; wins over `service_tier`."),
        ("X-Headrace-Pool", {"type": "string", "pattern": "^[a-z0-9-]{1,40}$"}, "The pool of workers."),
        ("X-Headrace-Queue-Timeout", _TIME, "Seconds it may wait to start."),
        ("X-Headrace-Deadline", _TIME, "Seconds to its end."),
        ("X-Headrace-Fallback", _MODEL_NAME, "The model that gets it if it does not start in time."),
        ("X-Request-Id", {"type": "string"}, "Comes back with the answer; names nothing."),
    )
    return [{"name": name, "in": "header", "schema": schema, "description": text} for name, schema, text in described]


def _path(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _query(name: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema, "description": text}


def _events(chunk: dict[str, Any]) -> dict[str, Any]:
    """One event of a stream; after the last chunk, or an error in its place, `data` is `[DONE]`."""
    told = {
        "type": "string",
        "contentMediaType": _JSON,
        "contentSchema": {"anyOf": [chunk, _ref(ErrorBody)]},
    }
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, told]}},
    }


def _examples(op: Operation) -> dict[str, Any]:
    asked: dict[Operation, dict[str, Any]] = {
        "chat": {"messages": [{"role": "user", "content": "What is a weir?"}], "max_tokens": 16},
        "completions": {"prompt": "A weir is", "max_tokens": 16},
        "embeddings": {"input": ["weir", "sluice"]},
    }
    whole = {"model": "smollm2-135m", **asked[op]}
    if op == "embeddings":
        return {"whole": {"value": whole}}
    streamed = {**whole, "stream": True, "stream_options": {"include_usage": True}}
    return {"whole": {"value": whole}, "streamed": {"value": streamed}}


def _ref(shape: type) -> dict[str, Any]:
    return {"$ref": _REF.format(name=shape.__name__)}
