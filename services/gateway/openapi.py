"""The OpenAPI 3.1 document of what the gateway serves, made from the checks and types that serve it."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import headrace
from headrace.gateway import shapes
from headrace.gateway.describing import JOB_ID, JSON, OF_KEYS, REF, errors, get, in_path, in_query, ok, ref
from headrace.gateway.openapi_batches import BATCH_SHAPES, batch_bodies, batch_paths
from headrace.schemas.jobs import JobStatus
from headrace.schemas.openai import Operation, RequestLimits
from headrace.schemas.openai_params import body_schema
from headrace.schemas.refusals import CODES, ErrorBody
from headrace.schemas.subjects import LANES

__all__ = ["OpenApi", "document"]

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
    shapes.Models, shapes.Health, JobStatus, ErrorBody, *BATCH_SHAPES,
)  # fmt: skip

_OF_JOBS: Final = (*OF_KEYS, "job_not_found")
_OF_INFERENCE: Final = tuple(
    code for code in CODES if code not in ("job_not_found", "file_not_found", "batch_not_found")
)

_MODEL_NAME: Final = {"type": "string", "minLength": 1, "maxLength": 100}
_TIME: Final = {"type": "number", "exclusiveMinimum": 0}


class OpenApi:
    """Serves the document."""

    def __init__(self) -> None:
        self._data = msgspec.json.encode(document())

    async def show(self, request: Request) -> Response:
        """The document, as JSON."""
        return Response(self._data, media_type=JSON)


def document() -> dict[str, Any]:
    """The document. Of bodies it says what each parameter may be; what they must be together only a request tells."""
    _, components = msgspec.json.schema_components(_STRUCTS, ref_template=REF)
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
            "/v1/models": {"get": get("List the models", shapes.Models, OF_KEYS)},
            "/v1/models/{model}": {
                "get": get("Show a model", shapes.Model, (*OF_KEYS, "model_not_found"), in_path("model", _MODEL_NAME))
            },
            "/v1/jobs/{job}": {
                "get": get("Say what a job is now", JobStatus, _OF_JOBS, in_path("job", JOB_ID)),
                "delete": get("End a job, unless it has ended", JobStatus, _OF_JOBS, in_path("job", JOB_ID)),
            },
            "/v1/jobs/{job}/stream": {"get": _follow()},
            **batch_paths(),
            "/healthz": {"get": _probe("Whether the process answers", {200})},
            "/readyz": {"get": _probe("Whether a request would be taken in", {200, 503})},
            "/openapi.json": {"get": _self()},
        },
        "components": {
            "schemas": {**components, **bodies, **batch_bodies()},
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
    content: dict[str, Any] = {JSON: {"schema": ref(answer)}}
    if chunk is not None:
        content[_EVENTS] = {"schema": _events(ref(chunk))}
    return {
        "summary": title,
        "operationId": op,
        "parameters": _request_headers(),
        "requestBody": {
            "required": True,
            "content": {JSON: {"schema": {"$ref": REF.format(name=f"{op.title()}Request")}, "examples": _examples(op)}},
        },
        "responses": {"200": ok("The answer", content, has_job=True), **errors(_OF_INFERENCE, has_job=True)},
    }


def _follow() -> dict[str, Any]:
    chunks = {"anyOf": [ref(shapes.ChatCompletionChunk), ref(shapes.Completion), ref(shapes.Embeddings)]}
    return {
        "summary": "Read the stream of a job, from its begin or from an offset on",
        "parameters": [
            in_path("job", JOB_ID),
            in_query("after", {"type": "integer", "minimum": 0, "maximum": 99_999_999_999}, "Tokens the reader has."),
            in_query("include_usage", {"enum": ["true", "false"]}, "Whether usage comes last."),
        ],
        "responses": {
            "200": ok("The stream", {_EVENTS: {"schema": _events(chunks)}}, has_job=True),
            **errors((*_OF_JOBS, "stream_gap", "job_failed", "queue_timeout", "deadline_exceeded", "engine_error")),
        },
    }


def _probe(title: str, statuses: set[int]) -> dict[str, Any]:
    content = {JSON: {"schema": ref(shapes.Health)}}
    answers = {str(status): ok("What is so", content) for status in sorted(statuses)}
    return {"summary": title, "responses": {**answers, **errors(())}, "security": [{}]}


def _self() -> dict[str, Any]:
    content = {JSON: {"schema": {"type": "object", "required": ["openapi", "paths"]}}}
    return {"summary": "This document", "responses": {"200": ok("It", content), **errors(())}, "security": [{}]}


def _request_headers() -> list[dict[str, Any]]:
    described: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("X-Headrace-Id", JOB_ID, "Names the job; the same id again attaches to the same job."),
        ("X-Headrace-Priority", {"enum": list(LANES)}, "The lane; wins over `service_tier`."),
        ("X-Headrace-Pool", {"type": "string", "pattern": "^[a-z0-9-]{1,40}$"}, "The pool of workers."),
        ("X-Headrace-Queue-Timeout", _TIME, "Seconds it may wait to start."),
        ("X-Headrace-Deadline", _TIME, "Seconds to its end."),
        ("X-Headrace-Fallback", _MODEL_NAME, "The model that gets it if it does not start in time."),
        ("X-Request-Id", {"type": "string"}, "Comes back with the answer; names nothing."),
    )
    return [{"name": name, "in": "header", "schema": schema, "description": text} for name, schema, text in described]


def _events(chunk: dict[str, Any]) -> dict[str, Any]:
    """One event of a stream; after the last chunk, or an error in its place, `data` is `[DONE]`."""
    told = {
        "type": "string",
        "contentMediaType": JSON,
        "contentSchema": {"anyOf": [chunk, ref(ErrorBody)]},
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
