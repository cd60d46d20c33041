"""A part that is told to stop ends in time, whatever the broker does and however far the part has come."""

import asyncio
import contextlib
import time
from collections.abc import Callable

import pytest

from headrace.bus.connection import Bus
from headrace.errors import BrokerError
from headrace.monitor import run_monitor
from headrace.router import run_router
from headrace.worker.worker import WorkerOptions, run_worker
from tests.deployment import MODEL, Deployment, deployment, sim, until
from tests.faults.link import Link

REQUEST_S = 0.5
SOON_S = 8 * REQUEST_S
"""A handful of calls that go unanswered, one after another, and what a busy machine adds."""

KINDS = ("router", "worker", "monitor")


async def run(kind: str, bus: Bus, stop: asyncio.Event) -> None:
    if kind == "router":
        await run_router(bus, stop=stop)
    elif kind == "monitor":
        await run_monitor(bus, stop=stop)
    else:
        await run_worker(bus, sim(), WorkerOptions(worker="w", model=MODEL), stop=stop)


async def is_up(running: Deployment, kind: str) -> bool:
    if kind == "worker":
        with contextlib.suppress(BrokerError):  # there is no bucket before it made one
            return await running.is_ready("w")
        return False
    subject = running.bus.names.monitor_state() if kind == "monitor" else running.bus.names.status("default", "x")
    return await running._answers(subject)


@pytest.mark.parametrize("fault", ["mute", "gone"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_part_ends_though_the_broker_is_away(broker_url: str, prefix: str, kind: str, fault: str) -> None:
    async with (
        Link(broker_url) as link,
        deployment(broker_url, prefix, routers=0, request_timeout_s=REQUEST_S) as running,
    ):
        ending = running._start(lambda bus, stop: run(kind, bus, stop), kind, url=link.url)
        await until(lambda: is_up(running, kind))
        fall = link.freeze if fault == "mute" else link.cut
        fall()
        await stopped(ending.stop, link)


@pytest.mark.parametrize("fault", ["mute", "gone"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_part_that_still_starts_ends_though_the_broker_is_away(
    broker_url: str, prefix: str, kind: str, fault: str
) -> None:
    has_begun = asyncio.Event()

    async def begin(bus: Bus, stop: asyncio.Event) -> None:
        fall = link.freeze if fault == "mute" else link.cut
        fall()
        has_begun.set()
        await run(kind, bus, stop)

    async with (
        Link(broker_url) as link,
        deployment(broker_url, prefix, routers=0, request_timeout_s=REQUEST_S) as running,
    ):
        ending = running._start(begin, kind, url=link.url)
        await has_begun.wait()
        await asyncio.sleep(0.1)  # somewhere in its start
        await stopped(ending.stop, link)


async def test_a_worker_that_cannot_register_ends_when_told(broker_url: str, prefix: str) -> None:
    """Its heartbeat has a thread and a connection of its own, which begin after everything else was there."""
    has_begun = asyncio.Event()

    async def begin(bus: Bus, stop: asyncio.Event) -> None:
        connected = Bus(bus.nc, bus.settings, link.url)
        has_begun.set()
        await run("worker", connected, stop)

    async with (
        Link(broker_url) as link,
        deployment(broker_url, prefix, request_timeout_s=REQUEST_S) as running,
    ):
        link.cut()
        ending = running._start(begin, "worker")
        await has_begun.wait()
        await asyncio.sleep(0.3)
        await stopped(ending.stop, link)


async def stopped(stop: Callable[[], object], link: Link) -> None:
    began = time.monotonic()
    try:
        async with asyncio.timeout(SOON_S):
            await stop()  # type: ignore[misc]
    finally:
        link.thaw()
    print(f"ended after {time.monotonic() - began:.2f} s")
