"""Workers that are slow, err, leak or do not answer are taken out by name and reason; well ones are not."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest

from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.overview import overview
from headrace.cli.http import free_port
from headrace.errors import EngineStartError
from headrace.monitor import health as judging
from headrace.schemas.workers import Ailment, Heartbeat, WorkerNudge, WorkerState
from headrace.worker import supervision
from headrace.worker.engines.openai import OpenAIEngine, OpenAIOptions
from headrace.worker.engines.sim import SimEngine
from tests.deployment import MODEL, Deployment, deployment, sim, until
from tests.fake_openai import FakeOpenAI, reply

MINUTE_S = 60.0
MIB = 1 << 20


@contextlib.asynccontextmanager
async def asking(running: Deployment, num_readers: int, num_tokens: int) -> AsyncIterator[list[str]]:
    """Requests one after another, so many at once; the texts that came. Each must be whole."""
    texts: list[str] = []

    async def ask(reader: int) -> None:
        number = 0
        while not stopping.is_set():
            number += 1
            prompt = f"reader {reader}, request {number}"
            answer = await running.client.complete(model=MODEL, prompt=prompt, max_tokens=num_tokens, ignore_eos=True)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == num_tokens
            texts.append(answer.text)

    stopping = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for reader in range(num_readers):
            group.create_task(ask(reader))
        yield texts
        stopping.set()


async def test_a_slow_one_of_three_is_taken_out_and_comes_back(
    broker_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "_LASTING_S", {"slow": 1.0})
    async with deployment(broker_url, prefix, max_attempts=5) as running, asyncio.timeout(120):
        for name in ("well-1", "well-2"):
            await running.worker(sim(tokens_per_second=100.0), worker=name, max_concurrency=4)
        slow = sim(tokens_per_second=100.0, slow_factor=20.0, sick_runs=1)
        await running.worker(slow, worker="slow", max_concurrency=4)
        for _ in range(2):  # they need no leader: what both say is obeyed once
            await running.monitor()
        seen = Seen(running)
        async with seen.watching(), asking(running, 12, 12) as texts:
            await until(lambda: has_restarted(running, "slow"), timeout_s=MINUTE_S)
            await until(lambda: running.is_ready("slow"))
            num_then = len(texts)
            await until(lambda: more_than(texts, num_then + 12))
    assert seen.reasons("slow", "Draining") == seen.reasons("slow", "Failed")
    assert all(reason.startswith("slow: 0.2") for reason in seen.reasons("slow", "Failed"))
    assert seen.restarts == {"slow": 1}
    assert slow.num_failed == 0  # it finished what it had, or gave it back


async def test_one_that_errs_half_the_time_is_taken_out_and_comes_back(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, max_attempts=10) as running, asyncio.timeout(120):
        await running.worker(sim(tokens_per_second=0.0), worker="well", max_concurrency=4)
        errs = sim(tokens_per_second=0.0, error_rate=0.5, sick_runs=1)
        await running.worker(errs, worker="errs", max_concurrency=4)
        await running.monitor()
        seen = Seen(running)
        async with seen.watching(), asking(running, 8, 3):
            await until(lambda: has_restarted(running, "errs"), timeout_s=MINUTE_S)
            await until(lambda: running.is_ready("errs"))
    assert all(reason.startswith("errs: ") for reason in seen.reasons("errs", "Failed"))
    assert seen.reasons("errs", "Failed")
    assert seen.restarts == {"errs": 1}


async def test_one_that_leaks_while_idle_is_taken_out_by_itself(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, probe_s=0.2) as running, asyncio.timeout(120):
        leaks = sim(leak_bytes_per_s=200 * MIB, sick_runs=1)
        await running.worker(leaks, worker="leaks")
        await running.worker(sim(), worker="well")
        seen = Seen(running)
        began = time.monotonic()
        async with seen.watching():
            await until(lambda: has_restarted(running, "leaks"), timeout_s=MINUTE_S)
            print(f"started again after {time.monotonic() - began:.1f} s")
            await until(lambda: running.is_ready("leaks"))
            assert await running.client.complete(model=MODEL, prompt="after", max_tokens=2)
    assert all(reason.startswith("memory grows: 1.") for reason in seen.reasons("leaks", "Failed"))
    assert all(reason.endswith("while idle") for reason in seen.reasons("leaks", "Failed"))
    assert seen.restarts == {"leaks": 1}


async def test_an_idle_engine_that_does_not_answer_is_started_again(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, probe_s=0.2) as running, asyncio.timeout(120):
        engine = sim()
        await running.worker(engine, worker="deaf")
        engine.num_probes_to_fail = 2
        await until(lambda: has_restarted(running, "deaf"), timeout_s=MINUTE_S)
        await until(lambda: running.is_ready("deaf"))
        beat = await beat_of(running, "deaf")
        assert beat.health is not None
        assert beat.health.last_restart.startswith("probe: the engine does not answer: the simulated engine")
        num_then = engine.num_probes
        await until(lambda: probed(engine, num_then + 2))  # and goes on being probed
        assert engine.num_started == 0


async def test_one_that_restarts_do_not_help_is_left_out_and_says_so(broker_url: str, prefix: str) -> None:
    port = free_port("127.0.0.1", 0)
    async with deployment(broker_url, prefix, monitor_port=port) as running, asyncio.timeout(120):
        sick = sim()
        await running.worker(sick, worker="sick")
        await running.worker(sim(), worker="well")
        await running.monitor()
        epoch = (await beat_of(running, "sick")).epoch
        for engine_run in range(4):
            await until(lambda: is_ready_in_run(running, "sick", engine_run))  # noqa: B023  # waited for at once
            for _ in range(2):  # two monitors say it, and one of them late: what is said of an older run is void
                await nudge(running, "sick", "errs", "errs: all of it", epoch, engine_run)
        await until(lambda: is_left_out(running, "sick"))
        reason = "left out after 3 restarts in 30 min: errs: all of it"
        now = await overview(running.bus)
        assert [(each.state, each.reason) for each in now.workers if each.id == "sick"] == [("Failed", reason)]
        assert not sick._is_started
        for _ in range(5):
            assert await running.client.complete(model=MODEL, prompt="goes on", max_tokens=2)
        text = await metrics(port)
        assert any("headrace_worker_left_out{" in line and '"sick"' in line and line.endswith(" 1.0") for line in text)
        assert 'headrace_worker_restarts_total{ailment="errs"' in "".join(text)


async def test_one_that_was_left_out_comes_back_once_nobody_else_is_up(
    broker_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "_ALONE_EVERY_S", 0.25)
    async with deployment(broker_url, prefix) as running, asyncio.timeout(120):
        await running.worker(sim(), worker="sick")
        well = await running.worker(sim(), worker="well")
        epoch = (await beat_of(running, "sick")).epoch
        for engine_run in range(4):
            await until(lambda: is_ready_in_run(running, "sick", engine_run))  # noqa: B023  # waited for at once
            await nudge(running, "sick", "errs", "errs", epoch, engine_run)
        await until(lambda: is_left_out(running, "sick"))
        await well.stop()
        await until(lambda: is_ready_in_run(running, "sick", 4))
        assert not await is_left_out(running, "sick")
        assert await running.client.complete(model=MODEL, prompt="goes on", max_tokens=2)


async def test_the_last_of_a_pool_is_not_left_out(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running, asyncio.timeout(120):
        await running.worker(sim(), worker="alone")
        epoch = (await beat_of(running, "alone")).epoch
        for engine_run in range(3):
            await until(lambda: is_ready_in_run(running, "alone", engine_run))  # noqa: B023  # waited for at once
            await nudge(running, "alone", "errs", "errs", epoch, engine_run)
        await until(lambda: is_ready_in_run(running, "alone", 3))
        await nudge(running, "alone", "errs", "errs", epoch, 3)
        assert await running.client.complete(model=MODEL, prompt="goes on", max_tokens=2)
        beat = await beat_of(running, "alone")
        assert beat.health is not None
        assert (beat.health.engine_run, beat.health.is_left_out) == (3, False)


async def test_a_server_that_refuses_the_first_token_is_an_error_that_says_so(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running, FakeOpenAI() as fake, asyncio.timeout(60):
        for status, said in ((401, "HTTP 401: no such key"), (400, "refuses a request for one token")):
            fake.probe = reply(status, {"error": {"message": "no such key"}})
            engine = OpenAIEngine(MODEL, msgspec.convert({"url": fake.url}, OpenAIOptions))
            part = await running.worker(engine, worker="w", may_fail=True, is_awaited=False)
            error = await part.failure()
            assert isinstance(error, ExceptionGroup)
            assert [type(each) for each in error.exceptions] == [EngineStartError]
            assert said in str(error.exceptions[0])
        assert fake.bodies == []


class Seen:
    """What workers said of themselves while it watched."""

    def __init__(self, running: Deployment) -> None:
        self._running = running
        self._beats: list[Heartbeat] = []

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        async def watch() -> None:
            while True:
                seen = await WorkersBucket(self._running.bus).list()
                self._beats += [each.beat for each in seen.values() if each.beat is not None]
                await asyncio.sleep(0.02)

        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def reasons(self, worker: str, state: WorkerState) -> set[str]:
        return {beat.reason for beat in self._beats if (beat.worker, beat.state) == (worker, state)}

    @property
    def restarts(self) -> dict[str, int]:
        """By worker, where there were any."""
        last = {beat.worker: beat.health.restarts for beat in self._beats if beat.health is not None}
        return {worker: number for worker, number in last.items() if number}


async def beat_of(running: Deployment, worker: str) -> Heartbeat:
    seen = await WorkersBucket(running.bus).get(worker)
    assert seen is not None
    assert seen.beat is not None
    return seen.beat


async def has_restarted(running: Deployment, worker: str) -> bool:
    health = (await beat_of(running, worker)).health
    return health is not None and health.restarts > 0


async def is_ready_in_run(running: Deployment, worker: str, engine_run: int) -> bool:
    beat = await beat_of(running, worker)
    return beat.state == "Ready" and beat.health is not None and beat.health.engine_run == engine_run


async def is_left_out(running: Deployment, worker: str) -> bool:
    health = (await beat_of(running, worker)).health
    return health is not None and health.is_left_out


async def more_than(texts: list[str], number: int) -> bool:
    return len(texts) > number


async def probed(engine: SimEngine, number: int) -> bool:
    return engine.num_probes >= number


async def nudge(running: Deployment, worker: str, ailment: Ailment, reason: str, epoch: str, engine_run: int) -> None:
    told = WorkerNudge(kind="restart", ailment=ailment, reason=reason, epoch=epoch, engine_run=engine_run)
    await running.bus.publish(running.bus.names.ctl(worker), msgspec.json.encode(told))


async def metrics(port: Any) -> list[str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/metrics", timeout=aiohttp.ClientTimeout(total=20)) as answer,
    ):
        assert answer.status == 200
        return (await answer.text()).splitlines()
