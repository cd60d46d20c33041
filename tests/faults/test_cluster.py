"""Three brokers: the one that leads is killed just after acks and comes back, then a node goes for maintenance."""

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.bus.connection import Bus
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.joblog import JobLog
from headrace.bus.jobqueue import JobQueue
from headrace.errors import BrokerError, BrokerUnavailableError
from headrace.schemas.events import Event
from headrace.schemas.states import fold
from headrace.schemas.subjects import QueueName
from tests.deployment import MODEL, Deployment, deployment, sim, until
from tests.faults.cluster import NODES, Cluster
from tests.faults.reading import Reading

NUM_RUNNING, NUM_QUEUED = 20, 100
NUM_SHORT, NUM_FIRST, NUM_LONG = 5, 50, 250
TOKENS_PER_S = 20.0


@pytest.mark.timeout(120)
async def test_all_jobs_end_once_through_a_leaders_death_and_a_lame_duck(prefix: str, tmp_path: Path) -> None:  # NAT-11
    # Two of those that run are short: their acks come just before the leader of their consumer is killed.
    first = [Reading(f"first {number}", NUM_SHORT, deadline_s=100) for number in range(2)]
    long = [Reading(f"long {number}", NUM_LONG, deadline_s=100) for number in range(NUM_RUNNING - 2)]
    queued = [
        Reading(f"queued {number}", NUM_SHORT, deadline_s=100, queue_timeout_s=90) for number in range(NUM_QUEUED)
    ]
    readings = [*first, *long, *queued]
    engines = [sim(tokens_per_second=TOKENS_PER_S) for _ in range(2)]
    async with Cluster(tmp_path) as cluster, asyncio.timeout(100):
        # A death of the leader costs up to 8 s, whatever clients do: requests give up sooner and are repeated.
        settings = {"replicas": 3, "request_timeout_s": 1.0, "retry_for_s": 30.0}
        async with deployment(cluster.url_of("n1"), prefix, routers=2, **settings) as running:
            for number, engine in enumerate(engines):
                await running.monitor()
                await running.worker(engine, worker=f"w{number}", max_concurrency=NUM_RUNNING // 2)
            epochs = await alive(running)
            async with asyncio.TaskGroup() as group:
                tasks = {reading: group.create_task(reading.read(running.client)) for reading in readings[:NUM_RUNNING]}
                await until(lambda: have_begun(readings[:NUM_RUNNING]), timeout_s=30)
                for reading in queued:
                    tasks[reading] = group.create_task(reading.read(running.client))
                await until(lambda: are_known(queued), timeout_s=30)
                await until(lambda: are_done(first), timeout_s=30)
                victim = await consumer_leader(running.bus)
                num_done = sum(reading.done is not None for reading in readings)
                killed_at = time.monotonic()
                await cluster.kill(victim)
                heir = await until_led(running.bus, victim)
                print(f"{victim} killed with {num_done} done; {heir} leads after {time.monotonic() - killed_at:.1f} s")
                await cluster.start(victim)
                print(f"{victim} is back, {sum(task.done() for task in tasks.values())} jobs are done")
                log_stream = running.bus.names.log_stream(0)
                duck = await cluster.leader_of(running.bus, log_stream)
                cluster.lame_duck(duck)
                await until(lambda: leads_no_more(cluster, running.bus, log_stream, duck), timeout_s=30)
                print(f"{duck} leads no more, {sum(task.done() for task in tasks.values())} jobs are done")
            assert set(NODES) >= {victim, heir, duck}
            assert await alive(running) == epochs  # nobody was evicted, nobody had to register anew
            for reading in readings:
                events = await log_of(running.bus, reading.job)
                told = fold(events)
                assert told.is_whole
                assert told.state == "done"
                assert not told.faults
                assert sum(event.is_terminal for event in events) == 1
            await until(lambda: is_empty(running.bus), timeout_s=20)
    num_again = sum(len(reading.attempts) - 1 for reading in readings)
    print(f"{num_again} attempts beyond the first of each")
    assert sum(engine.num_started for engine in engines) == len(readings) + num_again


async def log_of(bus: Bus, job: str) -> list[Event]:
    """The log of a job, also where the node asked is about to leave and does not answer."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(BrokerUnavailableError):
                return await JobLog(bus).read("default", job)


async def consumer_leader(bus: Bus) -> str:
    """The node that leads the consumer of the queue."""
    name = f"{bus.names.jobs_stream(MODEL)}.{QueueName().consumer}"
    info: dict[str, Any] = json.loads(await bus.api(f"CONSUMER.INFO.{name}"))
    return str(info["cluster"].get("leader", ""))


async def until_led(bus: Bus, before: str) -> str:
    """Wait until another node leads the consumer."""
    found: list[str] = []

    async def is_led() -> bool:
        with contextlib.suppress(BrokerError, KeyError):
            found[:] = [await consumer_leader(bus)]
        return bool(found) and found[0] not in ("", before)

    await until(is_led, timeout_s=30)
    return found[0]


async def alive(running: Deployment) -> dict[str, str]:
    """Epoch of each live worker."""
    listed = await WorkersBucket(running.bus).list()
    return {
        worker: seen.beat.epoch
        for worker, seen in listed.items()
        if seen.beat is not None and not seen.beat.is_tombstone
    }


async def have_begun(readings: list[Reading]) -> bool:
    return all(reading.first_token.is_set() for reading in readings)


async def are_known(readings: list[Reading]) -> bool:
    return all(reading.job for reading in readings)


async def are_done(readings: list[Reading]) -> bool:
    return all(reading.done is not None for reading in readings)


async def leads_no_more(cluster: Cluster, bus: Bus, stream: str, node: str) -> bool:
    return await cluster.leader_of(bus, stream) != node


async def is_empty(bus: Bus) -> bool:
    return not await JobQueue(bus, MODEL).counts()
