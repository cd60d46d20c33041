"""Lines of a batch's files: requests as OpenAI's batch format has them, and the results written for them."""

import hashlib
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from headrace.schemas.json_bounds import decode_object
from headrace.schemas.json_checks import kind
from headrace.schemas.openai import Operation, RequestLimits
from headrace.schemas.refusals import Refusal
from headrace.schemas.subjects import is_model_name

__all__ = [
    "MAX_LINE_BYTES",
    "OPERATION_OF_URL",
    "BatchRequest",
    "LineCheck",
    "LineResult",
    "LineSplitter",
    "answered",
    "read_request_line",
    "refused",
    "unanswered",
]

OPERATION_OF_URL: Final[dict[str, Operation]] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
}
"""What a line, and a whole batch, may be for."""

MAX_LINE_BYTES: Final = 1_000_000
"""A line holds the largest body that a router takes, and a little around it."""

_MAX_CUSTOM_ID_CHARS: Final = 512
_AROUND_BODY_LEVELS: Final = 1
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a batch. `number` is its line in the file, from 1; `body` is as it goes over the wire."""

    number: int
    custom_id: str
    url: str
    model: str
    body: bytes

    @property
    def op(self) -> Operation:
        """What it asks for."""
        return OPERATION_OF_URL[self.url]


class LineSplitter:
    """Cuts a file that comes in pieces into its numbered lines, holding at most one line; empty ones are left out."""

    def __init__(self) -> None:
        self._rest = b""
        self._number = 0

    def feed(self, piece: bytes) -> Iterator[tuple[int, bytes]]:
        """The lines that end in this piece. One that is too long comes as the part that shows it."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            yield from self._numbered(line)
        if len(self._rest) > MAX_LINE_BYTES:
            too_long, self._rest = self._rest, b""
            yield from self._numbered(too_long)

    def end(self) -> Iterator[tuple[int, bytes]]:
        """The last line, where the file does not end with its end."""
        last, self._rest = self._rest, b""
        yield from self._numbered(last)

    def _numbered(self, line: bytes) -> Iterator[tuple[int, bytes]]:
        self._number += 1
        if self._number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if stripped := line.strip():
            yield self._number, stripped


class LineCheck:
    """Checks the lines of one file one after another; knows what was seen of it. Holds 16 bytes for each line."""

    def __init__(self, *, max_lines: int) -> None:
        self._max_lines = max_lines
        self._custom_ids: set[bytes] = set()
        self.num_lines = 0
        self.urls: set[str] = set()

    def take(self, number: int, data: bytes) -> BatchRequest | Refusal:
        """The request of the next line, or what is wrong with it or with the file as a whole."""
        request = read_request_line(number, data)
        if isinstance(request, Refusal):
            return request
        self.num_lines += 1
        if self.num_lines > self._max_lines:
            return _wrong(number, f"A file has at most {self._max_lines} requests", param="file")
        digest = hashlib.blake2b(request.custom_id.encode(), digest_size=16).digest()
        if digest in self._custom_ids:
            return _wrong(number, "'custom_id' must be unique, and another line has it", param="custom_id")
        self._custom_ids.add(digest)
        self.urls.add(request.url)
        return request

    def end(self) -> Refusal | None:
        """What is wrong with the file now that it has ended."""
        if self.num_lines:
            return None
        return Refusal(code="invalid_value", message="The file holds no request.", param="file")


def read_request_line(number: int, data: bytes) -> BatchRequest | Refusal:
    """The request of a line, or what is wrong with it, with the number of the line.

    What only a router can judge, parameters of the body for instance, comes as the answer of that one line later.
    """
    limits = RequestLimits()
    decoded = decode_object(data, max_bytes=MAX_LINE_BYTES, max_depth=limits.max_depth + _AROUND_BODY_LEVELS)
    if isinstance(decoded, Refusal):
        message = decoded.message.replace("The body", "It").replace("the body", "it")
        return Refusal(code=decoded.code, message=f"Line {number}: {message}", param=decoded.param)
    custom_id, method, url, body = (decoded.get(key) for key in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_CUSTOM_ID_CHARS:
        rule = f"'custom_id' must be a string of 1 to {_MAX_CUSTOM_ID_CHARS} characters"
        return _wrong(number, rule, param="custom_id")
    if method != "POST":
        return _wrong(number, "'method' must be 'POST'", param="method")
    if not isinstance(url, str) or url not in OPERATION_OF_URL:
        return _wrong(number, f"'url' must be one of {', '.join(OPERATION_OF_URL)}", param="url")
    if not isinstance(body, dict):
        return _wrong(number, f"'body' must be an object, not {kind(body)}", param="body")
    model = body.get("model")
    if not isinstance(model, str) or not is_model_name(model):
        return _wrong(number, "'body.model' must name a model", param="body.model")
    if body.get("stream") not in (None, False):
        return _wrong(number, "'body.stream' must be false in a batch", param="body.stream")
    whole = body if OPERATION_OF_URL[url] == "embeddings" else {**body, "stream": False}
    return BatchRequest(number=number, custom_id=custom_id, url=url, model=model, body=msgspec.json.encode(whole))


class LineResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one request: a line of the output file, or of the error file where it failed."""

    number: int
    is_failed: bool
    data: bytes


class _Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: Any


class _Error(msgspec.Struct, frozen=True):
    code: str
    message: str


class _ResultLine(msgspec.Struct, frozen=True):
    id: str
    custom_id: str
    response: _Response | None
    error: _Error | None


def answered(request: BatchRequest, *, batch: str, job: str, response: bytes) -> LineResult:
    """The result of a request that has its answer, `response` being that in JSON."""
    body = msgspec.Raw(response) if b"\n" not in response else msgspec.json.decode(response)
    return _result(request, batch, _Response(200, job, body), None, is_failed=False)


def refused(request: BatchRequest, *, batch: str, job: str, refusal: Refusal) -> LineResult:
    """The result of a request that was refused, or whose job ended badly: status and body as over HTTP."""
    return _result(request, batch, _Response(refusal.info.status, job, refusal.body()), None, is_failed=True)


def unanswered(request: BatchRequest, *, batch: str, code: str, message: str) -> LineResult:
    """The result of a request that its batch did not come to."""
    return _result(request, batch, None, _Error(code, message), is_failed=True)


def _result(
    request: BatchRequest, batch: str, response: _Response | None, error: _Error | None, *, is_failed: bool
) -> LineResult:
    line = _ResultLine(f"batch_req_{batch.removeprefix('batch_')}_{request.number}", request.custom_id, response, error)
    return LineResult(number=request.number, is_failed=is_failed, data=msgspec.json.encode(line))


def _wrong(number: int, rule: str, *, param: str) -> Refusal:
    return Refusal(code="invalid_value", message=f"Line {number}: {rule}.", param=param)
