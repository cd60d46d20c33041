"""What the OpenAPI document says of files and batches."""

from typing import Any, Final

from headrace.gateway.describing import JSON, OF_KEYS, REF, errors, get, in_path, in_query, ok, ref
from headrace.gateway.repeats import MAX_KEY_CHARS
from headrace.gateway.shapes_batches import Batch, Batches, DeletedFile, File, Files
from headrace.schemas.batch_lines import OPERATION_OF_URL
from headrace.schemas.batches import COMPLETION_WINDOWS_S, MAX_OUTPUT_TTL_S, MIN_TTL_S

__all__ = ["BATCH_SHAPES", "batch_bodies", "batch_paths"]

BATCH_SHAPES: Final = (File, Files, DeletedFile, Batch, Batches)
"""What the answers look like."""

_OF_FILES: Final = (*OF_KEYS, "file_not_found")
_OF_BATCHES: Final = (*OF_KEYS, "batch_not_found")
_OF_UPLOADS: Final = (*OF_KEYS, "invalid_json", "json_too_deep", "request_too_large")
_FORM: Final = "multipart/form-data"
_REPEAT: Final = "The same again, of the same tenant, is the same batch, as long as that is known."
_ID: Final = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,100}$"}
_FILE: Final = in_path("file", _ID)
_BATCH: Final = in_path("batch", _ID)
_AFTER: Final = in_query("after", _ID, "The id of the last one that is known.")


def batch_bodies() -> dict[str, Any]:
    """Schemas of what is sent, by their names."""
    ttl = {"type": "integer", "minimum": MIN_TTL_S, "maximum": MAX_OUTPUT_TTL_S}
    return {
        "BatchRequest": {
            "type": "object",
            "required": ["input_file_id", "endpoint", "completion_window"],
            "properties": {
                "input_file_id": _ID,
                "endpoint": {"enum": list(OPERATION_OF_URL)},
                "completion_window": {"enum": list(COMPLETION_WINDOWS_S)},
                "metadata": {
                    "type": ["object", "null"],
                    "maxProperties": 16,
                    "additionalProperties": {"type": "string", "maxLength": 512},
                },
                "output_expires_after": {
                    "type": ["object", "null"],
                    "required": ["anchor", "seconds"],
                    "properties": {"anchor": {"const": "created_at"}, "seconds": ttl},
                },
            },
        },
        "FileRequest": {
            "type": "object",
            "required": ["file", "purpose"],
            "properties": {
                "file": {"type": "string", "contentMediaType": "application/octet-stream"},
                "purpose": {"enum": ["batch"]},
            },
        },
    }


def batch_paths() -> dict[str, Any]:
    """The URLs of files and batches."""
    order = in_query("order", {"enum": ["asc", "desc"]}, "By the time they were made; newest first if not said.")
    purpose = in_query("purpose", {"type": "string"}, "Only files of this purpose.")
    return {
        "/v1/files": {
            "get": get("List the files", Files, OF_KEYS, _limit(10_000), _AFTER, order, purpose),
            "post": _send("Take a file in, a request a line", File, "FileRequest", _FORM, _OF_UPLOADS),
        },
        "/v1/files/{file}": {
            "get": get("Show what is known of a file", File, _OF_FILES, _FILE),
            "delete": get("Remove a file", DeletedFile, _OF_FILES, _FILE),
        },
        "/v1/files/{file}/content": {"get": _content()},
        "/v1/batches": {
            "get": get("List the batches, newest first", Batches, OF_KEYS, _limit(100), _AFTER),
            "post": {
                **_send("Begin a batch", Batch, "BatchRequest", JSON, (*_OF_UPLOADS, "file_not_found")),
                "parameters": [_key("X-Headrace-Id"), _key("Idempotency-Key")],
            },
        },
        "/v1/batches/{batch}": {"get": get("Show a batch", Batch, _OF_BATCHES, _BATCH)},
        "/v1/batches/{batch}/cancel": {"post": get("Cancel a batch; what it has is kept", Batch, _OF_BATCHES, _BATCH)},
    }


def _key(header: str) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS}
    return {"name": header, "in": "header", "schema": schema, "description": _REPEAT}


def _limit(most: int) -> dict[str, Any]:
    return in_query("limit", {"type": "integer", "minimum": 1, "maximum": most}, "How many at most.")


def _send(title: str, answer: type, body: str, media: str, codes: tuple[str, ...]) -> dict[str, Any]:
    return {
        "summary": title,
        "requestBody": {"required": True, "content": {media: {"schema": {"$ref": REF.format(name=body)}}}},
        "responses": {"200": ok("What was made", {JSON: {"schema": ref(answer)}}), **errors(codes)},
    }


def _content() -> dict[str, Any]:
    media = {"application/octet-stream": {"schema": {"type": "string", "contentMediaType": "application/octet-stream"}}}
    return {
        "summary": "Read a file",
        "parameters": [_FILE],
        "responses": {"200": ok("Its bytes", media), **errors(_OF_FILES)},
    }
