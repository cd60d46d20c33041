"""Workers that hang, stall, leave, come back, load or have a wrong clock: nobody else notices."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import pytest_asyncio

from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.joblog import JobLog
from headrace.bus.jobqueue import Delivery, JobQueue
from headrace.lifecycle import ChildProcess
from headrace.schemas.chunks import EngineChunk
from headrace.schemas.subjects import QueueName
from headrace.worker.engines.base import PROBE_PREFIX
from headrace.worker.engines.sim import SimEngine
from tests.deployment import MODEL, Deployment, deployment, sim, until
from tests.faults.reading import Reading
from tests.integration.test_parked_pull import num_parked
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
    running: Deployment,
    state_dir: Path,
    name: str,
    *,
    tokens_per_second: float,
    clock_offset_s: float = 0,
    program: str | None = None,
    **variables: str,
) -> ChildProcess:
    if clock_offset_s:
        program = (
            "import time; real = time.time; "
            f"time.time = lambda: real() + {clock_offset_s}; "
            "from headrace.cli import main; main()"
        )
    return part(
        "serve", "worker", "--engine", "sim", "--model", MODEL, "--worker-id", name,
        "-o", f"tokens_per_second={tokens_per_second}",
        url=running.url, prefix=running.settings.prefix, state_dir=state_dir, program=program, **variables,
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
        asyncio.timeout(120),
        worker(running, tmp_path, "old", tokens_per_second=30) as old,
        asyncio.TaskGroup() as group,
    ):
        await until(lambda: running.is_ready("old"))
        group.create_task(reading.read(running.client))
        await reading.started.wait()
        old.send_signal(signal.SIGSTOP)
        new = await running.worker(sim(), worker="new")
        assert await evicted_after(running, "old") > 2 * BEAT_S  # not for a beat or two that are late
        await until(lambda: is_done(reading))
        old.send_signal(signal.SIGCONT)
        await until(lambda: running.is_ready("old"))  # it has learnt that it was declared dead
        assert sum(event.is_terminal for event in await JobLog(running.bus).read("default", reading.job)) == 1
        await new.stop()
        again = Reading("again", 3)
        await again.read(running.client)
        assert again.workers == ["old"]
        old.send_signal(signal.SIGTERM)
        assert await old.wait() == 0
    assert reading.workers == ["old", "new"]


async def test_a_job_that_an_idle_stopped_worker_is_given_runs_on_another_in_time(
    running: Deployment, tmp_path: Path
) -> None:
    """Its parked pull takes one for as long as it waits at the broker, and no other after that."""
    first, second, third = (Reading(name, 3) for name in ("first", "second", "third"))
    async with asyncio.timeout(120), worker(running, tmp_path, "old", tokens_per_second=300) as old:
        await until(lambda: running.is_ready("old"))
        await first.read(running.client)
        await until(lambda: is_parked(running))
        old.send_signal(signal.SIGSTOP)
        new = await running.worker(sim(), worker="new")
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(second.read(running.client))
            await second_accepted(running)
            group.create_task(third.read(running.client))
            await until(lambda: is_done(third), timeout_s=1)  # only one went astray
        waited_s = time.monotonic() - began
        print(f"done {waited_s:.2f} s after it was sent")
        assert waited_s < EVICTED_WITHIN_S + LATE_S
        old.send_signal(signal.SIGCONT)
        await until(lambda: is_empty(running))
        await new.stop()
        again = Reading("again", 3)
        await until(lambda: running.is_ready("old"))
        await again.read(running.client)
        assert again.workers == ["old"]
        old.send_signal(signal.SIGTERM)
        assert await old.wait() == 0
    assert second.workers == third.workers == ["new"]


async def is_parked(running: Deployment) -> bool:
    return await num_parked(running.bus, JobQueue(running.bus, MODEL)) == 1


async def second_accepted(running: Deployment) -> None:
    """Wait until the broker has given the second job away."""

    async def are_two() -> bool:
        return await num_deliveries(running) == 2

    await until(are_two)


async def test_a_stopped_worker_that_returns_while_its_replacement_runs(running: Deployment, tmp_path: Path) -> None:
    """What the old attempt still writes is refused: late appends, and late acks, change nothing."""
    reading = Reading("streamed", 90)
    replacement, go_on = sim(tokens_per_second=300.0), asyncio.Event()
    hold_back(replacement, go_on)
    async with (
        asyncio.timeout(120),
        worker(running, tmp_path, "old", tokens_per_second=30) as old,
        asyncio.TaskGroup() as group,
    ):
        await until(lambda: running.is_ready("old"))
        epoch = await epoch_of(running, "old")
        group.create_task(reading.read(running.client))
        await reading.first_token.wait()
        old.send_signal(signal.SIGSTOP)
        new = await running.worker(replacement, worker="new")
        await until(lambda: has_started_twice(reading), timeout_s=EVICTED_WITHIN_S + LATE_S)
        old.send_signal(signal.SIGCONT)
        await until(lambda: is_registered_anew(running, "old", epoch))
        assert reading.done is None  # the replacement still runs it, and its message is where it was
        assert sum((await JobQueue(running.bus, MODEL).counts()).values()) == 1
        go_on.set()
        await until(lambda: is_done(reading))
        events = await JobLog(running.bus).read("default", reading.job)
        kinds = [event.kind for event in events if event.kind not in ("accepted", "delta")]  # it may start unaccepted
        assert kinds == ["started", "requeued", "started", "done"]
        assert replacement.num_started == 1
        await until(lambda: is_empty(running))
        await new.stop()
        again = Reading("again", 3)
        await again.read(running.client)
        assert again.workers == ["old"]
        old.send_signal(signal.SIGTERM)
        assert await old.wait() == 0
    assert reading.workers == ["old", "new"]


def hold_back(engine: SimEngine, go_on: asyncio.Event) -> None:
    """Let it make one token of each request, and the others once `go_on` is set."""
    generate = engine.generate

    async def holding(*args: Any, **kwargs: Any) -> AsyncGenerator[EngineChunk, None]:
        async with contextlib.aclosing(generate(*args, **kwargs)) as chunks:
            async for chunk in chunks:
                yield chunk
                if not kwargs["request_id"].startswith(PROBE_PREFIX):
                    await go_on.wait()

    engine.generate = holding  # type: ignore[method-assign]


async def test_beats_of_200_ms_notice_a_stopped_worker_within_800_ms(
    broker_url: str, prefix: str, tmp_path: Path
) -> None:
    """Three and a half beats. A busy machine may be late now and then, but not each time."""
    waits_s: list[float] = []
    async with (
        deployment(broker_url, prefix, heartbeat_s=0.2) as running,
        asyncio.timeout(120),
        worker(running, tmp_path, "old", tokens_per_second=30, HEADRACE_HEARTBEAT_S="0.2") as old,
    ):
        await running.monitor()
        await asyncio.sleep(TTL_S)  # for so long it excuses everybody after its own start
        epoch = ""
        while not waits_s or (min(waits_s) >= 0.8 and len(waits_s) < 8):
            await until(lambda before=epoch: is_registered_anew(running, "old", before), timeout_s=30)
            epoch = await epoch_of(running, "old")
            old.send_signal(signal.SIGSTOP)
            waits_s.append(await evicted_after(running, "old"))
            old.send_signal(signal.SIGCONT)
    assert 0.4 < min(waits_s) < 0.8  # not for a beat or two that are late


@pytest.mark.parametrize("are_renewals_lost", [False, True])
async def test_a_job_longer_than_the_ack_wait(broker_url: str, prefix: str, are_renewals_lost: bool) -> None:  # WRK-3
    async def lost(self: JobQueue, delivery: Delivery) -> None:
        pass

    reading = Reading("long", 40)
    no_renewals = patch.object(JobQueue, "in_progress", lost) if are_renewals_lost else contextlib.nullcontext()
    with no_renewals:
        async with deployment(broker_url, prefix, ack_wait_s=1.0) as running, asyncio.timeout(120):
            for _ in range(2):
                await running.worker(sim(tokens_per_second=10.0))
            await reading.read(running.client)
            assert len(reading.attempts) == 1  # its owner lives: whoever gets the message again leaves it alone
            number = await num_deliveries(running)
            assert number > 1 if are_renewals_lost else number == 1
            await until(lambda: is_empty(running))


BREAKING = """
from headrace.worker.puller import Puller
async def breaks(self):
    if self._bus.nc.stats["in_msgs"] > 20:
        raise RuntimeError("a defect of the pull loop")
    await whole(self)
