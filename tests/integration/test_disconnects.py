"""What a monitor makes of the broker's notices: a closed or reset connection of a worker that is not back at once."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace.bus.connection import Bus, Stored
from headrace.bus.disconnects import Disconnect
from headrace.bus.heartbeats import WorkersBucket, WorkersView
from headrace.monitor.guard import Guard
from headrace.schemas.workers import Heartbeat

WITHIN_S = 30.0


async def beat(bus: Bus, worker: str, connection: str, *, revision: int = 0) -> int:
    sent = Heartbeat(worker=worker, epoch="e", state="Ready", model="m", connection=connection, interval_s=60)
    stored = await WorkersBucket(bus).put(sent, expected_revision=revision, ttl_s=60)
    assert isinstance(stored, Stored)
    return stored.sequence


@pytest.fixture
async def view(bus: Bus) -> AsyncIterator[WorkersView]:
    view = WorkersView(bus)
    async with view.running():
        yield view


@pytest.fixture
async def guard(bus: Bus, view: WorkersView) -> AsyncIterator[Guard]:
    guard = Guard(bus, view)
    running = asyncio.create_task(guard.run())
    await asyncio.sleep(0)  # it begins
    yield guard
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def evicted(view: WorkersView, worker: str) -> None:
    async with asyncio.timeout(WITHIN_S):
        while worker in view.beats or worker not in view.workers:
            view.changed.clear()
            await view.refresh(worker)
            if worker in view.beats:
                await view.changed.wait()


@pytest.mark.parametrize("reason", ["Client Closed", "Read Error", "Write Error"])
async def test_a_worker_whose_connection_ended_is_evicted(
    bus: Bus, view: WorkersView, guard: Guard, reason: str
) -> None:
    await beat(bus, "w", "server/1")
    await view.refresh("w")
    await guard.on_disconnect(Disconnect("server/1", reason))
    await evicted(view, "w")


async def test_a_worker_that_is_back_after_a_reset_lives(bus: Bus, view: WorkersView, guard: Guard) -> None:
    revision = await beat(bus, "back", "server/1")
    await beat(bus, "gone", "server/2")
    await beat(bus, "elsewhere", "server/3")
    for worker in ("back", "gone", "elsewhere"):
        await view.refresh(worker)
    await guard.on_disconnect(Disconnect("server/3", "Stale Connection"))
    await guard.on_disconnect(Disconnect("server/1", "Read Error"))
    await beat(bus, "back", "server/4", revision=revision)
    await guard.on_disconnect(Disconnect("server/2", "Read Error"))
    await evicted(view, "gone")  # its time was up after that of the one that is back
    assert {"back", "elsewhere"} <= view.beats.keys()
