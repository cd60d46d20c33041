"""The monitor's HTTP port: `/metrics` for Prometheus and `/healthz`. A monitor without it guards all the same."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from typing import Final

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from headrace.bus.connection import Bus
from headrace.errors import BrokerError
from headrace.listening import host_of, is_loopback, is_loopback_name, listen, url_of
from headrace.monitor.exposition import Exposition

__all__ = ["answering_http"]

log = logging.getLogger(__name__)

_AGAIN_S: Final = 5.0
_BACKLOG: Final = 64
_MAX_CONNECTIONS: Final = 256


@contextlib.asynccontextmanager
async def answering_http(bus: Bus, exposition: Exposition) -> AsyncIterator[None]:
    """Answer on `HEADRACE_HTTP_HOST` and `HEADRACE_MONITOR_PORT` inside this context; port 0 is any free one.

    Where another has the port it is waited for: of two monitors on a machine the second answers once the first is gone.
    """
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(_serve(bus, exposition), name="monitor http")
        try:
            yield
        finally:
            serving.cancel()


async def _serve(bus: Bus, exposition: Exposition) -> None:
    with await _bound(bus.settings.http_host, bus.settings.monitor_port) as bound:
        app = _app(bus, exposition, is_local=is_loopback(bound))
        runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        server = runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(lambda: _Door(server), sock=bound, backlog=_BACKLOG)
        try:
            log.info("metrics at %s/metrics", url_of(bound))
            await loop.create_future()
        finally:
            listening.close()
            await runner.cleanup()


class _Door(asyncio.Protocol):
    """Gives a new connection to the server. Beyond the limit it takes the place of the oldest.

    Without a limit, clients that connect and say nothing would have every open file of this process, and one that lost
    its broker could not connect again.
    """

    def __init__(self, server: web.Server) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """From here on the server has it."""
        for oldest in self._server.connections[: 1 - _MAX_CONNECTIONS]:
            if oldest.transport is not None:
                oldest.transport.abort()
        handler = self._server()
        transport.set_protocol(handler)
        handler.connection_made(transport)


async def _bound(host: str, port: int) -> socket.socket:
    is_told = False
    while True:
        try:
            return listen(host, port, backlog=_BACKLOG)
        except OSError as error:
            if not is_told:
                log.warning(
                    "no metrics: cannot listen on %s port %d: %s; trying again (HEADRACE_MONITOR_PORT names another)",
                    host, port, error.strerror,
                )  # fmt: skip
                is_told = True
        await asyncio.sleep(_AGAIN_S)


def _app(bus: Bus, exposition: Exposition, *, is_local: bool) -> web.Application:
    async def metrics(request: web.Request) -> web.Response:
        host = request.headers.get("Host")
        if is_local and host is not None and not is_loopback_name(host_of(host) or ""):
            raise web.HTTPForbidden(text="ask for it by localhost or its address\n")
        try:
            text = await exposition.text()
        except BrokerError as error:
            log.info("no metrics: %s", error)
            raise web.HTTPServiceUnavailable(text="the broker does not answer\n") from None
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def health(request: web.Request) -> web.Response:
        is_well = bus.is_connected
        return web.json_response(
            {"status": "ok" if is_well else "the broker is not reached"}, status=200 if is_well else 503
        )

    app = web.Application(client_max_size=1024)
    app.add_routes([web.get("/metrics", metrics), web.get("/healthz", health)])
    return app
