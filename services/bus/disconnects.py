"""Disconnect notices of the broker's system account: a killed process is known in milliseconds."""

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from nats.aio.msg import Msg

from headrace.bus.connection import connect
from headrace.settings import Settings

__all__ = ["Disconnect", "disconnects"]

log = logging.getLogger(__name__)

_SUBJECT = "$SYS.ACCOUNT.*.DISCONNECT"


class Disconnect(msgspec.Struct, frozen=True):
    """A client's connection ended. `connection` is what its process calls `Bus.connection_id`."""

    connection: str
    reason: str


class _Server(msgspec.Struct, frozen=True):
    id: str = ""


class _Client(msgspec.Struct, frozen=True):
    id: int = 0


class _Notice(msgspec.Struct, frozen=True):
    server: _Server
    client: _Client
    reason: str = ""


@contextlib.asynccontextmanager
async def disconnects(
    url: str, settings: Settings, *, handler: Callable[[Disconnect], Awaitable[None]]
) -> AsyncIterator[None]:
    """Call `handler` for each connection of any client that ends, inside this context.

    The credential is `nats_system_credentials`, or in `url`: of a user of the system account. Raises
    BrokerUnavailableError where that fails.
    """

    async def on_notice(message: Msg) -> None:
        try:
            notice = msgspec.json.decode(message.data, type=_Notice)
        except msgspec.DecodeError:
            log.warning("an undecodable disconnect notice was ignored")
            return
        await handler(Disconnect(f"{notice.server.id}/{notice.client.id}", notice.reason))

    own = msgspec.structs.replace(settings, nats_credentials=settings.nats_system_credentials)
    async with connect(url, own, name="headrace-monitor-system", inbox_prefix="_INBOX") as bus:
        await bus.subscribe(_SUBJECT, cb=on_notice)
        await bus.flush()
        yield
