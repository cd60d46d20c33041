"""A worker that holds nothing has one pull parked, so that its next job needs no wake; any other has none."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from headrace.bus.connection import Message
from headrace.bus.jobqueue import Delivery, JobQueue
from headrace.bus.parking import ParkedPull
from headrace.schemas.subjects import QueueName
from headrace.worker.heart import Heart
from headrace.worker.worker import Worker
from tests.deployment import MODEL, Deployment, deployment, sim, until
from tests.faults.reading import Reading
from tests.integration.test_parked_pull import num_parked

NORMAL = QueueName()
SHORT, LONG = 3, 200
LONG_BEGINNING = "it was the best of times " * 60


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Delivery]:
    """What workers took, in order."""
    deliveries: list[Delivery] = []
    take = Worker._take

    def noting(self: Worker, delivery: Delivery) -> None:
        deliveries.append(delivery)
        take(self, delivery)

    monkeypatch.setattr(Worker, "_take", noting)
    return deliveries


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[QueueName]:
    """The queues that were asked for a job, in order."""
    asked: list[QueueName] = []
    fetch_many = JobQueue.fetch_many

    async def noting(self: JobQueue, queue: QueueName, limit: int) -> list[Delivery]:
        asked.append(queue)
        return await fetch_many(self, queue, limit)

    monkeypatch.setattr(JobQueue, "fetch_many", noting)
    return asked


@contextlib.asynccontextmanager
async def running_with(
    url: str, prefix: str, *names: str, max_concurrency: int | None = None
) -> AsyncIterator[Deployment]:
    async with deployment(url, prefix) as running, asyncio.timeout(60):
        for name in names:
            await running.worker(sim(), worker=name, max_concurrency=max_concurrency)
        yield running


async def ask(running: Deployment, *, lane: str = "normal", prompt: str = "x") -> str:
    """One short request; who ran it."""
    reading = Reading(prompt, SHORT, priority=lane)
    await reading.read(running.client)
    return reading.workers[-1]


async def are_parked(running: Deployment, number: int, of: QueueName = NORMAL) -> None:
    queue = JobQueue(running.bus, MODEL)

    async def told() -> bool:
        return await num_parked(running.bus, queue, of) == number

    await until(told, timeout_s=5)


async def test_the_next_job_of_an_idle_worker_comes_by_itself(
    broker_url: str, prefix: str, taken: list[Delivery], fetched: list[QueueName]
) -> None:
    async with running_with(broker_url, prefix, "w") as running:
        await ask(running)
        for _ in range(3):
            await are_parked(running, 1)
            await ask(running)
        num_fetches = len(fetched)
        await are_parked(running, 1)
        await ask(running)
        await are_parked(running, 1)
    assert [delivery.is_parked for delivery in taken] == [False, True, True, True, True]
    assert len(fetched) - num_fetches <= 2, "its wake asks for nothing"


async def test_a_job_in_another_queue_is_fetched_as_ever(broker_url: str, prefix: str, taken: list[Delivery]) -> None:
    async with running_with(broker_url, prefix, "w", max_concurrency=1) as running:
        await ask(running)
        for lane in ("high", "low", "high"):
            await until(lambda: is_parked_somewhere(running, taken))
            await ask(running, lane=lane)
        await are_parked(running, 1, QueueName(lane="high"))  # where it was last given one
        await are_parked(running, 0)
    assert [delivery.is_parked for delivery in taken] == [False] * 4


async def is_parked_somewhere(running: Deployment, taken: list[Delivery]) -> bool:
    return await num_parked(running.bus, JobQueue(running.bus, MODEL), taken[-1].queue) == 1


@pytest.mark.parametrize("max_concurrency", [1, 4])
async def test_a_worker_that_holds_something_has_none(broker_url: str, prefix: str, max_concurrency: int) -> None:
    async with running_with(broker_url, prefix, "w", max_concurrency=max_concurrency) as running:
        await ask(running)
        await are_parked(running, 1)
        async with asyncio.TaskGroup() as group:
            long = Reading("long", 80)
            group.create_task(long.read(running.client))
            await long.first_token.wait()
            assert await num_parked(running.bus, JobQueue(running.bus, MODEL)) == 0
        await are_parked(running, 1)


async def test_two_jobs_of_two_queues_run_on_two_workers_of_one_slot(broker_url: str, prefix: str) -> None:
    """One may come by itself as another is fetched: no worker keeps both."""
    async with running_with(broker_url, prefix, "a", "b", max_concurrency=1) as running:
        for _ in range(6):
            both = [Reading("x", 80, priority=lane) for lane in ("normal", "high")]
            await asyncio.gather(*(reading.read(running.client) for reading in both))
            assert {reading.workers[-1] for reading in both} == {"a", "b"}


async def test_a_lost_park_costs_a_few_milliseconds(
    broker_url: str, prefix: str, taken: list[Delivery], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader's change may forget what is parked without a word; the wake is not ignored for it."""
    receive = ParkedPull._on_message
    pulls: set[ParkedPull] = set()
    park = ParkedPull.park

    async def noting(self: ParkedPull, queue: QueueName) -> None:
        pulls.add(self)
        await park(self, queue)

    async def is_believed() -> bool:
        return any(pull.queue is not None for pull in pulls)

    async def only_jobs(self: ParkedPull, message: Message) -> None:
        if "Status" not in (message.headers or {}):
            await receive(self, message)

    monkeypatch.setattr("headrace.bus.parking._PARK_ONE", b'{"batch":1,"no_wait":true}')
    monkeypatch.setattr(ParkedPull, "_on_message", only_jobs)
    monkeypatch.setattr(ParkedPull, "park", noting)
    monkeypatch.setattr("headrace.worker.puller._RESYNC_S", 0.9)
    async with running_with(broker_url, prefix, "w") as running:
        await ask(running)
        for _ in range(5):
            await until(is_believed)
            await running.bus.flush()
            await asyncio.sleep(0.05)  # the broker has forgotten it by then
            async with asyncio.timeout(0.5):
                await ask(running)
    assert not any(delivery.is_parked for delivery in taken)


