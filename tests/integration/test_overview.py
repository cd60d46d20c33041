"""What `status` and the monitor read from a real broker."""

import asyncio
import json
import logging
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from headrace.bus.connection import Bus, Stored, connect
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.jobqueue import JobQueue
from headrace.bus.overview import list_models, list_workers, overview
from headrace.bus.provision import ensure_jobs_stream, ensure_provisioned
from headrace.bus.server import EmbeddedBroker
from headrace.errors import BrokerError, BrokerUnavailableError, NotProvisionedError
from headrace.monitor import run_monitor
from headrace.schemas.jobs import Job
from headrace.schemas.overview import Overview
from headrace.schemas.subjects import JobId, QueueName, Tenant
from headrace.schemas.workers import Heartbeat
from headrace.settings import Settings

WITHIN_S = 30.0


@pytest_asyncio.fixture
async def bus(broker_url: str, prefix: str) -> AsyncIterator[Bus]:
    async with connect(broker_url, Settings(prefix=prefix), name="test") as connected:
        yield connected


def job(number: int) -> Job:
    return Job(
        tenant=Tenant("default"), job=JobId(f"j{number}"), op="chat", model="m", body=b"{}", body_hash="h",
        accepted_at=0, queue_timeout_s=60, deadline_s=60, need_tokens=1,
    )  # fmt: skip


async def put(bus: Bus, worker: str, *, revision: int = 0, ttl_s: float = 60, tombstone: bool = False) -> int:
    heartbeat = Heartbeat(
        worker=worker, epoch="e1", state="Ready", model="m", engine="sim", kv_capacity_tokens=1000, max_concurrency=4,
        is_tombstone=tombstone,
    )  # fmt: skip
    result = await WorkersBucket(bus).put(heartbeat, expected_revision=revision, ttl_s=ttl_s)
    assert isinstance(result, Stored)
    return result.sequence


async def test_an_unprovisioned_prefix_says_what_to_do(bus: Bus) -> None:
    with pytest.raises(NotProvisionedError, match="headrace provision"):
        await overview(bus)
    assert await list_models(bus) == []


async def test_a_known_model_without_requests_is_its_empty_default_queue(bus: Bus) -> None:
    await ensure_provisioned(bus)
    await ensure_jobs_stream(bus, "org/m-3.1")
    assert json.loads(msgspec.json.encode(await overview(bus))) == {
        "workers": [],
        "queues": [
            {"model": "org/m-3.1", "pool": "default", "lane": "normal", "queue": "default", "queued": 0, "running": 0,
             "oldest_age_s": None, "position": 0, "eta_s": None, "paused": False},
        ],
        "gone": [],
    }  # fmt: skip
    assert await list_models(bus) == ["org/m-3.1"]


async def test_queued_and_running_are_told_apart(bus: Bus) -> None:
    await ensure_provisioned(bus)
    await ensure_jobs_stream(bus, "m")
    high, normal = QueueName(lane="high"), QueueName()
    async with JobQueue(bus, "m") as queue:
        for number in range(3):
            await queue.publish(job(number), normal, {})
        await queue.publish(job(3), high, {})
        before = await overview(bus)
        assert [(each.lane, each.queued, each.running) for each in before.queues] == [("high", 1, 0), ("normal", 3, 0)]
        assert all(each.oldest_age_s is not None and 0 <= each.oldest_age_s < WITHIN_S for each in before.queues)
        first, second = await queue.fetch(normal), await queue.fetch(high)
        assert first is not None
        assert second is not None
        after = await overview(bus)
    assert [(each.lane, each.queued, each.running) for each in after.queues] == [("high", 0, 1), ("normal", 2, 1)]
    assert [each.oldest_age_s is None for each in after.queues] == [True, False]
    assert after.models == ["m"]
    assert [each.position for each in before.queues] == [1, 4]
    assert [each.eta_s for each in after.queues] == [None, None], "no worker lives"


async def test_workers_live_leave_expire_and_are_tombstoned(bus: Bus) -> None:
    await ensure_provisioned(bus)
    await put(bus, "lives")
    await put(bus, "dead", tombstone=True)
    revision = await put(bus, "left")
    await WorkersBucket(bus).remove("left", expected_revision=revision)
    await put(bus, "expires", ttl_s=1)
    async with asyncio.timeout(WITHIN_S):
        while len((found := await list_workers(bus))[0]) > 1:
            await asyncio.sleep(0.05)
    live, gone = found
    assert [(each.id, each.engine, each.kv_capacity_tokens, each.max_concurrency) for each in live] == [
        ("lives", "sim", 1000, 4)
    ]
    assert {each.id: each.ending for each in gone} == {"dead": "tombstoned", "left": "left", "expires": "expired"}


