"""How a refusal looks over HTTP: status, headers and OpenAI's error form; and as a frame of a stream."""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec
from starlette.responses import Response

from headrace.errors import BrokerError, HeadraceError, RequestError
from headrace.schemas.refusals import ErrorBody, ErrorDetail, Refusal

__all__ = [
    "METHOD_NOT_ALLOWED",
    "ORIGIN_NOT_ALLOWED",
    "RETRY_STATUS",
    "UNKNOWN_URL",
    "EdgeError",
    "as_response",
    "edge_error",
    "error_body",
    "http_refusal",
    "no_such_url",
    "refusal_of",
]

RETRY_STATUS: Final = (429, 503)
"""With these comes the time to wait before sending the request again."""

_WIRE_HEADER: Final = re.compile(r"(?<![\w-])Headrace-")
_JSON: Final = "application/json"


def refusal_of(error: Exception) -> Refusal:
    """What a failed request is told; of an unexpected error nothing but that there was one."""
    if isinstance(error, RequestError):
        return http_refusal(error.refusal)
    if isinstance(error, BrokerError):
        return Refusal(code="internal", message="the broker did not answer; send the request again")
    code = error.code if isinstance(error, HeadraceError) else "internal"
    return Refusal(code=code, message="the request could not be handled")


def http_refusal(refusal: Refusal) -> Refusal:
    """The refusal in the words of this edge: headers of the wire have an `X-` before them here."""
    param = refusal.param
    if param is not None and param.startswith("Headrace-"):
        param = f"X-{param}"
    return msgspec.structs.replace(refusal, param=param, message=_WIRE_HEADER.sub("X-Headrace-", refusal.message))


def as_response(refusal: Refusal) -> Response:
    """The whole response. 429 and 503 say how long to wait, in whole seconds from 1; 401 says what it wants.

    `x-should-retry` tells OpenAI's clients whether sending the same request again can help.
    """
    status = refusal.info.status
    headers = {"x-should-retry": "true" if refusal.info.is_retryable else "false"}
    if status in RETRY_STATUS:
        headers["retry-after"] = str(max(1, refusal.retry_after_s or 1))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error_body(refusal), status_code=status, headers=headers, media_type=_JSON)


def error_body(refusal: Refusal) -> bytes:
    """OpenAI's error form, as JSON."""
    return msgspec.json.encode(refusal.body())


class EdgeError(NamedTuple):
    """An answer that only HTTP has; over NATS nothing corresponds to it."""

    status: int
    code: str
    type: str
    message: str


UNKNOWN_URL: Final = EdgeError(404, "unknown_url", "invalid_request_error", "There is nothing at this URL.")
METHOD_NOT_ALLOWED: Final = EdgeError(
    405, "method_not_allowed", "invalid_request_error", "This URL does not take this method."
)
ORIGIN_NOT_ALLOWED: Final = EdgeError(
    403,
    "origin_not_allowed",
    "permission_error",
    "Web pages, and requests under another name of this host, are let in only where HEADRACE_HTTP_ORIGINS names them.",
)


def edge_error(error: EdgeError) -> Response:
    """One of these answers. Sending the same request again cannot help."""
    detail = ErrorDetail(message=error.message, type=error.type, code=error.code)
    headers = {"x-should-retry": "false"}
    body = msgspec.json.encode(ErrorBody(error=detail))
    return Response(body, status_code=error.status, headers=headers, media_type=_JSON)


def no_such_url(status: int, headers: Mapping[str, str] | None = None) -> Response:
    """For a path (404) or a method (405) that is not served; `headers` go with it (405 must say what is allowed)."""
    response = edge_error(METHOD_NOT_ALLOWED if status == METHOD_NOT_ALLOWED.status else UNKNOWN_URL)
    response.headers.update(headers or {})
    return response
