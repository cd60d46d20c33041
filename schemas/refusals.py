"""Refusals: every reason a request is turned down or ends badly, in OpenAI's error form.

The table `CODES` is the contract of the wire: code, HTTP status, OpenAI's error type, and
whether sending the same request again can help. A refusal is a value, returned and not raised, so
that pure validation needs no exceptions; `headrace.errors` turns one into an exception for callers.
"""

from typing import Final, NamedTuple

import msgspec

MAX_MESSAGE_CHARS: Final = 600
"""Longest error message ever sent; what a client sent is never echoed at length."""


class CodeInfo(NamedTuple):
    """What a code means on the wire: HTTP status, OpenAI error type, whether a retry can help."""

    status: int
    type: str
    is_retryable: bool


CODES: Final[dict[str, CodeInfo]] = {
    "invalid_json": CodeInfo(400, "invalid_request_error", False),
    "json_too_deep": CodeInfo(400, "invalid_request_error", False),
    "invalid_value": CodeInfo(400, "invalid_request_error", False),
    "unsupported_parameter": CodeInfo(400, "invalid_request_error", False),
    "context_length_exceeded": CodeInfo(400, "invalid_request_error", False),
    "exceeds_capacity": CodeInfo(400, "invalid_request_error", False),
    "invalid_api_key": CodeInfo(401, "authentication_error", False),
    "model_not_found": CodeInfo(404, "not_found_error", False),
    "job_not_found": CodeInfo(404, "not_found_error", False),
    "file_not_found": CodeInfo(404, "not_found_error", False),
    "batch_not_found": CodeInfo(404, "not_found_error", False),
    "request_too_large": CodeInfo(413, "invalid_request_error", False),
    "header_too_large": CodeInfo(431, "invalid_request_error", False),
    "rate_limited": CodeInfo(429, "rate_limit_error", True),
    "queue_full": CodeInfo(429, "rate_limit_error", True),
    "job_failed": CodeInfo(500, "server_error", False),
    "not_resumable": CodeInfo(500, "server_error", True),
    "internal": CodeInfo(500, "server_error", True),
    "engine_error": CodeInfo(502, "server_error", True),
    "stream_gap": CodeInfo(502, "server_error", False),
    "no_worker": CodeInfo(503, "server_error", True),
    "shutting_down": CodeInfo(503, "server_error", True),
    "queue_timeout": CodeInfo(504, "server_error", True),
    "deadline_exceeded": CodeInfo(504, "server_error", False),
}


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """The inner object of OpenAI's error form."""

    message: str
    type: str
    code: str
    param: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's error form, `{"error": {...}}`; body of every refusal and of `failed`/`expired` events."""

    error: ErrorDetail


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A request turned down: a code of `CODES`, what to do about it, and where (`param`)."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None

    @property
    def info(self) -> CodeInfo:
        """The code's row of the table; that of `internal` for one a newer version made."""
        return CODES.get(self.code, CODES["internal"])

    def body(self) -> ErrorBody:
        """The wire form; the message is cut at `MAX_MESSAGE_CHARS`."""
        message = self.message
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[: MAX_MESSAGE_CHARS - 1] + "…"
        return ErrorBody(error=ErrorDetail(message=message, type=self.info.type, code=self.code, param=self.param))
