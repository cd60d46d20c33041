"""How one part runs as a process: logs, traces, a connection, a graceful end."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Literal

from headrace import __version__, telemetry
from headrace.bus.connection import Bus, connect
from headrace.cli.options import broker_url
from headrace.lifecycle import stop_event, wait_first
from headrace.logs import configure_logging
from headrace.settings import Settings

__all__ = ["LogFormat", "Part", "run_part"]

log = logging.getLogger(__name__)

LogFormat = Literal["text", "json"]

Part = Callable[[Bus, asyncio.Event], Awaitable[None]]
"""What a part does with a connection until the event is set."""


def run_part(name: str, settings: Settings, part: Part, *, log_format: LogFormat, worker: str = "") -> None:
    """Run one part until SIGTERM or SIGINT and return once it handed everything back.

    Raises HeadraceError where it cannot start or go on. A second signal ends the process at once.
    """
    configure_logging(name, settings.log_level, json=log_format == "json", worker=worker)
    service = f"headrace-{name}"
    with telemetry.configure(service, instance_id=worker, version=__version__):
        asyncio.run(_serve(service, settings, part))


async def _serve(service: str, settings: Settings, part: Part) -> None:
    async with stop_event() as stop:
        is_connected = asyncio.Event()

        async def body() -> None:
            async with connect(broker_url(settings), settings, name=service) as bus:
                is_connected.set()
                await part(bus, stop)

        async with asyncio.TaskGroup() as group:
            running = group.create_task(body(), name=service)
            ended = asyncio.Event()
            running.add_done_callback(lambda _: ended.set())
            await wait_first(stop, ended)
            if stop.is_set() and not is_connected.is_set():
                running.cancel()  # there is nothing to hand back yet
    log.info("stopped")
