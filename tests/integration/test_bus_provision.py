"""Streams and buckets against the real server: made, changed, refused; and deployments beside each other."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from nats.aio.client import Client

from headrace.bus.connection import Bus, Stored, connect
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.joblog import JobLog
from headrace.bus.jobqueue import JobQueue
from headrace.bus.provision import ensure_jobs_stream, ensure_provisioned, provision
from headrace.bus.server import find_nats_server
from headrace.errors import BrokerUnsuitableError
from headrace.lifecycle import ChildProcess
from headrace.schemas import events
from headrace.schemas.events import Owner
from headrace.schemas.jobs import Job
from headrace.schemas.subjects import JobId, QueueName, Tenant
from headrace.schemas.workers import Heartbeat
from headrace.settings import Settings

WITHIN_S = 30.0


def upper(bus: Bus) -> str:
    return bus.names.upper


def changed(bus: Bus, **settings: object) -> Bus:
    """The same connection with other settings."""
    return Bus(bus.nc, msgspec.structs.replace(bus.settings, **settings))


async def config(bus: Bus, stream: str) -> dict[str, object]:
    found = json.loads(await bus.api(f"STREAM.INFO.{stream}"))["config"]
    assert isinstance(found, dict)
    return found


@pytest.fixture
async def bare(broker_url: str, prefix: str) -> AsyncIterator[Bus]:
    """A connection whose deployment is not provisioned."""
    async with connect(broker_url, Settings(prefix=prefix, state_dir="unused"), name="test") as connected:
        yield connected


async def test_makes_all_streams_once(bare: Bus) -> None:
    made = await provision(bare, models=("org/m-3.1",))
    name = upper(bare)
    assert [(one.stream, one.action) for one in made] == [
        (f"{name}_LOG_0", "created"),
        (f"{name}_DEAD", "created"),
        (f"KV_{name}_workers", "created"),
        (f"KV_{name}_config", "created"),
        (f"KV_{name}_usage", "created"),
        (f"KV_{name}_instances", "created"),
        (f"KV_{name}_batches", "created"),
        (f"{name}_BATCH", "created"),
        (f"OBJ_{name}_files", "created"),
        (f"{name}_JOBS_org=2Fm-3=2E1", "created"),
    ]
    again = await provision(bare, models=("org/m-3.1",))
    assert [(one.action, one.changes) for one in again] == [("unchanged", ())] * 10


async def test_many_services_may_start_at_once(bare: Bus) -> None:
    await asyncio.gather(*(ensure_provisioned(bare) for _ in range(8)))
    await asyncio.gather(*(ensure_jobs_stream(bare, "m") for _ in range(8)))
    assert {one.action for one in await provision(bare, models=("m",))} == {"unchanged"}


async def test_what_the_fence_depends_on(bare: Bus) -> None:
    await provision(bare, models=("m",))
    name = upper(bare)
    log = await config(bare, f"{name}_LOG_0")
    assert (log["retention"], log["storage"], log["discard"]) == ("limits", "file", "new")
    assert (log["allow_msg_ttl"], log["allow_direct"]) == (True, True)
    assert (log["max_age"], log["max_msgs"], log["max_bytes"], log["max_msgs_per_subject"]) == (0, -1, -1, -1)
    assert not log.get("subject_delete_marker_ttl")
    jobs = await config(bare, f"{name}_JOBS_m")
    assert (jobs["retention"], jobs["discard"], jobs["max_msgs"]) == ("workqueue", "new", 10_000)
    assert (jobs["max_age"], jobs["max_bytes"], jobs["duplicate_window"]) == (0, -1, 600 * 10**9)
    workers = await config(bare, f"KV_{name}_workers")
    assert (workers["max_msgs_per_subject"], workers["allow_msg_ttl"]) == (1, True)
    assert workers["subject_delete_marker_ttl"] == 60 * 10**9


async def test_changes_what_differs_and_says_what(bare: Bus) -> None:
    await provision(bare, models=("m",))
    other = changed(bare, queue_limit=7, max_queue_timeout_s=900.0)
    made = {one.stream: one for one in await provision(other, models=("m",))}
    stream = f"{upper(bare)}_JOBS_m"
    assert {name for name, one in made.items() if one.action != "unchanged"} == {stream}
    assert made[stream].action == "changed"
    assert made[stream].changes == ("max_msgs: 10000 → 7", "duplicate_window: 600000000000 → 900000000000")
    assert (await config(bare, stream))["max_msgs"] == 7
    assert {one.action for one in await provision(other, models=("m",))} == {"unchanged"}


async def test_a_start_makes_what_is_missing_and_changes_nothing(bare: Bus) -> None:
    await provision(bare, models=("m",))
    name = upper(bare)
    await bare.api(f"STREAM.DELETE.{name}_DEAD")
    other = changed(bare, queue_limit=7)
    await ensure_provisioned(other)
    await ensure_jobs_stream(other, "m")
    assert (await config(bare, f"{name}_DEAD"))["num_replicas"] == 1
    assert (await config(bare, f"{name}_JOBS_m"))["max_msgs"] == 10_000


async def test_names_what_it_cannot_change(bare: Bus) -> None:
    stream = f"{upper(bare)}_DEAD"
    wrong = {"name": stream, "subjects": [bare.names.dead_filter()], "storage": "memory", "discard": "new"}
    await bare.api(f"STREAM.CREATE.{stream}", wrong | {"allow_direct": True})
    with pytest.raises(BrokerUnsuitableError, match="cannot be changed in place") as caught:
        await provision(bare)
    assert f"stream {stream} differs" in str(caught.value)
    assert 'storage: "memory" → "file"' in str(caught.value)


async def test_more_replicas_than_servers_is_refused_by_name(bare: Bus) -> None:
    with pytest.raises(BrokerUnsuitableError, match=rf"cannot make stream {upper(bare)}_LOG_0: replicas > 1"):
        await provision(changed(bare, replicas=3))


async def test_a_model_name_no_stream_can_carry_is_refused_by_name(bare: Bus) -> None:
    with pytest.raises(BrokerUnsuitableError, match=r"cannot make stream .*name is too long"):
        await ensure_jobs_stream(bare, "é" * 50)


async def test_a_prefix_that_looks_like_anothers_in_upper_case_takes_nothing_from_it(bare: Bus, prefix: str) -> None:
    await provision(bare, models=("m",))
    twin = changed(bare, prefix=prefix.replace(".", "_"))
    assert twin.names.upper == bare.names.upper
    for attempt in (provision(twin), ensure_provisioned(twin), ensure_jobs_stream(twin, "m")):
        with pytest.raises(BrokerUnsuitableError, match="is another deployment's"):
            await attempt
    assert (await config(bare, f"{upper(bare)}_DEAD"))["subjects"] == [bare.names.dead_filter()]


async def test_a_server_that_is_too_old_is_named(bare: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(SimpleNamespace):
        def __str__(self) -> str:
            return "2.10.29"

    monkeypatch.setattr(Client, "connected_server_version", Old(major=2, minor=10, patch=29))
    for attempt in (provision(bare), ensure_provisioned(bare)):
        with pytest.raises(BrokerUnsuitableError, match=r"the NATS server is 2\.10\.29; Headrace needs 2\.12 or newer"):
            await attempt


@contextlib.asynccontextmanager
async def server_without_jetstream(state_dir: Path) -> AsyncIterator[str]:
    argv = [str(find_nats_server()), "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", str(state_dir)]
    async with ChildProcess(argv, name="nats-server") as child:
        ports = state_dir / f"nats-server_{child.pid}.ports"
        async with asyncio.timeout(WITHIN_S):
            while True:
                with contextlib.suppress(FileNotFoundError, ValueError):
                    url = json.loads(ports.read_text())["nats"][0]
                    break
                await asyncio.sleep(0.01)
        yield url


async def test_a_server_without_jetstream_is_told_apart(tmp_path: Path) -> None:
    async with server_without_jetstream(tmp_path) as url, connect(url, Settings(state_dir="s"), name="test") as bus:
        for attempt in (provision(bus), ensure_provisioned(bus)):
            with pytest.raises(BrokerUnsuitableError, match="runs without JetStream"):
                await attempt


async def test_two_prefixes_on_one_broker_do_not_see_each_other(broker_url: str, prefix: str) -> None:
    """Case OPS-4."""
    async with contextlib.AsyncExitStack() as stack:
        buses = []
        for name in (prefix, f"{prefix}.b"):
            settings = Settings(prefix=name, state_dir="unused")
            buses.append(await stack.enter_async_context(connect(broker_url, settings, name="test")))
            await provision(buses[-1], models=("m",))
        one, other = buses
        wakes = await other.subscribe(f"{other.names.prefix}.>")
        await other.nc.flush()

        owner = Owner(worker="w", epoch="e", queue_sequence=1)
        event = events.started("j", owner, attempt=1, offset=0, body_hash="h")
        beat = Heartbeat(worker="w", epoch="e", state="Ready", model="m")
        job = Job(
            tenant=Tenant("default"),
            job=JobId("j"),
            op="chat",
            model="m",
            body=b"{}",
            body_hash="h",
            accepted_at=1.0,
            queue_timeout_s=1,
            deadline_s=1,
            need_tokens=1,
        )
        queue = await stack.enter_async_context(JobQueue(one, "m"))
        other_queue = await stack.enter_async_context(JobQueue(other, "m"))
        assert isinstance(await JobLog(one).append("default", event, expected=0, ttl_s=60), Stored)
        assert isinstance(await WorkersBucket(one).put(beat, expected_revision=0, ttl_s=60), Stored)
        assert isinstance(await queue.publish(job, QueueName(), {}), Stored)

        assert await JobLog(other).last("default", "j") is None
        assert await WorkersBucket(other).list() == {}
        assert await other_queue.counts() == {}
        assert await other_queue.fetch(QueueName()) is None
        assert wakes.pending_msgs == 0
        assert isinstance(await JobLog(other).append("default", event, expected=0, ttl_s=60), Stored)
        delivery = await queue.fetch(QueueName())
        assert delivery is not None
        assert delivery.job == job
