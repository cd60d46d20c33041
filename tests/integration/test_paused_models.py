"""A paused model: nothing starts, what runs finishes, what waits keeps its place, all goes on when it is resumed."""

import asyncio
import time

import msgspec
import pytest

from headrace.bus.connection import Stored
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.jobqueue import JobQueue
from headrace.bus.keyvalue import Bucket
from headrace.bus.provision import ensure_jobs_stream
from headrace.client import Accepted, Requeued, Started
from headrace.errors import JobExpiredError
from headrace.schemas.config import ModelConfig
from headrace.schemas.config_text import encode_entry, key_of
from headrace.schemas.subjects import QueueName
from tests.deployment import MODEL, Deployment, deployment, sim, until
from tests.integration.test_queue_discipline import beat_of, sending

QUEUE = QueueName()


async def configure(running: Deployment, entry: ModelConfig) -> None:
    bucket, key = Bucket(running.bus, running.bus.names.config_bucket), key_of("models", MODEL)
    known = await bucket.get(key)
    result = await bucket.put(key, encode_entry(entry), expected_revision=known.revision if known is not None else 0)
    assert isinstance(result, Stored)


async def pause(running: Deployment, *workers: str) -> None:
    """Returns once the workers say that they fetch nothing."""
    await configure(running, ModelConfig(paused=True))

    async def fetch_nothing() -> bool:
        return all([(await beat_of(running, worker)).fetchable_tokens == 0 for worker in workers])

    await until(fetch_nothing)


async def resume(running: Deployment) -> None:
    await configure(running, ModelConfig())


async def look_around(running: Deployment, worker: str) -> None:
    """Wait for some beats of a worker: it looked for work several times meanwhile."""
    bucket = WorkersBucket(running.bus)
    revisions: set[int] = set()

    async def has_beaten() -> bool:
        seen = await bucket.get(worker)
        assert seen is not None
        revisions.add(seen.revision)
        return len(revisions) > 4

    await until(has_beaten)


async def test_what_runs_finishes_and_what_comes_waits_until_it_is_resumed(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, heartbeat_s=0.2) as running:
        await running.worker(sim(tokens_per_second=40.0), worker="w", max_concurrency=8)
        async with sending(running) as jobs:
            first = await jobs.send("first", max_tokens=60)  # 1.5 s
            await jobs.until_started("first")
            await pause(running, "w")
            assert (await beat_of(running, "w")).reason == "the model is paused"
            for name in ("second", "third"):
                await jobs.send(name, max_tokens=1)
            await first
            await look_around(running, "w")
            assert (jobs.started, jobs.done) == (["first"], ["first"])
            await resume(running)
            await jobs.until_started("second", "third")
            assert jobs.started == ["first", "second", "third"]


async def test_an_idle_worker_takes_nothing_by_its_parked_pull_nor_by_any_wake(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, heartbeat_s=0.2) as running:
        await running.worker(worker="w", max_concurrency=8)
        jobs = JobQueue(running.bus, MODEL)
        async with running.client.stream(model=MODEL, prompt="x", max_tokens=1) as stream:
            async for _ in stream:
                pass
        await until(lambda: is_parked(running, jobs, 1))
        await pause(running, "w")
        async with running.client.stream(model=MODEL, prompt="x", max_tokens=1) as stream:
            events = aiter(stream)
            accepted = await anext(events)
            assert isinstance(accepted, Accepted)
            await until(lambda: is_parked(running, jobs, 0))
            for _ in range(3):
                await jobs.wake(QUEUE, {})
                await jobs.wake_worker("w", QUEUE)
                await jobs.tell_interrupted("w", QUEUE, 1)
            await look_around(running, "w")

            async def is_told_paused() -> bool:
                status = await running.client.status(stream.job)
                return (status.state, status.paused, status.position, status.eta_s) == ("queued", True, 0, None)

            await until(is_told_paused)
            progress = await jobs.progress(QUEUE)
            assert progress is not None
            assert (progress.num_in_flight, progress.num_waiting) == (0, 1)
            began = time.monotonic()
            await resume(running)
            assert isinstance(await anext(events), Started)
            assert time.monotonic() - began < 5.0, "a second, on a machine that is not busy"
            assert not (await running.client.status(stream.job)).paused


class _Waiting(msgspec.Struct):
    num_waiting: int = 0


async def is_parked(running: Deployment, jobs: JobQueue, number: int) -> bool:
    answer = await running.bus.api(f"CONSUMER.INFO.{jobs.stream}.{QUEUE.consumer}")
    return msgspec.json.decode(answer, type=_Waiting).num_waiting == number


async def test_what_was_fetched_and_waits_for_memory_goes_back_to_its_place(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, heartbeat_s=0.2) as running:
        engine = sim(kv_tokens=1000, block_size=1, max_concurrency=8, tokens_per_second=400.0)
        await running.worker(engine, worker="w")
        async with sending(running) as jobs:
            first = await jobs.send("first", max_tokens=800)  # 2 s
            await jobs.until_started("first")
            await jobs.send("large", max_tokens=900)
            await until(lambda: holds(running, 2))
            await pause(running, "w")
            await until(lambda: holds(running, 1))
            await jobs.send("late", max_tokens=900)
            await first
            await look_around(running, "w")
            assert jobs.started == ["first"]
            await resume(running)
            await jobs.until_started("large", "late", timeout_s=30)
            assert jobs.started == ["first", "large", "late"]


async def holds(running: Deployment, number: int) -> bool:
    return len((await beat_of(running, "w")).held) == number


async def test_a_request_that_lost_its_worker_waits_too(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, heartbeat_s=0.2, worker_ttl_s=1.0) as running:
        await running.monitor()
        dying = await running.worker(sim(tokens_per_second=20.0), worker="dying", max_concurrency=1)
        async with running.client.stream(model=MODEL, prompt="x", max_tokens=60, ignore_eos=True) as stream:
            events = aiter(stream)
            assert [type(await anext(events)) for _ in range(2)] == [Accepted, Started]
            await running.worker(worker="other", max_concurrency=8)
            await pause(running, "dying", "other")
            await dying.kill()
            async for event in events:
                if isinstance(event, Requeued):
                    break
            await look_around(running, "other")
            status = await running.client.status(stream.job)
            assert (status.state, status.attempt, status.paused) == ("queued", 2, True)
            await resume(running)
            started = await anext(events)
            assert isinstance(started, Started)
            assert (started.worker, started.attempt) == ("other", 2)


async def test_a_worker_that_starts_while_the_model_is_paused_takes_nothing(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, heartbeat_s=0.2) as running:
        await ensure_jobs_stream(running.bus, MODEL)
        await pause(running)
        async with sending(running) as jobs:
            await jobs.send("a", max_tokens=1)
            await running.worker(worker="w", max_concurrency=8)
            await look_around(running, "w")
            assert jobs.started == []
            await resume(running)
            await jobs.until_started("a")


async def test_nobody_waits_beyond_the_queue_timeout(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, heartbeat_s=0.2) as running:
        await running.monitor()
        await running.worker(worker="w", max_concurrency=8)
        await pause(running, "w")
        with pytest.raises(JobExpiredError) as failed:
            async with asyncio.timeout(30):
                await running.client.complete(model=MODEL, prompt="x", max_tokens=1, queue_timeout_s=1.0)
        assert failed.value.code == "queue_timeout"
