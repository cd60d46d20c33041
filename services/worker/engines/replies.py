"""What a server's refusal means: the request's fault, no room now, or the engine's fault."""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any, Final

from headrace.errors import EngineBusyError, EngineError, EngineRequestError
from headrace.schemas.openai import InferenceRequest
from headrace.schemas.refusals import Refusal

__all__ = ["error_of_reply", "error_of_status"]

_MAX_CHARS: Final = 240
_NUM_ECHO_CHARS: Final = 20
"""So many characters in a row that are also in the request count as an echo of it."""

_BUSY: Final = frozenset({429, 503})
_ENGINE_FAULT: Final = frozenset({401, 403, 407, 408, 409, 425})
"""Statuses below 500 that say nothing about the request: our key, our timing."""
_UNSUPPORTED: Final = frozenset({405, 501})
_CONTEXT: Final = re.compile(
    r"context[ _-]?(length|size|window)|exceed_context|max(imum)?[ _]model[ _]len"
    r"|maximum (input|prompt|sequence) length",
    re.IGNORECASE,
)
_PARAM: Final = re.compile(r"[A-Za-z0-9_.\[\]]{1,64}")


def error_of_reply(status: int, body: bytes, request: InferenceRequest) -> EngineError:
    """The exception for an HTTP answer other than 200."""
    detail: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        detail = json.loads(body)
    if isinstance(detail, dict):
        detail = detail.get("error", detail)
    if not isinstance(detail, dict):
        detail = {"message": detail if isinstance(detail, str) else ""}
    message = detail.get("message") or detail.get("detail") or ""
    param = detail.get("param")
    return error_of_status(
        status,
        f"{message} {detail.get('type') or ''}" if status < 500 else str(message),
        request,
        param=param if isinstance(param, str) else None,
        shown=str(message),
    )


def error_of_status(
    status: int, message: str, request: InferenceRequest, *, param: str | None = None, shown: str | None = None
) -> EngineError:
    """The exception for a status and what the engine said; `shown` is the part fit for people, `message` if None.

    No message is longer than a line, and none repeats the request.
    """
    text = _safe(message if shown is None else shown, request) or "no reason given"
    if status in _BUSY:
        return EngineBusyError(f"the engine has no room (HTTP {status}): {text}")
    if status in _UNSUPPORTED:
        return _refusal("invalid_value", f"the engine does not support {request.op}: {text}", None)
    if not 400 <= status < 500 or status in _ENGINE_FAULT:
        return EngineError(f"the engine answered HTTP {status}: {text}")
    if _CONTEXT.search(message):
        field = "messages" if request.op == "chat" else "input" if request.op == "embeddings" else "prompt"
        return _refusal("context_length_exceeded", text, field)
    return _refusal("invalid_value", f"the engine refused the request: {text}", param)


def _refusal(code: str, message: str, param: str | None) -> EngineRequestError:
    if param is not None and not _PARAM.fullmatch(param):
        param = None
    return EngineRequestError(Refusal(code=code, message=message, param=param))


def _safe(message: str, request: InferenceRequest) -> str:
    """One short line; cut where it begins to repeat the request."""
    line = " ".join(message.split())
    if len(line) > _MAX_CHARS:
        line = line[: _MAX_CHARS - 1] + "…"
    said = "\n".join(" ".join(text.split()) for text in _texts(request.body))
    for at in range(len(line) - _NUM_ECHO_CHARS + 1):
        if line[at : at + _NUM_ECHO_CHARS] in said:
            return (line[:at].rstrip() + " …").strip()
    return line


def _texts(value: Any) -> Iterator[str]:
    """Every string of the body; its depth was bounded when it was parsed."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
