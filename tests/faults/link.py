"""A way to the broker that can be frozen, broken and cut: what a part sees of a network or of its own death."""

import asyncio
import contextlib
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

__all__ = ["Link"]

_CHUNK_BYTES = 65_536


class Link:
    """Forwards connections to a broker; parts connect to `url`.

    Frozen, nothing passes either way and both ends think that they are connected; what was sent arrives when it
    thaws. Cut is for good: the broker sees the connection end, as when the process is killed.
    """

    def __init__(self, broker_url: str) -> None:
        address = urlsplit(broker_url)
        assert address.hostname is not None
        assert address.port is not None
        self._host, self._port = address.hostname, address.port
        self._server: asyncio.Server | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._is_cut = False
        self._pumps: set[asyncio.Task[None]] = set()
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()
        while self._connections:
            await asyncio.wait(self._connections)

    @property
    def url(self) -> str:
        """Where a part connects."""
        assert self._server is not None
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

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
        self._is_cut = True
        self.drop()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._forward(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            if self._is_cut:
                return
            up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
            writers.append(up_writer)
            if self._is_cut:
                return
            pumps = [asyncio.create_task(self._pump(*ends)) for ends in ((reader, up_writer), (up_reader, writer))]
            self._pumps.update(pumps)
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._pumps.difference_update(pumps)
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