async def test_where_jobs_are_named_for_another_nothing_is_parked(
    broker_url: str, prefix: str, taken: list[Delivery]
) -> None:
    async with running_with(broker_url, prefix, "a", "b", "c", max_concurrency=1) as running:
        # At once, so that each worker has one of the beginnings: one that had all would be named by all, and may park.
        first = [Reading(f"{number} {LONG_BEGINNING}", LONG) for number in range(3)]
        await asyncio.gather(*(reading.read(running.client) for reading in first))
        assert {reading.workers[-1] for reading in first} == {"a", "b", "c"}
        await asyncio.sleep(1.0)  # a router lists the workers twice a second
        for turn in range(6):
            for number in range(3):
                await ask(running, prompt=f"{number} {LONG_BEGINNING} {turn}")
        taken.clear()
        for number in range(3):
            await ask(running, prompt=f"{number} {LONG_BEGINNING} again")
    assert not any(delivery.is_parked for delivery in taken)


async def test_a_job_that_comes_as_its_worker_leaves_runs_on_another_at_once(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, ack_wait_s=10) as running, asyncio.timeout(60):
        await running.worker(sim(), worker="stays", max_concurrency=8)
        for turn in range(8):
            leaving = await running.worker(sim(), worker=f"leaves{turn}", max_concurrency=8)
            await asyncio.gather(*(ask(running) for _ in range(4)))
            async with asyncio.timeout(4), asyncio.TaskGroup() as group:
                readings = [Reading(f"r {number}", SHORT) for number in range(4)]
                for reading in readings:
                    group.create_task(reading.read(running.client))
                await asyncio.sleep(0.0007 * turn)
                await leaving.stop()


@pytest.mark.parametrize("cause", ["stale heartbeat", "dead engine"])
async def test_a_worker_that_may_not_fetch_has_none_either(
    broker_url: str, prefix: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = sim(start_s=1.0)
    async with deployment(broker_url, prefix) as running, asyncio.timeout(30):
        await running.worker(engine, worker="w")
        await ask(running)
        await are_parked(running, 1)
        if cause == "dead engine":
            engine.die()
        else:
            monkeypatch.setattr(Heart, "is_fresh", False)
        await are_parked(running, 0)
        monkeypatch.undo()
        await are_parked(running, 1)
