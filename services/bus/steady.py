"""nats-py's client, steadied against what other clients send and what is given up half-way; quicker with headers."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable
from typing import Final, TypeVar

from nats.aio.client import Client, Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import SlowConsumerError

__all__ = ["SteadyClient", "honouring_cancel"]

_T = TypeVar("_T")

log = logging.getLogger(__name__)

_CANCEL_AGAIN_S: Final = 0.05
_NO_STATUS: Final = b"NATS/1.0\r\n"
_SPACE: Final = " \t\n\r\x0b\x0c"
"""White space in bytes; a string has more."""


class SteadyClient(Client):
    """The client, but nothing that others do makes it deaf, and after `close` nothing of it runs on.

    Subjects, replies and headers are bytes that any publisher chooses. nats-py ends its read loop over what it does
    not expect there, and over the answer to a flush that was cancelled; the process then stays deaf until its pings go
    unanswered, ten seconds later. Such a message is dropped, and such an answer ignored.
    """

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        subscription = self._subs.get(sid)
        is_plain = subscription is not None and subscription._jsi is None and subscription._future is None
        try:
            if subscription is None or not is_plain:
                await super()._process_msg(sid, subject, reply, data, headers)
            else:
                await self._process_plain(subscription, subject, reply, data, headers)
        except Exception as error:  # the edge of the read loop: whatever one message does, the next must be read
            log.warning("a message that cannot be decoded was dropped: %s", type(error).__name__)

    async def _process_plain(
        self, subscription: Subscription, subject: bytes, reply: bytes, data: bytes, headers: bytes | None
    ) -> None:
        # What nats-py's own does for a subscription that is neither its JetStream's nor a request of the old style.
        size, sid = len(data), subscription._id
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += size
        subscription._received += 1
        if 0 < subscription._max_msgs <= subscription._received:
            self._subs.pop(sid, None)
        found: dict[str, str] | None = None
        if headers is not None and headers.startswith(_NO_STATUS):
            found = self._parse_header_lines(headers[len(_NO_STATUS) :]) or None
        elif headers:
            found = await self._process_headers(headers)
        message = Msg(self, subject.decode(), reply.decode(), data, found, _sid=sid)
        limit = subscription._pending_bytes_limit
        if not 0 < limit <= subscription._pending_size + size:
            try:
                subscription._pending_queue.put_nowait(message)
            except asyncio.QueueFull:
                pass
            else:
                subscription._pending_size += size
                return
        await self._error_cb(SlowConsumerError(subject=message.subject, reply=message.reply, sid=sid, sub=subscription))

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():  # pongs come in the order of their pings
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _connect_to_server(self, s: Srv) -> None:
        await honouring_cancel(super()._connect_to_server(s))

    async def _process_connect_init(self) -> None:
        try:
            await honouring_cancel(super()._process_connect_init())
        except BaseException:
            if self._transport:  # a server that lets us not in: nats-py would drop the socket open, one with each try
                self._transport.close()  # type: ignore[no-untyped-call]
            raise

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        await self._end_reconnecting()
        await self._send_the_rest()
        task = asyncio.current_task()
        num_cancels = task.cancelling() if task is not None else 0
        try:
            await super()._close(status, do_cbs)
        except asyncio.CancelledError:
            if task is not None and task.cancelling() > num_cancels:
                raise
            # Nobody cancelled us: the reconnecting was ended as it waited for the same socket's end as we do.
            for told in (self._disconnected_cb, self._closed_cb):
                if do_cbs and told is not None:
                    await told()

    async def _send_the_rest(self) -> None:
        # nats-py would end its closing over a connection that broke here, with the socket open and tasks running.
        if self._transport is None or self.is_closed:
            return
        pending, self._pending, self._pending_data_size = self._pending, [], 0
        with contextlib.suppress(OSError, RuntimeError):  # asyncio raises the latter where the transport is closed
            if pending:
                self._transport.writelines(pending)
                await self._transport.drain()  # type: ignore[no-untyped-call]

    async def _end_reconnecting(self) -> None:
        # One cancellation may not be enough (see `honouring_cancel`), and nats-py would go on to connect for ever.
        task = self._reconnection_task
        if task is None or task is asyncio.current_task():
            return
        while not task.done():
            task.cancel()
            await asyncio.wait((task,), timeout=_CANCEL_AGAIN_S)
        with contextlib.suppress(asyncio.CancelledError):
            task.exception()

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        """What nats-py's own finds, in a sixth of its time: names are few, so each is checked once.

        It was half of what reading a stored event cost.
        """
        headers: dict[str, str] = {}
        for line in bytes(raw).decode("utf-8", "replace").split("\r\n"):
            name, separator, value = line.partition(":")
            if separator and (key := _header_name(name)) is not None:
                headers[key] = value.strip(_SPACE)
        return headers


async def honouring_cancel(awaitable: Awaitable[_T]) -> _T:
    """Await something of nats-py without losing a cancellation.

    It waits with `asyncio.wait_for`, which before Python 3.12 drops a cancellation that comes in the same turn of the
    loop as the result, or as the error; a background task would then run on for ever.
    """
    task = asyncio.current_task()
    num_cancels = task.cancelling() if task is not None else 0
    try:
        result = await awaitable
    except Exception:
        if task is not None and task.cancelling() > num_cancels:
            raise asyncio.CancelledError from None
        raise
    if task is not None and task.cancelling() > num_cancels:
        raise asyncio.CancelledError
    return result


@functools.lru_cache(maxsize=1024)
def _header_name(name: str) -> str | None:
    """A header's name; None if it is not ASCII or has white space inside, which makes its line no header."""
    key = name.strip(_SPACE)
    return None if not key.isascii() or any(character.isspace() for character in key) else key
