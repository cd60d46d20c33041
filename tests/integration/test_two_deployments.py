"""Two deployments with different prefixes on one broker."""

import asyncio

import pytest

from headrace.bus.overview import overview
from headrace.cli.http import answers, free_port
from headrace.errors import RequestError
from tests.deployment import deployment, sim, until
from tests.faults.reading import Reading
from tests.scraping import scrape


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


async def test_neither_sees_the_others_workers_jobs_or_figures(broker_url: str, prefix: str) -> None:  # OPS-4
    ports = [free_port("127.0.0.1", 0) or 0 for _ in range(2)]
    async with (
        deployment(broker_url, f"{prefix}-a", monitor_port=ports[0]) as one,
        deployment(broker_url, f"{prefix}-b", monitor_port=ports[1]) as other,
    ):
        for running, model in ((one, "model-a"), (other, "model-b")):
            await running.monitor()
            await running.worker(sim(), worker=model, model=model)
            await running.client.complete(model=model, prompt="x", max_tokens=1)
        with pytest.raises(RequestError) as refused:
            await one.client.complete(model="model-b", prompt="x", max_tokens=1)
        assert refused.value.code == "model_not_found"
        for running, port, model in ((one, ports[0], "model-a"), (other, ports[1], "model-b")):
            assert [worker.id for worker in (await overview(running.bus)).workers] == [model]
            await until(lambda port=port: answers("127.0.0.1", port))
            assert (await scrape(port)).values("worker") == {model}
