"""The client library's side of the model: what `Bus` and the services protocol use of a nats-py client.

`Bus` itself, and nats-py's subscriptions, are the real ones.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import ConnectionClosedError, NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from headrace.bus.connection import Bus
from headrace.settings import Settings
from tests.simulation.broker import Headers, Link, ModelBroker
from tests.simulation.loop import Process

__all__ = ["ModelClient", "model_bus"]

Callback = Callable[[Msg], Awaitable[None]]


class _Version(NamedTuple):
    major: int = 2
    minor: int = 15


class _Names:
    def __init__(self, prefix: str) -> None:
        self._prefix, self._number = prefix, 0

    def next(self) -> bytearray:
        self._number += 1
        return bytearray(f"{self._prefix}x{self._number}".encode())


_NEVER_ASKED = ".metrics"
"""How a subject ends on which nobody sends anything here; it changes no schedule."""


class ModelClient:
    """One connection. Each call passes the scheduler before it has an effect, and again before its answer is seen."""

    is_draining = False
    is_reconnecting = False
    max_payload = 1_048_576
    connected_server_version = _Version()

    def __init__(self, broker: ModelBroker, process: Process, client_id: int) -> None:
        self._broker = broker
        self.link = Link(process.name, process.context)
        self.client_id = client_id
        self.is_closed = False
        self._server_info = {"server_id": "model"}
        self._nuid = _Names(f"c{client_id}")
        self._subs: dict[int, Subscription] = {}
        self._num_subs = 0
        self._unasked: set[int] = set()
        self._answers: dict[str, asyncio.Future[Msg]] = {}
        self._prefix = f"_INBOX._svc.c{client_id}"
        broker.subscribe(self.link, 0, f"{self._prefix}.answers.*", "", self._on_answer)

    @property
    def is_connected(self) -> bool:
        return not self.is_closed

    def new_inbox(self) -> str:
        return f"{self._prefix}.{self._nuid.next().decode()}"

    async def publish(
        self, subject: str, data: bytes = b"", *, reply: str = "", headers: Headers | None = None
    ) -> None:
        if self.is_closed:
            raise ConnectionClosedError
        link, broker = self.link, self._broker
        copied = dict(headers) if headers else None
        broker.send(link, lambda: broker.publish(subject, reply, data, copied, link))
        await asyncio.sleep(broker.pause_s())

    async def request(
        self, subject: str, payload: bytes = b"", *, timeout: float = 0.5, headers: Headers | None = None
    ) -> Msg:
        token = self._nuid.next().decode()
        future: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._answers.pop(token, None))
        self._answers[token] = future
        await self.publish(subject, payload, reply=f"{self._prefix}.answers.{token}", headers=headers)
        try:
            message = await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise NatsTimeoutError from None
        if message.headers and message.headers.get("Status") == "503":
            raise NoRespondersError
        return message

    def _on_answer(self, subject: str, reply: str, data: bytes, headers: Headers | None) -> None:
        future = self._answers.get(subject.rpartition(".")[2])
        if future is not None and not future.done():
            future.set_result(Msg(self, subject, reply, data, headers))  # type: ignore[arg-type]

    async def subscribe(self, subject: str, queue: str = "", cb: Callback | None = None, **limits: Any) -> Subscription:
        if self.is_closed:
            raise ConnectionClosedError
        self._num_subs += 1
        sid = self._num_subs
        subscription = Subscription(self, sid, subject, queue, cb)
        self._subs[sid] = subscription
        subscription._start(None)  # type: ignore[no-untyped-call]

        def deliver(subject: str, reply: str, data: bytes, headers: Headers | None) -> None:
            if sid in self._subs:
                subscription._received += 1
                message = Msg(self, subject, reply, data, dict(headers) if headers else None)  # type: ignore[arg-type]
                subscription._pending_queue.put_nowait(message)

        if subject.endswith(_NEVER_ASKED):
            self._unasked.add(sid)
            return subscription
        link, broker = self.link, self._broker
        broker.send(link, lambda: broker.subscribe(link, sid, subject, queue, deliver))
        await asyncio.sleep(0)
        return subscription

    async def flush(self) -> None:
        if self.is_closed:
            raise ConnectionClosedError
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        broker, link = self._broker, self.link
        broker.send(link, lambda: broker.pong(link, lambda: _resolve(done)))
        await asyncio.wait_for(done, 10)

    async def close(self) -> None:
        self.is_closed = True

    def _remove_sub(self, sid: int) -> None:
        self._subs.pop(sid, None)

    async def _send_unsubscribe(self, sid: int, limit: int = 0) -> None:
        if sid in self._unasked:
            return
        broker, link = self._broker, self.link
        broker.send(link, lambda: broker.unsubscribe(link, sid))


def model_bus(broker: ModelBroker, process: Process, settings: Settings, client_id: int) -> Bus:
    """The real `Bus` of one process, over a connection to the model."""
    return Bus(ModelClient(broker, process, client_id), settings)  # type: ignore[arg-type]


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
