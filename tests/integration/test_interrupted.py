"""What lost its worker goes on before anything that waits, in another queue of its lane too."""

import asyncio

from headrace.bus.heartbeats import WorkersBucket
from headrace.client import Requeued
from tests.deployment import MODEL, deployment, sim, until
from tests.integration.test_queue_discipline import Jobs, configure, tenants


async def test_an_interrupted_request_goes_on_before_other_queues_have_their_turn(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, worker_ttl_s=1.0, heartbeat_s=0.2) as running:
        await configure(running, "[tenants.a]\n[tenants.b]\n")
        async with (
            tenants(running) as (a, b),
            asyncio.timeout(120),
            asyncio.TaskGroup() as group,
        ):
            await running.monitor()
            dying = await running.worker(sim(tokens_per_second=20.0), worker="dying", max_concurrency=1)
            requeued = asyncio.Event()

            async def read() -> None:
                async with b.stream(model=MODEL, prompt="x", max_tokens=60, ignore_eos=True) as stream:
                    async for event in stream:
                        if isinstance(event, Requeued):
                            requeued.set()
                        order.append(type(event).__name__) if type(event).__name__ == "Started" else None

            order: list[str] = []
            interrupted = group.create_task(read())

            async def has_started() -> bool:
                return order == ["Started"]

            await until(has_started)
            survivor = sim(tokens_per_second=20.0)
            await running.worker(survivor, worker="survivor", max_concurrency=1)
            of_a, of_b = Jobs(a, group), Jobs(b, group)
            of_a.started = of_b.started = order
            await of_b.send("busy", max_tokens=100)  # 5 s, the survivor is full all the while, and b had its turn
            await of_b.until_started("busy")
            for number in range(5):
                await of_a.send(f"a{number}", max_tokens=2)
                await of_b.send(f"b{number}", max_tokens=2)
            await dying.kill()
            await requeued.wait()
            assert order == ["Started", "busy"]
            seen = await WorkersBucket(running.bus).get("survivor")
            assert seen is not None
            assert seen.beat is not None
            assert seen.beat.running == 1, "it is full, so no wake reached it"
            await interrupted
            assert order[2] == "Started", "by turns it would be the first of a"
