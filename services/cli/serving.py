"""How one part runs as a process: logs, traces, a connection, a graceful end."""

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Literal

import click

from headrace import __version__, telemetry
from headrace.bus.connection import Bus, connect
from headrace.cli.options import located
from headrace.lifecycle import stop_event, wait_first
from headrace.logs import configure_logging
from headrace.schemas.subjects import Service, service_inbox
from headrace.settings import Settings

__all__ = ["LogFormat", "Part", "log_format_option", "run_part", "run_until"]

log = logging.getLogger(__name__)

_GC_YOUNG: Final = 20_000

LogFormat = Literal["text", "json"]

log_format_option: Final = click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True
)

Part = Callable[[Bus, asyncio.Event], Awaitable[None]]
"""What a part does with a connection until the event is set."""


def run_part(name: Service, settings: Settings, part: Part, *, log_format: LogFormat, worker: str = "") -> None:
    """Run one part until SIGTERM or SIGINT and return once it handed everything back.

    Raises HeadraceError where it cannot start or go on. A second signal ends the process at once.
    """
    configure_logging(name, settings.log_level, json=log_format == "json", worker=worker)
    service = f"headrace-{name}"
    with telemetry.configure(service, instance_id=worker, version=__version__):
        _tame_garbage_collection()
        asyncio.run(_serve(service, settings, part, inbox_prefix=service_inbox(name, worker)))


def _tame_garbage_collection() -> None:
    """Collect less often, and never what stays: modules and settings.

    A part makes many short-lived objects for each message; by default the collector would run every 700 of them, and
    look at everything there is again and again just when a burst comes.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_YOUNG, 20, 10)


async def run_until(body: Callable[[asyncio.Event, asyncio.Event], Awaitable[None]]) -> bool:
    """Run `body(stop, started)` until it returns; SIGTERM and SIGINT set `stop`, a second one ends the process.

    A body that is told to stop before it set `started` is cancelled: nobody can wait for a broker that never comes.
    Returns whether it was told to stop.
    """
    async with stop_event() as stop:
        started = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(_awaited(body(stop, started)))
            ended = asyncio.Event()
            running.add_done_callback(lambda _: ended.set())
            await wait_first(stop, ended)
            if stop.is_set() and not started.is_set():
                running.cancel()
        return stop.is_set()


async def _serve(service: str, settings: Settings, part: Part, *, inbox_prefix: str) -> None:
    async def body(stop: asyncio.Event, started: asyncio.Event) -> None:
        url, own = located(settings)
        async with connect(url, own, name=service, inbox_prefix=inbox_prefix) as bus:
            started.set()
            await part(bus, stop)

    await run_until(body)
    log.info("stopped")


async def _awaited(awaitable: Awaitable[None]) -> None:
    await awaitable
