"""The heartbeat goes on while the worker's event loop is busy, and stops when it is stuck."""

import asyncio
import time

from headrace.bus.heartbeats import WorkersBucket
from headrace.monitor import run_monitor
from headrace.schemas.workers import SeenBeat
from tests.deployment import MODEL, deployment, sim, until


async def test_a_worker_whose_loop_is_blocked_for_longer_than_its_ttl_is_not_evicted(
    broker_url: str, prefix: str
) -> None:  # WRK-8; the loop is that of all parts here, but for the heart's thread
    async with deployment(broker_url, prefix, worker_ttl_s=1.0, heartbeat_s=0.2) as running:
        running._start(lambda bus, stop: run_monitor(bus, stop=stop), "monitor")
        await running.worker(sim(), worker="busy")
        before = await seen(running.bus)
        time.sleep(3.0)  # noqa: ASYNC251  # what is tested is exactly that
        after = await seen(running.bus)
        assert after.revision >= before.revision + 5
        assert after.beat is not None
        assert before.beat is not None
        assert after.beat.epoch == before.beat.epoch
        assert not after.beat.is_tombstone
        assert (await running.client.complete(model=MODEL, prompt="still there?", max_tokens=2)).text


async def test_a_worker_whose_loop_is_stuck_stops_beating(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, worker_ttl_s=1.0, heartbeat_s=0.2, stall_s=1.0) as running:
        await running.worker(sim(), worker="busy")
        time.sleep(2.0)  # noqa: ASYNC251
        first = (await seen(running.bus)).revision
        assert (await seen(running.bus)).revision == first

        async def beats_again() -> bool:
            return (await seen(running.bus)).revision > first

        await until(beats_again, timeout_s=5)


async def seen(bus: object) -> SeenBeat:
    found = await WorkersBucket(bus).get("busy")  # type: ignore[arg-type]
    assert found is not None
    await asyncio.sleep(0)
    return found
