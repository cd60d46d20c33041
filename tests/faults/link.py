"""A way to the broker that can be frozen, broken and cut: what a part sees of a network or of its own death."""

import asyncio
import contextlib
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

__all__ = ["Link"]

_HOST = "127.0.0.1"
_CHUNK_BYTES = 65_536


class Link:
    """Forwards connections to a broker; parts connect to `url`.

    Frozen, nothing passes either way and both ends think that they are connected; what was sent arrives when it
    thaws. When it is cut, both ends see the connection end, as the broker does when the process is killed.
    """

    def __init__(self, broker_url: str) -> None:
        address = urlsplit(broker_url)
        assert address.hostname is not None
        assert address.port is not None
        self._broker = (address.hostname, address.port)
        self._port = 0
        self._server: asyncio.Server | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._clients: set[asyncio.StreamWriter] = set()
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, _HOST, 0)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.cut()
        while self._connections:
            await asyncio.wait(self._connections)

    @property
    def url(self) -> str:
        """Where a part connects."""
        return f"nats://{_HOST}:{self._port}"

    def freeze(self) -> None:
        """Let nothing pass."""
        self._open.clear()

    def thaw(self) -> None:
        """Let everything pass again, what was held up first."""
        self._open.set()

    def drop(self) -> None:
        """End the connections there are; new ones are taken."""
        for pump in self._pumps:
            pump.cancel()

    def cut(self) -> None:
        """End the connections and take no more."""
        if self._server is not None:
            self._server.close()
        self.drop()

    async def mend(self) -> None:
        """Take connections again after `cut`, at the same address."""
        self._server = await asyncio.start_server(self._accept, _HOST, self._port)

    def say(self, data: bytes) -> None:
        """Send something to each part in the broker's name."""
        for client in self._clients:
            client.write(data)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._forward(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._broker)
            writers.append(up_writer)
            if self._server is None or not self._server.is_serving():  # it was cut meanwhile
                return
            pumps = [asyncio.create_task(self._pump(*ends)) for ends in ((reader, up_writer), (up_reader, writer))]
            self._pumps.update(pumps)
            self._clients.add(writer)
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._pumps.difference_update(pumps)
            self._clients.discard(writer)
        except OSError:
            pass  # the broker is away: so is the way to it
        finally:
            for each in writers:
                each.transport.abort()
            for each in writers:
                with contextlib.suppress(OSError):
                    await each.wait_closed()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