whole, Puller._round = Puller._round, breaks
from headrace.cli import main
main()
"""


async def test_a_worker_whose_pull_loop_dies_ends_with_its_error(running: Deployment, tmp_path: Path) -> None:  # WRK-4
    reading = Reading("goes on", 5)
    async with (
        asyncio.timeout(120),
        worker(running, tmp_path, "broken", tokens_per_second=30, program=BREAKING) as broken,
    ):
        assert await broken.wait() not in (0, -signal.SIGKILL)
        ended_at = time.monotonic()
        assert "a defect of the pull loop" in broken.tail()
        assert "Traceback" in broken.tail()
        await until(lambda: has_left(running, "broken"), timeout_s=2 * BEAT_S + LATE_S)
        print(f"gone {time.monotonic() - ended_at:.2f} s after its end")
    await running.worker(sim(), worker="sound")
    await reading.read(running.client)
    assert reading.workers == ["sound"]


BLOCKING = """
import time
from headrace.worker.engines.sim import SimEngine
def blocks(self, *args, **kwargs):
    time.sleep(3.0)
    return whole(self, *args, **kwargs)
whole, SimEngine.generate = SimEngine.generate, blocks
from headrace.cli import main
main()
"""


async def test_work_that_blocks_a_workers_loop_for_three_times_to_live(
    broker_url: str, prefix: str, tmp_path: Path
) -> None:  # WRK-8; nothing that can block runs on the loop that beats
    reading = Reading("huge", 5)
    async with (
        deployment(broker_url, prefix, worker_ttl_s=1.0, heartbeat_s=0.2) as running,
        asyncio.timeout(120),
        worker(
            running, tmp_path, "busy", tokens_per_second=30, program=BLOCKING,
            HEADRACE_WORKER_TTL_S="1", HEADRACE_HEARTBEAT_S="0.2",
        ),
    ):  # fmt: skip
        await running.monitor()
        await until(lambda: running.is_ready("busy"))
        epoch = await epoch_of(running, "busy")
        await reading.read(running.client)
        assert reading.attempts[1][1] - time.monotonic() < -3.0  # it was blocked indeed
        assert reading.workers == ["busy"]
        assert await num_deliveries(running) == 1
        assert await epoch_of(running, "busy") == epoch


@pytest.mark.parametrize("offset_s", [-600, 600])
async def test_a_worker_with_a_wrong_clock(running: Deployment, tmp_path: Path, offset_s: int) -> None:  # WRK-9
    first, second = Reading("first", 60), Reading("second", 60)
    async with (
        asyncio.timeout(120),
        worker(running, tmp_path, "wrong", tokens_per_second=30, clock_offset_s=offset_s) as wrong,
        asyncio.TaskGroup() as group,
    ):
        await until(lambda: running.is_ready("wrong"))
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
    engine = sim(start_s=2.0, fail_probes=1)  # it comes up, and its first token comes at the second try
    began = time.monotonic()
    await running.worker(engine, worker="loading", is_awaited=False)
    await until(lambda: is_starting(running, "loading"))
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        group.create_task(reading.read(running.client))
        while True:
            progress = await JobQueue(running.bus, MODEL).progress(QueueName())
            if time.monotonic() - began >= 2.0:
                break
            assert progress is None
            await asyncio.sleep(0.05)
    assert reading.workers == ["loading"]
    assert engine.num_probes == 2
    assert reading.attempts[1][1] - began >= 2.0 + 0.5  # a probe that failed is made again after half a second


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

    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        async with worker(running, tmp_path, "same", tokens_per_second=30) as first:
            await until(lambda: running.is_ready("same"))
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


async def has_started_twice(reading: Reading) -> bool:
    return len(reading.attempts) == 2


async def epoch_of(running: Deployment, name: str) -> str:
    seen = await WorkersBucket(running.bus).get(name)
    assert seen is not None
    assert seen.beat is not None
    return seen.beat.epoch


async def is_registered_anew(running: Deployment, name: str, epoch: str) -> bool:
    """Ready, and not as it was."""
    return await running.is_ready(name) and await epoch_of(running, name) != epoch


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
