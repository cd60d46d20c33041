"""The HTTP server of a process: the port it listens on, and its graceful end."""

import asyncio
import contextlib
import math
import resource
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from headrace.errors import HeadraceError
from headrace.gateway.protocol import BoundedProtocol
from headrace.gateway.watching import OpenRequests
from headrace.lifecycle import wait_first
from headrace.listening import listen

__all__ = ["allow_many_connections", "listening", "serve"]

_KEEP_ALIVE_S: Final = 75
_BACKLOG: Final = 1024
_SEND_BUFFER_BYTES: Final = 131_072
"""What the kernel keeps for a client that reads slowly; without it, megabytes."""

_LAST_WORDS_S: Final = 3.0
"""What streams get beyond the grace period to write their last frames."""


def allow_many_connections() -> None:
    """Raise the process's soft limit of open files to the hard one: the usual 1,024 is below what one gateway holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems name a hard limit that they do not grant
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket; port 0 is any free one. Raises HeadraceError where the address cannot be had."""
    try:
        bound = listen(host, port, backlog=_BACKLOG, send_buffer_bytes=_SEND_BUFFER_BYTES)
    except OSError as error:
        raise HeadraceError(
            f"cannot listen on {host} port {port}: {error.strerror}. Choose another with HEADRACE_HTTP_HOST and "
            "HEADRACE_HTTP_PORT (0 is any free port)"
        ) from None
    with bound:
        yield bound


async def serve(
    app: ASGIApp,
    bound: socket.socket,
    *,
    stop: asyncio.Event,
    closed: asyncio.Event,
    open_requests: OpenRequests,
    grace_s: float,
) -> None:
    """Serve until `stop` or `closed`; then nothing new is taken, and what is open has `grace_s` to come to its end.

    What is open then is told that the process stops. Returns when all are answered, or have had time for it.
    """
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(grace_s + _LAST_WORDS_S),
    )
    server = _Server(config)
    ended = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve(sockets=[bound]), name="http server")
        serving.add_done_callback(lambda _: ended.set())
        await wait_first(stop, closed, ended)
        server.should_exit = True
        if not closed.is_set():
            await wait_first(ended, timeout_s=grace_s)
        open_requests.end_all()


class _Server(uvicorn.Server):
    """Leaves signals to the process, which has one stop event for all it does."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
