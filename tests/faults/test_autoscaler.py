"""A broker that comes back knows no worker for a moment: nobody takes that for idleness."""

import asyncio
import contextlib
import signal
from pathlib import Path

from headrace.bus.connection import Stored
from headrace.bus.keyvalue import Bucket
from headrace.bus.scales import Scales
from headrace.errors import BrokerError
from headrace.schemas.config import ModelConfig
from headrace.schemas.config_text import encode_entry, key_of
from headrace.schemas.instances import GroupName
from headrace.schemas.replicas import Autoscale, ReplicaGroup
from tests.deployment import MODEL, Deployment, deployment, sim, until
from tests.faults.broker import RestartableBroker
from tests.faults.reading import Reading

NAME = GroupName(MODEL, "default")
NUM_WORKERS = 2
TTL_S = 1.0
GROUP = ReplicaGroup(
    engine="sim",
    replicas=NUM_WORKERS,
    autoscale=Autoscale(min_replicas=0, max_replicas=NUM_WORKERS, idle_s=0.5, down_cooldown_s=0.5),
)


async def test_a_broker_that_was_away_takes_no_replica_with_it(prefix: str, tmp_path: Path) -> None:
    readings = [Reading(f"r {number}", 80) for number in range(NUM_WORKERS)]
    async with (
        RestartableBroker(tmp_path) as broker,
        deployment(broker.info.url, prefix, worker_ttl_s=TTL_S, heartbeat_s=0.2) as running,
        asyncio.timeout(60),
    ):
        for _ in range(NUM_WORKERS):
            await running.monitor()
            await running.worker(sim(tokens_per_second=10.0), max_concurrency=1)
        async with asyncio.TaskGroup() as group:
            for reading in readings:
                group.create_task(reading.read(running.client))
            await asyncio.gather(*(reading.first_token.wait() for reading in readings))
            key = key_of("models", MODEL)
            entry = encode_entry(ModelConfig(instances=(GROUP,)))
            written = await Bucket(running.bus, running.bus.names.config_bucket).put(key, entry, expected_revision=0)
            assert isinstance(written, Stored)
            await broker.end(signal.SIGKILL)
            await asyncio.sleep(TTL_S + 0.5)  # every heartbeat expires
            await broker.start()
            fewest = group.create_task(fewest_wanted(running, readings))
        assert fewest.result() == NUM_WORKERS
        await until(lambda: is_at(running, 0))


async def fewest_wanted(running: Deployment, readings: list[Reading]) -> int:
    """The fewest replicas that were decided while the jobs ran."""
    fewest = NUM_WORKERS
    while True:
        known = None
        with contextlib.suppress(BrokerError):
            known = (await Scales(running.bus).read()).get(NAME)
        if all(reading.done is not None for reading in readings):
            return fewest
        if known is not None and known.scale is not None:
            fewest = min(fewest, known.scale.replicas)
        await asyncio.sleep(0.05)


async def is_at(running: Deployment, replicas: int) -> bool:
    known = (await Scales(running.bus).read()).get(NAME)
    return known is not None and known.scale is not None and known.scale.replicas == replicas