@asynccontextmanager
async def monitoring(bus: Bus) -> AsyncIterator[None]:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(run_monitor(bus, stop=stop))
        try:
            yield
        finally:
            stop.set()


@asynccontextmanager
async def beating(bus: Bus, worker: str) -> AsyncIterator[None]:
    """A live worker inside the block; its key stays as it is after it."""

    async def beat_for_ever() -> None:
        while True:
            with suppress(BrokerError, AssertionError):
                seen = await WorkersBucket(bus).get(worker)
                await put(bus, worker, revision=seen.revision if seen is not None else 0)
            await asyncio.sleep(0.2)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(beat_for_ever())
        try:
            yield
        finally:
            task.cancel()


async def until_said(caplog: pytest.LogCaptureFixture, *texts: str) -> None:
    async with asyncio.timeout(WITHIN_S):
        while missing := [text for text in texts if not any(text in line for line in caplog.messages)]:
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                pytest.fail(f"not said within {WITHIN_S} s: {missing}; said: {caplog.messages}")


async def state(bus: Bus) -> Overview:
    async with asyncio.timeout(WITHIN_S):
        while True:
            with suppress(NotProvisionedError, BrokerUnavailableError, msgspec.ValidationError):
                return msgspec.json.decode((await bus.request(bus.names.monitor_state())).data, type=Overview)
            await asyncio.sleep(0.02)


async def test_a_monitor_tells_who_comes_and_goes(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="headrace")
    async with monitoring(bus):
        await state(bus)
        async with beating(bus, "w1"):
            await put(bus, "w2", ttl_s=1)
            await until_said(caplog, "worker w1 of model m appeared: Ready", "worker w2 of model m appeared: Ready")
            await until_said(caplog, "worker w2 expired; it held 0 requests")
            now = await state(bus)
            assert [(each.id, each.model) for each in now.gone] == [("w2", "m")]
            assert [each.id for each in now.workers] == ["w1"]
        seen = await WorkersBucket(bus).get("w1")
        assert seen is not None
        await WorkersBucket(bus).remove("w1", expected_revision=seen.revision)
        await until_said(caplog, "worker w1 left")


async def test_two_monitors_answer_side_by_side(bus: Bus) -> None:
    async with monitoring(bus), monitoring(bus):
        inbox = bus.new_inbox()
        answers = await bus.subscribe(inbox)
        async with asyncio.timeout(WITHIN_S):
            found: set[str] = set()
            while len(found) < 2:
                await bus.publish("$SRV.PING.headrace-monitor", reply=inbox)
                with suppress(Exception):
                    while True:
                        found.add(json.loads((await answers.next_msg(0.1)).data)["id"])
        await answers.unsubscribe()
        assert (await state(bus)).workers == ()


@pytest.mark.parametrize("is_store_lost", [False, True], ids=["store-kept", "store-lost"])
async def test_a_monitor_goes_on_through_a_restart_of_the_broker(
    tmp_path: Path, prefix: str, caplog: pytest.LogCaptureFixture, is_store_lost: bool
) -> None:
    caplog.set_level(logging.INFO, logger="headrace")
    async with AsyncExitStack() as stack:
        async with EmbeddedBroker(tmp_path, port=0) as first:
            url = first.info.url
            settings = Settings(prefix=prefix, request_timeout_s=0.5)
            bus = await stack.enter_async_context(connect(url, settings, name="test"))
            await stack.enter_async_context(monitoring(bus))
            await state(bus)
            async with beating(bus, "before"):
                await until_said(caplog, "worker before of model m appeared")
        if is_store_lost:
            shutil.rmtree(tmp_path / "broker")
        await stack.enter_async_context(EmbeddedBroker(tmp_path, port=int(url.rpartition(":")[2])))
        await stack.enter_async_context(beating(bus, "after"))
        await until_said(caplog, "worker after of model m appeared", "worker before expired")
        assert [each.id for each in (await state(bus)).workers] == ["after"]
