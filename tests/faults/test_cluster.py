"""Three brokers: the leader of the streams is killed and comes back, then a node goes for maintenance."""

import asyncio
import time
from pathlib import Path

import pytest

from headrace.bus.connection import Bus
from headrace.bus.joblog import JobLog
from headrace.bus.jobqueue import JobQueue
from headrace.schemas.states import fold
from tests.deployment import MODEL, deployment, sim, until
from tests.faults.cluster import NODES, Cluster
from tests.faults.reading import Reading

NUM_JOBS = 12
NUM_TOKENS = 400


@pytest.mark.timeout(120)
async def test_all_jobs_end_once_through_a_leaders_death_and_a_lame_duck(
    prefix: str, tmp_path: Path
) -> None:  # NAT-11, for streams and consumers alike
    readings = [Reading(f"job {number}", NUM_TOKENS, deadline_s=100) for number in range(NUM_JOBS)]
    async with Cluster(tmp_path) as cluster, asyncio.timeout(100):
        # A death of the leader costs up to 8 s, whatever clients do: requests give up sooner and are repeated.
        settings = {"replicas": 3, "request_timeout_s": 1.0, "retry_for_s": 30.0}
        async with deployment(cluster.url_of("n1"), prefix, routers=2, **settings) as running:
            for _ in range(2):
                await running.monitor()
                await running.worker(sim(tokens_per_second=25.0), max_concurrency=NUM_JOBS // 3)
            names = running.bus.names
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(reading.read(running.client)) for reading in readings]
                await until(lambda: have_begun(readings, NUM_JOBS // 2))
                victim = await cluster.leader_of(running.bus, names.log_stream(0))
                killed_at = time.monotonic()
                await cluster.kill(victim)
                heir = await cluster.leader_of(running.bus, names.log_stream(0))
                assert heir != victim
                print(f"a new leader after {time.monotonic() - killed_at:.1f} s")
                await cluster.start(victim)
                print(f"{victim} is back, {sum(task.done() for task in tasks)} of {NUM_JOBS} jobs are done")
                duck = await cluster.leader_of(running.bus, names.jobs_stream(MODEL))
                cluster.lame_duck(duck)
                await until(lambda: leads_no_more(cluster, running.bus, duck), timeout_s=30)
                print(
                    f"{duck} gave up its leadership, {sum(task.done() for task in tasks)} of {NUM_JOBS} jobs are done"
                )
            for reading in readings:
                told = fold(await JobLog(running.bus).read("default", reading.job))
                assert told.is_whole
                assert told.state == "done"
                assert not told.faults
            await until(lambda: is_empty(running.bus), timeout_s=20)
    assert set(NODES) >= {victim, heir, duck}


async def have_begun(readings: list[Reading], number: int) -> bool:
    return sum(reading.first_token.is_set() for reading in readings) >= number


async def leads_no_more(cluster: Cluster, bus: Bus, node: str) -> bool:
    return await cluster.leader_of(bus, bus.names.jobs_stream(MODEL)) != node


async def is_empty(bus: Bus) -> bool:
    return not await JobQueue(bus, MODEL).counts()
