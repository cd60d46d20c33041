"""What one request may cost this process: a body read within bounds of size and time, and what waits for a reader."""

import asyncio
from typing import Final

from starlette.requests import Request

from headrace.bus.connection import Pending
from headrace.errors import RequestError
from headrace.schemas.refusals import Refusal

__all__ = ["pending", "read_body"]

_MAX_PENDING_MESSAGES: Final = 128


_BODY_S: Final = 60.0
_DISCARD_S: Final = 5.0
_MAX_DISCARDED_BYTES: Final = 32 * 1024 * 1024


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """All of it. Raises RequestError (`request_too_large`) beyond the limit, declared or not.

    Of a body that is too large the rest is read and dropped, within limits of its own: most clients read an answer
    only once they have sent everything, and one that is cut off sees a broken connection instead. A client that waits
    to be told to go on is refused at once. Raises starlette's ClientDisconnect.
    """
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise _invalid("Content-Encoding", f"{encoding[:32]!r} is not understood; send the body as it is")
    declared = request.headers.get("content-length", "")
    is_too_large = declared.isascii() and declared.isdigit() and int(declared[:19]) > max_bytes
    if is_too_large and request.headers.get("expect", "").lower() == "100-continue":
        raise _too_large(max_bytes)
    pieces: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(_DISCARD_S if is_too_large else _BODY_S) as limit:
            async for piece in request.stream():
                num_bytes += len(piece)
                if num_bytes <= max_bytes and not is_too_large:
                    pieces.append(piece)
                    continue
                if not is_too_large:
                    is_too_large = True
                    pieces.clear()
                    limit.reschedule(asyncio.get_running_loop().time() + _DISCARD_S)
                if num_bytes > _MAX_DISCARDED_BYTES:
                    break
    except TimeoutError:
        if not is_too_large:
            raise _invalid("body", f"did not arrive within {_BODY_S:g} s") from None
    if is_too_large:
        raise _too_large(max_bytes)
    return b"".join(pieces)


def pending(max_event_bytes: int) -> Pending:
    """What is kept of a stream for a client that reads slowly; the log has the rest.

    The bound in bytes leaves room for two of the largest events: one that alone is above it would never come in.
    """
    return Pending(messages=_MAX_PENDING_MESSAGES, size_bytes=2 * max_event_bytes)


def _too_large(max_bytes: int) -> RequestError:
    message = f"The body is larger than the limit of {max_bytes} bytes. Shorten it or split the request."
    return RequestError(Refusal(code="request_too_large", message=message))


def _invalid(param: str, problem: str) -> RequestError:
    return RequestError(Refusal(code="invalid_value", message=f"{param} {problem}", param=param))
