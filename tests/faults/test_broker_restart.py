"""The broker goes away and comes back: everything goes on by itself, and nobody is blamed for it."""

import asyncio
import signal
from pathlib import Path

import pytest

from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.joblog import JobLog
from headrace.bus.jobqueue import JobQueue
from headrace.schemas.states import fold
from tests.deployment import MODEL, Deployment, deployment, sim, until
from tests.faults.broker import RestartableBroker
from tests.faults.reading import Reading

NUM_RUNNING, NUM_QUEUED = 20, 100
OUTAGE_S = 5.0
TTL_S = 1.5
"""The outage lasts more than three of it: every key has expired when the broker is back."""


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
async def test_all_jobs_end_once_and_nobody_is_evicted(
    prefix: str, tmp_path: Path, end: signal.Signals
) -> None:  # WRK-10
    long = [Reading(f"long {number}", 150) for number in range(NUM_RUNNING + 2)]
    short = [Reading(f"short {number}", 5) for number in range(NUM_QUEUED - 2)]
    engines = [sim(tokens_per_second=20.0) for _ in range(2)]
    async with (
        RestartableBroker(tmp_path) as broker,
        deployment(broker.info.url, prefix, routers=2, worker_ttl_s=TTL_S) as running,
        asyncio.timeout(120),
    ):
        for engine in engines:
            await running.monitor()
            await running.worker(engine, max_concurrency=NUM_RUNNING // 2)
        epochs = await alive(running)
        async with asyncio.TaskGroup() as group:
            for reading in long:
                group.create_task(reading.read(running.client))
            await until(lambda: are_running(long, NUM_RUNNING))
            for reading in short:
                group.create_task(reading.read(running.client))
            await until(lambda: are_in_queue(running, NUM_RUNNING + NUM_QUEUED))
            await broker.end(end)
            await asyncio.sleep(OUTAGE_S)
            await broker.start()
        assert await alive(running) == epochs  # nobody was evicted, nobody had to register anew
        for reading in (*long, *short):
            events = await JobLog(running.bus).read("default", reading.job)
            told = fold(events)
            assert told.is_whole
            assert told.state == "done"
            assert not told.faults
            assert sum(event.is_terminal for event in events) == 1
        num_again = sum(len(reading.attempts) - 1 for reading in (*long, *short))
        print(f"{num_again} attempts beyond the first of each job")
        assert sum(engine.num_started for engine in engines) == len(long) + len(short) + num_again
        await until(lambda: are_in_queue(running, 0))


async def alive(running: Deployment) -> dict[str, str]:
    """Epoch of each live worker."""
    listed = await WorkersBucket(running.bus).list()
    return {
        worker: seen.beat.epoch
        for worker, seen in listed.items()
        if seen.beat is not None and not seen.beat.is_tombstone
    }


async def are_running(readings: list[Reading], number: int) -> bool:
    return sum(reading.first_token.is_set() for reading in readings) >= number


async def are_in_queue(running: Deployment, number: int) -> bool:
    """Whether that many requests are queued or running."""
    return sum((await JobQueue(running.bus, MODEL).counts()).values()) == number
