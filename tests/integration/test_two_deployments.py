"""Two deployments with different prefixes on one broker."""

import asyncio

from tests.deployment import deployment, sim
from tests.faults.reading import Reading


async def test_readers_of_one_job_id_see_their_own_deployments_job(broker_url: str, prefix: str) -> None:  # OPS-4
    """The inbox of a job's events has no prefix in its name."""
    one_reading, other_reading = Reading("one", 30, job_id="same"), Reading("other", 30, job_id="same")
    async with deployment(broker_url, f"{prefix}-a") as one, deployment(broker_url, f"{prefix}-b") as other:
        await one.worker(sim(tokens_per_second=40.0), worker="one")
        await other.worker(sim(tokens_per_second=46.0), worker="other")
        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            group.create_task(one_reading.read(one.client))
            group.create_task(other_reading.read(other.client))
    assert (one_reading.workers, other_reading.workers) == (["one"], ["other"])
