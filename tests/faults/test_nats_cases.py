"""What NATS does to those who use it: markers, lost answers, closed connections, messages that are gone."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from headrace.bus.connection import Bus, Stored, StoreResult, Unknown, connect
from headrace.bus.joblog import JobLog
from headrace.bus.jobqueue import JobQueue
from headrace.bus.overview import list_workers
from headrace.bus.provision import ensure_jobs_stream
from headrace.client import Started
from headrace.errors import BrokerError, BrokerUnavailableError, JobCancelledError, RequestError
from headrace.lifecycle import ChildProcess
from headrace.monitor import run_monitor
from headrace.router import run_router
from headrace.schemas.subjects import Names, QueueName
from headrace.settings import Settings
from headrace.worker.worker import WorkerOptions, run_worker
from tests.deployment import MODEL, Deployment, deployment, sim, until
from tests.faults.link import Link
from tests.faults.reading import Reading
from tests.processes import part

TTL_S, BEAT_S = 2.0, 0.5
LATE_S = 2.0
"""What a busy machine may add to the promised time."""


async def is_gone(running: Deployment, worker: str) -> bool:
    live, _ = await list_workers(running.bus)
    return worker not in [each.id for each in live]


async def kill(child: ChildProcess) -> None:
    child.send_signal(signal.SIGKILL)
    await child.wait()


async def is_done(reading: Reading) -> bool:
    return reading.done is not None


def leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves(each)]
    return [error]


async def make_bucket_without_markers(bus: Bus, names: Names) -> None:
    bucket = names.workers_bucket
    config = {
        "name": f"KV_{bucket}",
        "subjects": [f"$KV.{bucket}.>"],
        "max_msgs_per_subject": 1,
        "discard": "new",
        "allow_direct": True,
        "allow_rollup_hdrs": True,
        "allow_msg_ttl": True,
    }
    await bus.api(f"STREAM.CREATE.KV_{bucket}", config)


def dying_worker(running: Deployment, state_dir: Path, **variables: str) -> ChildProcess:
    return part(
        "serve", "worker", "--engine", "sim", "--model", MODEL, "--worker-id", "dying", "-o", "tokens_per_second=30",
        url=running.url, prefix=running.settings.prefix, state_dir=state_dir, **variables,
    )  # fmt: skip


@pytest.mark.parametrize("has_markers", [True, False])
async def test_an_expired_heartbeat_is_never_taken_for_a_fresh_one(
    broker_url: str, prefix: str, tmp_path: Path, has_markers: bool
) -> None:  # NAT-2
    reading = Reading("stream", 100)
    if not has_markers:
        async with connect(broker_url, Settings(prefix=prefix), name="test") as bus:
            await make_bucket_without_markers(bus, bus.names)
    async with (
        deployment(broker_url, prefix) as running,
        asyncio.timeout(120),
        asyncio.TaskGroup() as group,
        dying_worker(running, tmp_path) as dying,
    ):
        await until(lambda: running.is_ready("dying"))
        group.create_task(reading.read(running.client))
        await reading.first_token.wait()
        await running.worker(sim(tokens_per_second=200.0), worker="other")
        await running.monitor()  # it has seen one beat, and gives everybody a time to live before it judges by silence
        await kill(dying)
        died_at = time.monotonic()
        await until(lambda: is_gone(running, "dying"), timeout_s=TTL_S + 2 * BEAT_S + LATE_S)
        print(f"gone {time.monotonic() - died_at:.2f} s after its death")
        await until(lambda: is_done(reading))
    assert reading.workers == ["dying", "other"]
    waited_s = reading.attempts[2][1] - died_at
    print(f"its stream went on after {waited_s:.2f} s")
    assert waited_s < TTL_S + 2 * BEAT_S + LATE_S


async def test_a_worker_that_dies_while_the_monitor_is_disconnected(
    broker_url: str, prefix: str, tmp_path: Path
) -> None:  # NAT-3
    reading = Reading("stream", 150)
    async with (
        Link(broker_url) as link,
        deployment(broker_url, prefix, ack_wait_s=60.0) as running,
        asyncio.timeout(120),
        asyncio.TaskGroup() as group,
    ):
        await running.monitor(url=link.url)
        async with dying_worker(running, tmp_path, HEADRACE_ACK_WAIT_S="60") as dying:
            await until(lambda: running.is_ready("dying"))
            group.create_task(reading.read(running.client))
            await reading.first_token.wait()
            await running.worker(sim(tokens_per_second=200.0), worker="other")
            link.cut()
            await kill(dying)
            await until(lambda: is_gone(running, "dying"))
            await link.mend()
            back_at = time.monotonic()
            await until(lambda: is_done(reading))
    assert reading.workers == ["dying", "other"]
    waited_s = reading.attempts[2][1] - back_at
    print(f"its stream went on {waited_s:.2f} s after the monitor was back")
    assert waited_s < TTL_S + 2 * BEAT_S + LATE_S + 2  # two more, which the connection may take to come back


async def test_a_request_whose_publish_is_not_acknowledged_runs_once(broker_url: str, prefix: str) -> None:  # NAT-5
    tries: list[float] = []
    store = Bus.store

    async def flaky(
        self: Bus, subject: str, data: bytes, *, headers: Mapping[str, str], timeout_s: float | None = None
    ) -> StoreResult:
        if not subject.startswith(f"{prefix}.jobs."):
            return await store(self, subject, data, headers=headers, timeout_s=timeout_s)
        tries.append(time.monotonic())
        if len(tries) in (2, 3):
            return Unknown("no responders", is_unserved=True)
        result = await store(self, subject, data, headers=headers, timeout_s=timeout_s)
        return Unknown("no answer") if len(tries) == 1 else result

    reading = Reading("once", 5)
    async with deployment(broker_url, prefix) as running, asyncio.timeout(120):
        engine = sim()
        await running.worker(engine)
        with patch.object(Bus, "store", flaky):
            await reading.read(running.client)
        assert len(tries) == 4
        assert min(later - earlier for earlier, later in pairwise(tries)) >= 0.25
        assert len(reading.attempts) == engine.num_started == 1
        assert await num_stored(running) == 1


async def test_what_is_published_again_is_attached_to_and_what_runs_again_is_not_published_again(
    broker_url: str, prefix: str
) -> None:  # NAT-4
    engine = sim(tokens_per_second=50.0, die_after=3, fault_first=1)
    readings = [Reading("once", 10, job_id="same") for _ in range(6)]
    late = Reading("once", 10, job_id="same")
    store = Bus.store
    results: list[StoreResult] = []

    async def watched(
        self: Bus, subject: str, data: bytes, *, headers: Mapping[str, str], timeout_s: float | None = None
    ) -> StoreResult:
        result = await store(self, subject, data, headers=headers, timeout_s=timeout_s)
        if subject.startswith(f"{prefix}.jobs."):
            results.append(result)
        return result

    async def are_all_accepted() -> bool:
        return all(reading.job for reading in readings)

    async with deployment(broker_url, prefix, routers=2) as running, asyncio.timeout(120):
        await ensure_jobs_stream(running.bus, MODEL)
        with patch.object(Bus, "store", watched):
            async with asyncio.TaskGroup() as group:
                for reading in readings:
                    group.create_task(reading.read(running.client))
                await until(are_all_accepted)
                await running.worker(engine)
            await until(lambda: is_queue_empty(running))
            await late.read(running.client)  # its message is gone, and still nobody waits for one
        assert results
        assert set(results) <= {Stored(1), Stored(1, is_duplicate=True)}
        assert await num_stored(running) == 1
        assert engine.num_started == 2  # redelivered once, under the sequence it always had
        assert all(reading.done == readings[0].done for reading in (*readings, late))


async def num_stored(running: Deployment) -> int:
    """How many messages the job stream has taken in all."""
    info = msgspec.json.decode(await running.bus.api(f"STREAM.INFO.{running.bus.names.jobs_stream(MODEL)}"))
    return int(info["state"]["last_seq"])


async def is_queue_empty(running: Deployment) -> bool:
    return not await JobQueue(running.bus, MODEL).counts()


async def test_a_registration_that_is_not_acknowledged_is_tried_again(broker_url: str, prefix: str) -> None:
    store = Bus.store
    lost: list[str] = []

    async def flaky(
        self: Bus, subject: str, data: bytes, *, headers: Mapping[str, str], timeout_s: float | None = None
    ) -> StoreResult:
        if subject.startswith("$KV.") and len(lost) < 2:
            lost.append(subject)
            return Unknown("no answer")
        return await store(self, subject, data, headers=headers, timeout_s=timeout_s)

    async with deployment(broker_url, prefix) as running, asyncio.timeout(120):
        with patch.object(Bus, "store", flaky):
            await running.worker(sim(), worker="w", is_awaited=False)
            await until(lambda: is_registered(running, "w"))
    assert len(lost) == 2


async def is_registered(running: Deployment, worker: str) -> bool:
    with contextlib.suppress(BrokerError):  # there is no bucket before it made one
        return await running.is_ready(worker)
    return False


async def test_a_cancel_while_the_log_does_not_answer_is_no_defect(
    broker_url: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def away(self: JobLog, tenant: str, job: str) -> None:
        raise BrokerUnavailableError("the broker is away")

    async with deployment(broker_url, prefix, retry_for_s=0.5) as running, asyncio.timeout(120):
        with patch.object(JobLog, "state", away), pytest.raises((RequestError, BrokerError)):
            await running.client.cancel("j")
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_prompt_too_large_is_refused_before_it_is_sent(broker_url: str, prefix: str) -> None:  # NAT-6
    reading = Reading("beside it", 40)
    async with (
        deployment(broker_url, prefix) as running,
        asyncio.timeout(120),
        asyncio.TaskGroup() as group,
    ):
        await running.worker(sim(tokens_per_second=40.0))
        group.create_task(reading.read(running.client))
        await reading.first_token.wait()
        connected = running.bus.nc.stats["reconnects"]
        limit = running.bus.nc.max_payload
        for size in (1_200_000, limit + 1, limit, limit - 1_000, limit - 20_000):  # headers come on top of it
            with pytest.raises(RequestError) as caught:
                await running.client.complete(model=MODEL, prompt="x" * size, max_tokens=1)
            assert caught.value.code == "request_too_large"
        await until(lambda: is_done(reading))
        assert running.bus.nc.stats["reconnects"] == connected
        assert not running.bus.closed.is_set()


async def test_messages_deleted_by_cancelling_leave_nothing_pending(broker_url: str, prefix: str) -> None:  # NAT-7
    async def cycle(running: Deployment, number: int) -> None:
        stream = running.client.stream(model=MODEL, prompt=f"cancelled {number}", max_tokens=1000, ignore_eos=True)

        async def read() -> None:
            async for event in stream:
                if isinstance(event, Started):
                    assert (await stream.cancel()).state == "cancelled"

        with pytest.raises(JobCancelledError):
            await read()

    async def is_nothing_pending(running: Deployment) -> bool:
        progress = await JobQueue(running.bus, MODEL).progress(QueueName())
        return progress is not None and (progress.num_in_flight, progress.num_waiting) == (0, 0)

    engine = sim(tokens_per_second=20.0, max_concurrency=10)
    reading = Reading("next", 3)
    async with deployment(broker_url, prefix) as running, asyncio.timeout(120):
        await running.worker(engine)
        for number in range(0, 100, 10):
            await asyncio.gather(*(cycle(running, number + each) for each in range(10)))
        await until(lambda: is_nothing_pending(running))
        await reading.read(running.client)
        assert len(reading.attempts) == 1
        await until(lambda: is_nothing_pending(running))
        assert engine.num_running == 0


@pytest.mark.parametrize("is_there_first", [True, False], ids=["before", "later"])
async def test_a_worker_does_not_work_beside_a_consumer_of_somebody_else(
    broker_url: str, prefix: str, is_there_first: bool
) -> None:  # NAT-8; the broker itself lets no two consumers of a work queue have a subject in common
    stream, ours = f"{prefix.upper().replace('.', '_')}_JOBS_{MODEL}", QueueName().consumer
    reading = Reading("once", 3, queue_timeout_s=5)

    async def make_stranger(running: Deployment) -> None:
        config = {"durable_name": "stranger", "ack_policy": "explicit", "filter_subject": f"{prefix}.jobs.{MODEL}.>"}
        await running.bus.api(f"CONSUMER.DURABLE.CREATE.{stream}.stranger", {"stream_name": stream, "config": config})

    async def remove_stranger(running: Deployment) -> None:
        await running.bus.api(f"CONSUMER.DELETE.{stream}.stranger")

    async with deployment(broker_url, prefix) as running, asyncio.timeout(120):
        await ensure_jobs_stream(running.bus, MODEL)
        if is_there_first:
            await make_stranger(running)
        part = await running.worker(sim(), worker="beside", may_fail=True, is_awaited=not is_there_first)
        async with asyncio.TaskGroup() as group:
            if not is_there_first:
                await make_stranger(running)
                group.create_task(reading.read(running.client))
            told = " ".join(str(each) for each in leaves(await part.failure()))
            for named in ("'stranger'", f"'{ours}'", stream):
                assert named in told
            await remove_stranger(running)
            engine = sim()
            await running.worker(engine, worker="alone")
            if is_there_first:
                group.create_task(reading.read(running.client))
        assert engine.num_started == len(reading.attempts) == 1


@pytest.mark.parametrize("kind", ["router", "worker", "monitor"])
async def test_a_part_whose_connection_is_closed_for_good_ends(
    broker_url: str, prefix: str, kind: str
) -> None:  # NAT-10; reconnecting through a long outage is in test_broker_restart
    def run(bus: Bus, stop: asyncio.Event) -> Any:
        if kind == "router":
            return run_router(bus, stop=stop)
        if kind == "monitor":
            return run_monitor(bus, stop=stop)
        return run_worker(bus, sim(), WorkerOptions(worker="w", model=MODEL), stop=stop)

    async def is_up(running: Deployment) -> bool:
        if kind == "worker":
            with contextlib.suppress(BrokerError):  # there is no bucket before it made one
                return await running.is_ready("w")
            return False
        subject = running.bus.names.monitor_state() if kind == "monitor" else running.bus.names.status("default", "x")
        return await running._answers(subject)

    async with Link(broker_url) as link, deployment(broker_url, prefix, routers=0) as running, asyncio.timeout(120):
        ending = running._start(run, kind, url=link.url, may_fail=True)
        await until(lambda: is_up(running))
        link.say(b"-ERR 'Maximum Payload Violation'\r\n")  # after which nats-py does not reconnect
        print(repr(await ending.failure(timeout_s=25)))  # never alive and silent
