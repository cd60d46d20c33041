"""Workers take what they have room for, so that nobody waits while another is idle."""

import asyncio

from tests.deployment import deployment, sim
from tests.faults.reading import Reading


async def test_a_worker_takes_no_more_than_it_has_slots_for(broker_url: str, prefix: str) -> None:  # QUE-6
    readings = [Reading(f"r {number}", 60) for number in range(4)]
    async with deployment(broker_url, prefix) as running, asyncio.timeout(30):
        engines = [sim(tokens_per_second=20.0) for _ in range(2)]
        for engine in engines:
            await running.worker(engine, max_concurrency=2)
        async with asyncio.TaskGroup() as group:
            for reading in readings:
                group.create_task(reading.read(running.client))
            await asyncio.gather(*(reading.first_token.wait() for reading in readings))
            # Four slots, four jobs of three seconds: all have begun, so none has ended yet.
            assert [engine.num_running for engine in engines] == [2, 2]
