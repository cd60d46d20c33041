"""Jobs whose time is up end by themselves: queued without a worker, queued behind others, running."""

import pytest

from headrace.bus.jobqueue import JobQueue
from headrace.bus.provision import ensure_jobs_stream
from headrace.client import Delta
from headrace.errors import BrokerError, JobExpiredError, JobFailedError
from headrace.monitor import run_monitor
from tests.deployment import MODEL, Deployment, deployment, sim, until

PROMPT = "go on for ever"


async def monitored(running: Deployment) -> None:
    running._start(lambda bus, stop: run_monitor(bus, stop=stop), "monitor")

    async def answers() -> bool:
        try:
            return bool((await running.bus.request(running.bus.names.monitor_state())).data)
        except BrokerError:
            return False

    await until(answers)


async def test_a_job_no_worker_takes_expires_at_its_queue_timeout(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running:
        await ensure_jobs_stream(running.bus, MODEL)
        await monitored(running)
        with pytest.raises(JobExpiredError) as caught:
            await running.client.complete(model=MODEL, prompt=PROMPT, queue_timeout_s=1)
        assert caught.value.code == "queue_timeout"

        async def is_removed() -> bool:
            return await JobQueue(running.bus, MODEL).counts() == {}

        await until(is_removed)


async def test_jobs_queued_before_the_monitor_started_expire_too(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running:
        await ensure_jobs_stream(running.bus, MODEL)
        stream = running.client.stream(model=MODEL, prompt=PROMPT, queue_timeout_s=1)
        events = aiter(stream)
        await anext(events)
        await monitored(running)
        with pytest.raises(JobExpiredError):
            await anext(events)


async def test_a_running_job_ends_at_its_deadline_and_its_engine_is_aborted(broker_url: str, prefix: str) -> None:
    engine = sim(tokens_per_second=20.0)
    async with deployment(broker_url, prefix) as running:
        await running.worker(engine)
        seen = []

        async def read() -> None:
            stream = running.client.stream(model=MODEL, prompt=PROMPT, max_tokens=900, ignore_eos=True, deadline_s=1)
            async for event in stream:
                seen.append(event)

        with pytest.raises(JobFailedError) as caught:
            await read()
        assert caught.value.code == "deadline_exceeded"
        assert any(isinstance(event, Delta) for event in seen)
        assert engine.num_running == 0
        assert engine.num_aborted == 1
