"""How a refusal looks over HTTP: status, headers and OpenAI's error form; and as a frame of a stream."""

import re
from typing import Final

import msgspec
from starlette.responses import Response

from headrace.errors import BrokerError, HeadraceError, RequestError
from headrace.schemas.refusals import ErrorBody, ErrorDetail, Refusal

__all__ = ["as_response", "error_body", "http_refusal", "no_such_url", "refusal_of"]

_RETRY_STATUS: Final = (429, 503)
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
    if status in _RETRY_STATUS:
        headers["retry-after"] = str(max(1, refusal.retry_after_s or 1))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error_body(refusal), status_code=status, headers=headers, media_type=_JSON)


def error_body(refusal: Refusal) -> bytes:
    """OpenAI's error form, as JSON."""
    return msgspec.json.encode(refusal.body())


def no_such_url(status: int) -> Response:
    """For a path (404) or a method (405) that is not served: two answers that only HTTP has."""
    code, message = ("unknown_url", "There is nothing at this URL.")
    if status == 405:
        code, message = ("method_not_allowed", "This URL does not take this method.")
    detail = ErrorDetail(message=message, type="invalid_request_error", code=code)
    return Response(msgspec.json.encode(ErrorBody(error=detail)), status_code=status, media_type=_JSON)
