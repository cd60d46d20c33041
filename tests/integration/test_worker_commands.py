"""`headrace drain` and `headrace evict` against a real deployment."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from headrace.bus.connection import Stored
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.provision import ensure_jobs_stream, ensure_provisioned
from headrace.client import Delta, Done, Started
from headrace.schemas.workers import Heartbeat
from tests.commands import Headrace
from tests.deployment import MODEL, Deployment, deployment, sim, until


@pytest_asyncio.fixture
async def running(broker_url: str, prefix: str) -> AsyncIterator[Deployment]:
    async with deployment(broker_url, prefix, grace_s=5.0) as started:
        yield started


@pytest.fixture
def headrace(broker_url: str, prefix: str) -> Headrace:
    return Headrace(broker_url, prefix)


class Reading:
    """A stream that is read to its end; every token once and in order."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.workers: list[str] = []
        self.num_tokens = 0

    async def read(self, running: Deployment, job: str, *, max_tokens: int) -> None:
        async for event in running.client.stream(
            model=MODEL, prompt="go on", max_tokens=max_tokens, ignore_eos=True, job_id=job
        ):
            if isinstance(event, Started):
                self.workers.append(event.worker)
            elif isinstance(event, Delta):
                assert event.offset == self.num_tokens
                self.num_tokens += event.num_tokens
                self.began.set()
            elif isinstance(event, Done):
                assert event.usage is not None
                assert event.usage.completion_tokens == self.num_tokens == max_tokens


async def beat_of(running: Deployment, worker: str) -> Heartbeat | None:
    seen = await WorkersBucket(running.bus).get(worker)
    return seen.beat if seen is not None else None


async def lists_a_request(running: Deployment, worker: str) -> None:
    async def is_listed() -> bool:
        beat = await beat_of(running, worker)
        return beat is not None and len(beat.held) == 1

    await until(is_listed)


async def test_a_drained_worker_finishes_what_it_has_and_leaves(running: Deployment, headrace: Headrace) -> None:
    await running.worker(sim(tokens_per_second=50.0))
    reading = Reading()
    async with asyncio.TaskGroup() as group:
        group.create_task(reading.read(running, "j", max_tokens=40))
        await reading.began.wait()
        result = await headrace.run("drain", "w1")
    assert "worker w1 has drained and left" in result.stdout
    assert "w1 is Draining, 1 requests left" in result.stderr
    assert reading.workers == ["w1"]
    assert "no worker w1 lives; there are: none" in (await headrace.run("drain", "w1", code=1)).stderr


async def test_draining_as_json(running: Deployment, headrace: Headrace) -> None:
    await running.worker()
    drained = await headrace.json("drain", "w1")
    assert drained["worker"] == "w1"
    assert drained["epoch"]
    assert drained["wall_s"] > 0


async def test_drain_says_what_is_left_when_the_time_is_over(running: Deployment, headrace: Headrace) -> None:
    worker = await running.worker(sim(tokens_per_second=20.0))
    reading = Reading()
    async with asyncio.TaskGroup() as group:
        group.create_task(reading.read(running, "j", max_tokens=30))
        await reading.began.wait()
        result = await headrace.run("drain", "w1", "--timeout", "0.3", code=1)
        assert "has not left within 0.3 s: it is Draining and holds 1 requests" in result.stderr
    await worker.stop()


async def test_an_evicted_worker_hands_over_and_registers_anew(running: Deployment, headrace: Headrace) -> None:
    await running.worker(sim(tokens_per_second=50.0))
    reading = Reading()
    async with asyncio.TaskGroup() as group:
        group.create_task(reading.read(running, "j", max_tokens=60))
        await reading.began.wait()
        await running.worker(sim(tokens_per_second=50.0))
        await lists_a_request(running, "w1")
        before = await beat_of(running, "w1")
        assert before is not None
        told = await headrace.json("evict", "w1", "--reason", "test")
    assert (told["worker"], told["epoch"], told["num_handed_back"], told["is_back"]) == ("w1", before.epoch, 1, True)
    assert [(each["job"], each["attempt"]) for each in told["held"]] == [("j", 1)]
    assert reading.workers[0] == "w1"
    assert len(reading.workers) == 2
    after = await beat_of(running, "w1")
    assert after is not None
    assert after.epoch != before.epoch


async def test_a_silent_worker_is_evicted_once(running: Deployment, headrace: Headrace) -> None:
    await ensure_provisioned(running.bus)
    await ensure_jobs_stream(running.bus, MODEL)
    beat = Heartbeat(worker="w1", epoch="e1", state="Ready", model=MODEL, interval_s=0.1)
    assert isinstance(await WorkersBucket(running.bus).put(beat, expected_revision=0, ttl_s=60), Stored)
    result = await headrace.run("evict", "w1")
    assert "worker w1 is evicted; it has not come back" in result.stdout
    assert "It held no request." in result.stdout
    assert "no worker w1 lives" in (await headrace.run("evict", "w1", code=1)).stderr


async def test_what_cannot_be_a_worker_is_wrong_usage(running: Deployment, headrace: Headrace) -> None:
    for command in ("drain", "evict"):
        assert "WORKER is 'no spaces'" in (await headrace.run(command, "no spaces", code=2)).stderr
    assert "printable" in (await headrace.run("evict", "w1", "--reason", "a\nb", code=2)).stderr
