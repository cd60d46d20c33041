"""The requests of a batch's input, read as they are needed."""

from collections.abc import AsyncIterator, Container

from headrace.errors import RequestError
from headrace.schemas.batch_lines import BatchRequest, LineSplitter, read_request_line
from headrace.schemas.refusals import Refusal

__all__ = ["read_requests"]


async def read_requests(
    pieces: AsyncIterator[bytes], *, after: int = 0, skip: Container[int] = frozenset()
) -> AsyncIterator[BatchRequest]:
    """The requests of the lines behind `after`, but for those in `skip`. Holds a piece and a line.

    Raises RequestError for a line that is none, and what `pieces` raises.
    """
    splitter = LineSplitter()
    async for piece in pieces:
        for number, line in splitter.feed(piece):
            if number > after and number not in skip:
                yield _request(number, line)
    for number, line in splitter.end():
        if number > after and number not in skip:
            yield _request(number, line)


def _request(number: int, line: bytes) -> BatchRequest:
    request = read_request_line(number, line)
    if isinstance(request, Refusal):
        raise RequestError(request)
    return request
