"""Workers that hang, stall, leave, come back, load or have a wrong clock: nobody else notices."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import patch

import pytest
import pytest_asyncio

from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.joblog import JobLog
from headrace.bus.jobqueue import Delivery, JobQueue
from headrace.lifecycle import ChildProcess
from headrace.schemas.subjects import QueueName
from headrace.worker.puller import Puller
from tests.deployment import MODEL, Deployment, deployment, sim, until
from tests.faults.reading import Reading
from tests.processes import part

TTL_S, BEAT_S = 2.0, 0.5
EVICTED_WITHIN_S = TTL_S + 2 * BEAT_S
LATE_S = 2.0
"""What a busy machine may add to the promised time."""


@pytest_asyncio.fixture
async def running(broker_url: str, prefix: str) -> AsyncIterator[Deployment]:
    """Router and monitor without the system account's notices."""
    async with deployment(broker_url, prefix) as running:
        await running.monitor()
        yield running


def worker(
    running: Deployment, state_dir: Path, name: str, *, tokens_per_second: float, clock_offset_s: float = 0
) -> ChildProcess:
    program = None
    if clock_offset_s:
        program = (
            "import time; real = time.time; "
            f"time.time = lambda: real() + {clock_offset_s}; "
            "from headrace.cli import main; main()"
        )
    return part(
        "serve", "worker", "--engine", "sim", "--model", MODEL, "--worker-id", name,
        "-o", f"tokens_per_second={tokens_per_second}",
        url=running.url, prefix=running.settings.prefix, state_dir=state_dir, program=program,
    )  # fmt: skip


async def is_evicted(running: Deployment, name: str) -> bool:
    seen = await WorkersBucket(running.bus).get(name)
    return seen is not None and seen.beat is not None and seen.beat.is_tombstone


async def evicted_after(running: Deployment, name: str) -> float:
    """Seconds until a worker is declared dead."""
    began = time.monotonic()
    await until(lambda: is_evicted(running, name), timeout_s=EVICTED_WITHIN_S + LATE_S)
    waited_s = time.monotonic() - began
    print(f"{name} evicted after {waited_s:.2f} s")
    return waited_s


async def num_deliveries(running: Deployment) -> int:
    progress = await JobQueue(running.bus, MODEL).progress(QueueName())
    assert progress is not None
    return progress.consumer_sequence


async def test_a_stopped_worker_in_mid_job_is_evicted_and_there_is_one_answer(
    running: Deployment, tmp_path: Path
) -> None:  # WRK-1
    reading = Reading("not streamed", 60, stream=False)
    async with (
        asyncio.timeout(50),
        worker(running, tmp_path, "old", tokens_per_second=30) as old,
        asyncio.TaskGroup() as group,
    ):
        await until(lambda: running.is_ready("old"), timeout_s=30)
        group.create_task(reading.read(running.client))
        await reading.started.wait()
        old.send_signal(signal.SIGSTOP)
        new = await running.worker(sim(), worker="new")
        await evicted_after(running, "old")
        await until(lambda: is_done(reading))
        old.send_signal(signal.SIGCONT)
        await until(lambda: running.is_ready("old"), timeout_s=15)  # it has learnt that it was declared dead
        assert sum(event.is_terminal for event in await JobLog(running.bus).read("default", reading.job)) == 1
        await new.stop()
        again = Reading("again", 3)
        await again.read(running.client)
        assert again.workers == ["old"]
        old.send_signal(signal.SIGTERM)
        assert await old.wait() == 0
    assert reading.workers == ["old", "new"]


@pytest.mark.parametrize("are_renewals_lost", [False, True])
async def test_a_job_longer_than_the_ack_wait(broker_url: str, prefix: str, are_renewals_lost: bool) -> None:  # WRK-3
    async def lost(self: JobQueue, delivery: Delivery) -> None:
        pass

    reading = Reading("long", 40)
    no_renewals = patch.object(JobQueue, "in_progress", lost) if are_renewals_lost else contextlib.nullcontext()
    with no_renewals:
        async with deployment(broker_url, prefix, ack_wait_s=1.0) as running, asyncio.timeout(30):
            for _ in range(2):
                await running.worker(sim(tokens_per_second=10.0))
            await reading.read(running.client)
            assert len(reading.attempts) == 1  # its owner lives: whoever gets the message again leaves it alone
            number = await num_deliveries(running)
            assert number > 1 if are_renewals_lost else number == 1
            await until(lambda: is_empty(running))


