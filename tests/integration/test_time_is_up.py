"""Jobs whose time is up end by themselves: queued without a worker, queued behind others, running."""

import pytest

from headrace.bus.connection import Stored, StoreResult
from headrace.bus.handover import publish_to_fallback
from headrace.bus.joblog import JobLog
from headrace.bus.jobqueue import JobQueue
from headrace.bus.provision import ensure_jobs_stream
from headrace.client import Accepted, Delta, Done
from headrace.errors import BrokerError, JobExpiredError, JobFailedError
from headrace.monitor import run_monitor
from headrace.schemas import events
from headrace.schemas.events import Event
from headrace.schemas.jobs import decode_job
from headrace.schemas.subjects import QueueName
from tests.deployment import MODEL, Deployment, deployment, sim, until

PROMPT = "go on for ever"
OTHER = "other-model"


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


@pytest.mark.parametrize("has_worker", [False, True])
async def test_a_job_that_does_not_start_in_time_goes_to_its_fallback(
    broker_url: str, prefix: str, has_worker: bool
) -> None:
    """By a monitor, where its model has no worker; by the worker that holds it, where that has no room."""
    async with deployment(broker_url, prefix) as running:
        await ensure_jobs_stream(running.bus, MODEL)
        await ensure_jobs_stream(running.bus, OTHER)
        if has_worker:
            await running.worker(sim(tokens_per_second=5.0, kv_tokens=1_000, block_size=1), max_concurrency=2)
            busy = running.client.stream(model=MODEL, prompt=PROMPT, max_tokens=900, ignore_eos=True)
            async for event in busy:
                if isinstance(event, Delta):
                    break
        else:
            await monitored(running)
        stream = running.client.stream(
            model=MODEL, prompt=PROMPT, max_tokens=200, queue_timeout_s=1, fallback=OTHER, job_id="late"
        )
        seen = aiter(stream)
        await anext(seen)
        await until(lambda: _has_message(running, OTHER))
        assert (await running.client.status("late")).state == "queued"
        await running.worker(model=OTHER)
        ends = [event async for event in seen if isinstance(event, Done)]
        assert len(ends) == 1
        history = await JobLog(running.bus).read("default", "late")
        kinds = [(event.kind, event.reason, event.model) for event in history if event.kind in ("requeued", "started")]
        assert kinds == [("requeued", "fallback", OTHER), ("started", "", OTHER)]
        await until(lambda: _has_message(running, OTHER, number=0))
        await until(lambda: _has_message(running, MODEL, number=1 if has_worker else 0))


async def _has_message(running: Deployment, model: str, *, number: int = 1) -> bool:
    return sum((await JobQueue(running.bus, model).counts()).values()) == number


async def test_a_hand_over_that_was_interrupted_is_finished_by_the_fallback(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running:
        for model in (MODEL, OTHER):
            await ensure_jobs_stream(running.bus, model)
        stream = running.client.stream(model=MODEL, prompt=PROMPT, queue_timeout_s=1, fallback=OTHER, job_id="late")
        seen = aiter(stream)
        accepted = await anext(seen)
        assert isinstance(accepted, Accepted)
        queue = JobQueue(running.bus, MODEL)
        assert accepted.sequence is not None
        message = await queue.message_of(accepted.sequence)
        assert message is not None
        job = decode_job(*message)
        assert job is not None
        there = [await publish_to_fallback(running.bus, job, QueueName(), {}) for _ in range(3)]
        assert there == [1, 1, 1], "stored once"
        await running.worker(model=OTHER)
        assert [event async for event in seen if isinstance(event, Done)] != []
        await running.worker(model=MODEL)  # gets a message of a job that is not its model's any more
        await until(lambda: _has_message(running, MODEL, number=0))
        history = await JobLog(running.bus).read("default", "late")
        assert history[-1].kind == "done"


async def test_a_job_whose_fallback_has_no_room_expires(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, queue_limit=1) as running:
        await ensure_jobs_stream(running.bus, MODEL)
        await ensure_jobs_stream(running.bus, OTHER)
        await anext(aiter(running.client.stream(model=OTHER, prompt=PROMPT)))
        await monitored(running)
        with pytest.raises(JobExpiredError):
            await running.client.complete(model=MODEL, prompt=PROMPT, queue_timeout_s=1, fallback=OTHER)


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


async def test_a_cancel_that_loses_to_a_hand_over_deletes_the_job_where_it_went_and_no_other(
    broker_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message's number counts in its model's stream only: there the same one may be another job's."""
    async with deployment(broker_url, prefix) as running:
        here, there = JobQueue(running.bus, MODEL), JobQueue(running.bus, OTHER)
        for model in (MODEL, OTHER):
            await ensure_jobs_stream(running.bus, model)
        for job_id in ("bystander", "late"):
            await anext(aiter(running.client.stream(model=MODEL, prompt=PROMPT, fallback=OTHER, job_id=job_id)))
        append = JobLog.append

        async def append_late(self: JobLog, tenant: str, event: Event, *, expected: int, ttl_s: float) -> StoreResult:
            monkeypatch.setattr(JobLog, "append", append)
            found = await here.message_of(2)
            job = decode_job(*found) if found is not None else None
            assert job is not None
            sequence = await publish_to_fallback(running.bus, job, QueueName(), {})
            assert sequence == 1
            moved = events.handed_over(
                job.job, attempt=2, model=OTHER, queue_sequence=sequence, body_hash=job.body_hash
            )
            assert isinstance(await self.append(tenant, moved, expected=expected, ttl_s=ttl_s), Stored)
            return await self.append(tenant, event, expected=expected, ttl_s=ttl_s)

        monkeypatch.setattr(JobLog, "append", append_late)
        assert (await running.client.cancel("late")).state == "cancelled"
        assert await here.headers_of(1) is not None
        assert await there.counts() == {}
