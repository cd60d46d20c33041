"""SIGTERM: a worker starts nothing more, finishes what fits in its grace period and hands the rest back."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest_asyncio

from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.joblog import JobLog
from headrace.lifecycle import ChildProcess
from headrace.schemas.events import Event
from tests.deployment import MODEL, Deployment, deployment, until
from tests.faults.reading import Reading
from tests.processes import part

Start = Callable[..., ChildProcess]


@pytest_asyncio.fixture
async def running(broker_url: str, prefix: str) -> AsyncIterator[Deployment]:
    """Router and monitor; workers come as processes."""
    async with deployment(broker_url, prefix) as running:
        await running.monitor()
        yield running


def worker(
    running: Deployment, state_dir: Path, name: str, *, grace_s: float, tokens_per_second: float
) -> ChildProcess:
    return part(
        "serve", "worker", "--engine", "sim", "--model", MODEL, "--worker-id", name, "--max-concurrency", "2",
        "-o", f"tokens_per_second={tokens_per_second}",
        url=running.url, prefix=running.settings.prefix, state_dir=state_dir, HEADRACE_GRACE_S=str(grace_s),
    )  # fmt: skip


async def ready(running: Deployment, name: str) -> None:
    await until(lambda: running.is_ready(name))


async def test_it_starts_nothing_more_and_finishes_what_fits(running: Deployment, tmp_path: Path) -> None:
    first = [Reading(f"first {number}", 60) for number in range(2)]
    later = [Reading(f"later {number}", 3) for number in range(5)]
    async with worker(running, tmp_path, "old", grace_s=20, tokens_per_second=30) as old:
        await ready(running, "old")
        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            for reading in first:
                group.create_task(reading.read(running.client))
            await asyncio.gather(*(reading.first_token.wait() for reading in first))
            for reading in later:
                group.create_task(reading.read(running.client))
            await until(lambda: are_known(later))
            old.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(old.wait(), 25) == 0
            assert all(reading.done is not None for reading in first)
            for reading in later:  # nothing was started after the signal, nor before: there was no room
                assert [event.kind for event in await log_of(running, reading)] == ["accepted"]
            seen = await WorkersBucket(running.bus).get("old")
            assert seen is not None
            assert seen.has_left
            async with worker(running, tmp_path, "new", grace_s=5, tokens_per_second=0):
                await asyncio.gather(*(reading.started.wait() for reading in later))
                await until(lambda: are_done(later))
    assert {tuple(reading.workers) for reading in first} == {("old",)}
    assert {tuple(reading.workers) for reading in later} == {("new",)}


async def test_what_exceeds_the_grace_period_goes_on_elsewhere_at_once(running: Deployment, tmp_path: Path) -> None:
    readings = [Reading(f"long {number}", 120) for number in range(2)]
    async with (
        worker(running, tmp_path, "old", grace_s=0.5, tokens_per_second=30) as old,
        asyncio.timeout(120),
        asyncio.TaskGroup() as group,
    ):
        await ready(running, "old")
        for reading in readings:
            group.create_task(reading.read(running.client))
        await asyncio.gather(*(reading.first_token.wait() for reading in readings))
        async with worker(running, tmp_path, "new", grace_s=5, tokens_per_second=200):
            await ready(running, "new")
            signalled_at = time.monotonic()
            old.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(old.wait(), 15) == 0
            await until(lambda: are_done(readings))
    waits_s = [reading.attempts[2][1] - signalled_at for reading in readings]
    print("signal to started elsewhere, a grace of 0.5 s included: " + ", ".join(f"{wait:.2f} s" for wait in waits_s))
    assert max(waits_s) < running.settings.ack_wait_s / 2
    for reading in readings:
        assert reading.workers == ["old", "new"]
        assert reading.reasons == ["drain"]
        assert not [event.lost for event in await log_of(running, reading) if event.lost]  # nobody's fault


async def log_of(running: Deployment, reading: Reading) -> list[Event]:
    return await JobLog(running.bus).read("default", reading.job)


async def are_known(readings: list[Reading]) -> bool:
    return all(reading.job for reading in readings)


async def are_done(readings: list[Reading]) -> bool:
    return all(reading.done is not None for reading in readings)
