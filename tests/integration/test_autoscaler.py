"""The number of replicas follows the load: two monitors decide, and a stand-in for a host agent does what they say."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from headrace.bus.activity import last_worked_at
from headrace.bus.connection import Stored
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.jobqueue import JobQueue, QueueCounts
from headrace.bus.keyvalue import Bucket
from headrace.bus.provision import ensure_jobs_stream
from headrace.bus.scales import Scales
from headrace.discipline.replicas import wanted_replicas
from headrace.errors import BrokerUnavailableError
from headrace.schemas.config import ModelConfig
from headrace.schemas.config_text import encode_entry, key_of
from headrace.schemas.instances import GroupName, Scale
from headrace.schemas.replicas import Autoscale, ReplicaGroup
from headrace.schemas.workers import Heartbeat
from tests.deployment import MODEL, Deployment, Part, deployment, sim, until

NAME = GroupName(MODEL, "default")
GROUP = ReplicaGroup(
    engine="sim",
    replicas=0,
    autoscale=Autoscale(
        min_replicas=0, max_replicas=3, target_wait_s=0.5, idle_s=1.0, up_cooldown_s=0.5, down_cooldown_s=0.5
    ),
)
START_S = 0.3
NUM_REQUESTS = 40
MAX_WRITES = 16
"""Up in at most 3 steps, down in 3, and a few marks that it became idle or is not any more."""


class Host:
    """Keeps as many workers running as are wanted, as a host agent does; `most` were wanted at once."""

    def __init__(self, running: Deployment) -> None:
        self._running = running
        self._scales = Scales(running.bus)
        self.workers: list[Part] = []
        self.most = 0

    async def run(self) -> None:
        """Look for ever."""
        while True:
            known = (await self._scales.read()).get(NAME)
            wanted = wanted_replicas(GROUP, known.scale if known is not None else None)
            self.most = max(self.most, wanted)
            while len(self.workers) < wanted:
                engine = sim(start_s=START_S, tokens_per_second=50.0)
                self.workers.append(await self._running.worker(engine, max_concurrency=2, is_awaited=False))
            while len(self.workers) > wanted:
                await self.workers.pop().stop()
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def hosting(running: Deployment) -> AsyncIterator[Host]:
    host = Host(running)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(host.run())
        try:
            yield host
        finally:
            task.cancel()


async def configure(running: Deployment, *groups: ReplicaGroup, model: str = MODEL) -> None:
    bucket, key = Bucket(running.bus, running.bus.names.config_bucket), key_of("models", model)
    known = await bucket.get(key)
    revision = known.revision if known is not None else 0
    written = await bucket.put(key, encode_entry(ModelConfig(instances=groups)), expected_revision=revision)
    assert isinstance(written, Stored)


async def test_a_burst_from_zero_is_served_and_ends_at_zero(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, worker_ttl_s=1.0, heartbeat_s=0.2) as running:
        await ensure_jobs_stream(running.bus, MODEL)
        await running.monitor()
        await running.monitor()
        await configure(running, GROUP)
        async with hosting(running) as host, asyncio.timeout(60):
            async with asyncio.TaskGroup() as burst:
                for number in range(NUM_REQUESTS):
                    burst.create_task(running.client.complete(model=MODEL, prompt=f"r {number}", max_tokens=15))
            assert host.most > 1, "one replica would have left the last to wait far beyond the target"
            scales = Scales(running.bus)

            async def is_at_zero() -> bool:
                known = (await scales.read())[NAME]
                return known.scale is not None and known.scale.replicas == 0 and not host.workers

            await until(is_at_zero)
            last = (await scales.read())[NAME].scale
            assert last is not None
            assert last.seconds_per_job is not None
            assert last.slots == 2
            worked_at = await last_worked_at(running.bus, MODEL, "default")
            assert worked_at is not None
            assert last.decided_at - 20 < worked_at <= last.decided_at - 1.0
            assert await last_worked_at(running.bus, MODEL, "other") is None
            num_writes = await Bucket(running.bus, running.bus.names.instances_bucket).last_revision()
            assert num_writes <= MAX_WRITES
            assert (await running.client.complete(model=MODEL, prompt="one more", max_tokens=1)).usage is not None
        await configure(running)

        async def is_tidied() -> bool:
            return (await scales.read())[NAME].scale is None

        await until(is_tidied)


async def test_what_is_wrong_with_one_model_keeps_no_other_from_its_replicas(
    broker_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = JobQueue.counts

    async def counts_of_all_but_one(queue: JobQueue) -> QueueCounts:
        if queue.model == "mute":
            raise BrokerUnavailableError("nobody leads its stream")
        return await counts(queue)

    monkeypatch.setattr(JobQueue, "counts", counts_of_all_but_one)
    async with deployment(broker_url, prefix, worker_ttl_s=1.0, heartbeat_s=0.2) as running:
        await ensure_jobs_stream(running.bus, MODEL)
        await ensure_jobs_stream(running.bus, "forged")
        boundless = Heartbeat(
            worker="w", epoch="e", state="Ready", model="forged", running=9, seconds_per_job=1e308, waiting=10**18
        )
        await WorkersBucket(running.bus).put(boundless, expected_revision=0, ttl_s=600)
        for model in ("forged", "mute", MODEL):
            await configure(running, GROUP, model=model)
        monitor = await running.monitor()
        async with hosting(running), asyncio.timeout(60):
            assert (await running.client.complete(model=MODEL, prompt="r", max_tokens=1)).usage is not None
        await monitor.stop()


async def test_a_decision_on_a_model_whose_entry_cannot_be_read_stays(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, worker_ttl_s=1.0, heartbeat_s=0.2) as running, asyncio.timeout(60):
        scales, bucket = Scales(running.bus), Bucket(running.bus, running.bus.names.config_bucket)
        newer = b'{"instances": [{"engine": "sim", "of_a_later_version": 1}]}'
        assert isinstance(await bucket.put(key_of("models", "newer"), newer, expected_revision=0), Stored)
        for model in ("newer", "removed"):
            assert await scales.write(GroupName(model, "default"), Scale(replicas=3), expected_revision=0)
        await running.monitor()

        async def is_tidied() -> bool:
            return (await scales.read())[GroupName("removed", "default")].scale is None

        await until(is_tidied)
        assert (await scales.read())[GroupName("newer", "default")].scale == Scale(replicas=3)