async def test_a_worker_whose_pull_loop_dies_ends_with_its_error(running: Deployment) -> None:  # WRK-4
    part = await running.worker(sim(), worker="broken", may_fail=True)
    reading = Reading("goes on", 5)

    async def breaks(self: Puller) -> None:
        raise RuntimeError("a defect of the pull loop")

    with patch.object(Puller, "_round", breaks):
        error = await part.failure()
    assert "a defect of the pull loop" in str(leaves(error))
    await until(lambda: has_left(running, "broken"), timeout_s=2 * BEAT_S + LATE_S)
    await running.worker(sim(), worker="sound")
    await reading.read(running.client)
    assert reading.workers == ["sound"]


@pytest.mark.parametrize("offset_s", [-600, 600])
async def test_a_worker_with_a_wrong_clock(running: Deployment, tmp_path: Path, offset_s: int) -> None:  # WRK-9
    first, second = Reading("first", 60), Reading("second", 60)
    async with (
        asyncio.timeout(55),
        worker(running, tmp_path, "wrong", tokens_per_second=30, clock_offset_s=offset_s) as wrong,
        asyncio.TaskGroup() as group,
    ):
        await until(lambda: running.is_ready("wrong"), timeout_s=30)
        await first.read(running.client)  # two seconds, with deadlines and heartbeats by whose clock?
        assert first.workers == ["wrong"]
        assert not await is_evicted(running, "wrong")
        group.create_task(second.read(running.client))
        await second.first_token.wait()
        await running.worker(sim(tokens_per_second=30.0), worker="right")
        wrong.send_signal(signal.SIGKILL)
        await evicted_after(running, "wrong")
    assert second.workers == ["wrong", "right"]


async def test_a_worker_that_loads_its_model_gets_nothing_until_it_is_ready(running: Deployment) -> None:  # WRK-11
    reading = Reading("waits", 3)
    await running.worker(sim(start_s=2.0), worker="loading", is_awaited=False)
    await until(lambda: is_starting(running, "loading"))
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(reading.read(running.client))
        while not await running.is_ready("loading"):
            assert await JobQueue(running.bus, MODEL).progress(QueueName()) is None
            await asyncio.sleep(0.05)
    assert reading.workers == ["loading"]


async def test_a_worker_that_leaves_and_rejoins_with_a_job_in_flight(
    running: Deployment, tmp_path: Path
) -> None:  # WRK-12
    readings = [Reading(f"stream {number}", 60) for number in range(3)]
    loads: list[tuple[int, int]] = []

    async def watch() -> None:
        while True:
            for seen in (await WorkersBucket(running.bus).list()).values():
                if seen.beat is not None:
                    loads.append((seen.beat.running, seen.beat.kv_reserved_tokens))
            await asyncio.sleep(0.05)

    async with asyncio.timeout(55), asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        async with worker(running, tmp_path, "same", tokens_per_second=30) as first:
            await until(lambda: running.is_ready("same"), timeout_s=30)
            tasks = [group.create_task(reading.read(running.client)) for reading in readings]
            await asyncio.gather(*(reading.first_token.wait() for reading in readings))
            first.send_signal(signal.SIGKILL)
            await first.wait()
        async with worker(running, tmp_path, "same", tokens_per_second=100) as second:
            await asyncio.wait(tasks)
            await until(lambda: is_idle(running, "same"))
            watching.cancel()
            second.send_signal(signal.SIGTERM)
            assert await second.wait() == 0
    assert min(load for pair in loads for load in pair) >= 0
    assert {tuple(reading.workers) for reading in readings} == {("same", "same")}


async def is_done(reading: Reading) -> bool:
    return reading.done is not None


async def is_empty(running: Deployment) -> bool:
    return not await JobQueue(running.bus, MODEL).counts()


async def has_left(running: Deployment, name: str) -> bool:
    seen = await WorkersBucket(running.bus).get(name)
    return seen is not None and seen.has_left


async def is_starting(running: Deployment, name: str) -> bool:
    seen = await WorkersBucket(running.bus).get(name)
    return seen is not None and seen.beat is not None and seen.beat.state == "Starting"


async def is_idle(running: Deployment, name: str) -> bool:
    seen = await WorkersBucket(running.bus).get(name)
    assert seen is not None
    return seen.beat is not None and (seen.beat.running, seen.beat.kv_reserved_tokens, seen.beat.held) == (0, 0, ())


def leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves(each)]
    return [error]
