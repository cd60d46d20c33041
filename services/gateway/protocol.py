"""HTTP/1.1 as uvicorn speaks it, within bounds of our own: on a request's head, and on clients that stand still."""

import asyncio
import re
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from headrace.gateway.errors import error_body
from headrace.schemas.refusals import Refusal

__all__ = ["BoundedProtocol"]

MAX_HEAD_BYTES: Final = 32_768
"""The URL and all headers of a request together."""

_HEAD_S: Final = 20.0
_LINGER_S: Final = 2.0
_STALL_S: Final = 300.0
_DRAIN_S: Final = 5.0
_MAX_DRAINED_BYTES: Final = 32 * 1024 * 1024

_UPGRADE: Final = re.compile(rb"(?<=\n)upgrade(?=[ \t]*:)", re.IGNORECASE)
_END_OF_HEAD: Final = b"\r\n\r\n"

_TOO_LARGE: Final = Refusal(
    code="header_too_large", message=f"The URL and the headers must have at most {MAX_HEAD_BYTES} bytes together."
)
_MALFORMED: Final = Refusal(code="invalid_value", message="The request is not valid HTTP.")


class BoundedProtocol(HttpToolsProtocol):
    """One connection. What is refused before there is a request is answered here, in OpenAI's form.

    A head that is too large is 431. After such an answer the connection stays open a moment, so that the client can
    read it: closing on unread data resets the connection. A head that does not come to its end in time, and a client
    that takes nothing of its answer for minutes, lose their connection. So does one that goes on for long with the body
    of a request that was answered: most clients read an answer only once they have sent everything, so a little more
    is read. An offer to change to another protocol, as some clients make with every request, is ignored.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_head_bytes = 0
        self._num_unfinished_bytes = 0
        self._is_in_head = False
        self._is_in_body = False
        self._is_refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._drain_timer: asyncio.TimerHandle | None = None
        self._num_drained_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """A new connection must send a whole head in time."""
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is timed any more."""
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of the client; after a refusal they are dropped."""
        if self._is_refused:
            return
        if self._drain_timer is not None:
            self._num_drained_bytes += len(data)
            if self._num_drained_bytes > _MAX_DRAINED_BYTES:
                self.transport.close()
                return
        was_in_head = self._is_in_head
        super().data_received(data if self._is_in_body else _without_upgrade(data))
        if was_in_head and self._is_in_head and not self._is_refused:
            self._num_unfinished_bytes += len(data)
            if self._num_unfinished_bytes > MAX_HEAD_BYTES:
                self._refuse(_TOO_LARGE)

    def on_message_begin(self) -> None:
        """Each request has its own count, and its own time."""
        super().on_message_begin()
        self._is_in_head = True
        self._num_head_bytes = self._num_unfinished_bytes = 0
        self._start_head_timer()

    def on_url(self, url: bytes) -> None:
        """Counted, as it comes."""
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counted, as soon as it is whole."""
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._is_in_head = False
        self._is_in_body = True
        self._stop_head_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """What follows is the next head."""
        self._is_in_body = False
        self._stop_drain_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Answered; of a body that has not come to its end, only so much is read."""
        super().on_response_complete()
        if self._is_in_body and not self._is_answering() and not self.transport.is_closing():
            self._num_drained_bytes = 0
            self._stop_drain_timer()
            self._drain_timer = self.loop.call_later(_DRAIN_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Called for what is no HTTP, and for what `_count` has refused."""
        self._refuse(_TOO_LARGE if self._num_head_bytes > MAX_HEAD_BYTES else _MALFORMED)

    def pause_writing(self) -> None:
        """The client does not read as fast as we write."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(_STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read again."""
        super().resume_writing()
        self._stop_stall_timer()

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the head is too large")  # the parser stops at it, and uvicorn refuses

    def _refuse(self, refusal: Refusal) -> None:
        self._is_refused = True
        self._stop_head_timer()
        if self._is_answering():
            self.transport.close()  # the client could not tell this answer from the one being written
            return
        body = error_body(refusal)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[refusal.info.status] + head + body)
        self._head_timer = self.loop.call_later(_LINGER_S, self.transport.close)

    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(_HEAD_S, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _stop_drain_timer(self) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None

    def _stop_timers(self) -> None:
        self._stop_drain_timer()
        self._stop_head_timer()
        self._stop_stall_timer()


def _without_upgrade(data: bytes) -> bytes:
    """Bytes that begin in a head, with a header `Upgrade` in it called something else, of the same length.

    The parser takes the bytes after such a head for another protocol and drops them, the request's body.
    """
    end = data.find(_END_OF_HEAD)
    head, rest = (data, b"") if end < 0 else (data[:end], data[end:])
    return _UPGRADE.sub(b"ignored", head) + rest if _UPGRADE.search(head) else data
