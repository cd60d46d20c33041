"""Work for a client that may leave before it is done, in a process that may have to stop before it is done."""

import asyncio
import contextlib
import enum
import logging
from collections import Counter
from collections.abc import Coroutine, Iterator
from typing import Any, Final, TypeVar

from starlette.types import Receive

from headrace.client import JobStream
from headrace.errors import HeadraceError, RequestError
from headrace.schemas.refusals import Refusal

__all__ = ["CLIENT_LEFT", "SHUTTING_DOWN", "Gone", "OpenRequests", "cancel"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_CANCEL_WITHIN_S: Final = 20.0

SHUTTING_DOWN: Final = Refusal(
    code="shutting_down",
    message="This gateway is shutting down. The job goes on: read it on from another one, or send the request again.",
    retry_after_s=1,
)


CLIENT_LEFT: Final = 499
"""The status of an answer that nobody was there to read, in figures and nowhere else: as nginx has it."""


class Gone(enum.Enum):
    """Why work was given up."""

    CLIENT = "the client has left"
    PROCESS = "the process stops"


class OpenRequests:
    """The requests this process answers now, at most `limit`; told together when the process must stop."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._num_open = 0
        self._num_of: Counter[str] = Counter()
        self._waiting: set[asyncio.Future[Gone]] = set()
        self._is_over = False

    @contextlib.contextmanager
    def one_more(self, tenant: str, *, is_alone: bool) -> Iterator[None]:
        """While inside, a tenant has one more open.

        Beside others it may have as many as are free then: alone it is left half of all, and nobody can take the last
        from the rest (the dynamic threshold of shared-memory switches, Choudhury and Hahne 1998, with factor 1).
        Raises RequestError: `rate_limited` beyond a limit, `shutting_down` after the end.
        """
        if self._is_over:
            raise RequestError(SHUTTING_DOWN)
        num_free = self._limit - self._num_open
        if num_free <= (0 if is_alone else self._num_of[tenant]):
            whose = "requests" if is_alone else "of your requests"
            message = f"This gateway answers {self._num_of[tenant]} {whose} already; try again later."
            raise RequestError(Refusal(code="rate_limited", message=message, retry_after_s=1))
        self._num_open += 1
        self._num_of[tenant] += 1
        try:
            yield
        finally:
            self._num_open -= 1
            self._num_of[tenant] -= 1
            if not self._num_of[tenant]:
                del self._num_of[tenant]

    def end_all(self) -> None:
        """The grace period is over: whatever is still open is given up, and whatever would be opened refused."""
        self._is_over = True
        for gone in self._waiting:
            if not gone.done():
                gone.set_result(Gone.PROCESS)

    async def unless_over(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do work that reads the request's body; where the process must stop first, cancel it.

        Raises RequestError (`shutting_down`) then, else what the work raises.
        """
        over: asyncio.Future[Gone] = asyncio.get_running_loop().create_future()
        if self._is_over:
            over.set_result(Gone.PROCESS)
        self._waiting.add(over)
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait((working, over), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise RequestError(SHUTTING_DOWN)
        finally:
            self._waiting.discard(over)
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def unless_gone(self, work: Coroutine[Any, Any, _T], receive: Receive) -> _T | Gone:
        """Do the work; where the client leaves or the process must stop first, cancel it and say which.

        Raises what the work raises. The request's body must have been read.
        """
        gone: asyncio.Future[Gone] = asyncio.get_running_loop().create_future()
        if self._is_over:
            gone.set_result(Gone.PROCESS)
        self._waiting.add(gone)
        working = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(_until_disconnect(receive, gone))
        try:
            await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            return gone.result()
        finally:
            self._waiting.discard(gone)
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)


async def _until_disconnect(receive: Receive, gone: asyncio.Future[Gone]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if not gone.done():
        gone.set_result(Gone.CLIENT)


async def cancel(stream: JobStream) -> None:
    """Cancel the job of a client that left, unless it was there before that client asked for it.

    Where no router answers, the job's deadline ends it.
    """
    if stream.is_attached:
        return
    try:
        async with asyncio.timeout(_CANCEL_WITHIN_S):
            await stream.cancel()
    except (HeadraceError, TimeoutError) as error:
        log.warning("a job could not be cancelled: %s", type(error).__name__, extra={"job": stream.job})
