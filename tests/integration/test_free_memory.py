"""An engine that allocates as it goes: exactly as many run as its free memory carries, and it never runs out."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import headrace.client
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.overview import overview
from headrace.client import Started
from headrace.errors import JobExpiredError, JobFailedError, RequestError
from headrace.lifecycle import ChildProcess
from headrace.schemas.workers import Heartbeat
from headrace.settings import Settings
from headrace.worker.engines.sim import SimEngine
from tests.commands import Headrace
from tests.deployment import MODEL, Deployment, deployment, sim, until
from tests.fake_openai import FakeOpenAI
from tests.processes import part, serving

TOKEN_BYTES = 23_040  # 2 · 30 layers · 3 heads · 64 · 2 bytes


class Jobs:
    """Requests whose starts and ends are noted."""

    def __init__(self, running: Deployment, group: asyncio.TaskGroup) -> None:
        self._running = running
        self._group = group
        self.started: list[str] = []
        self.done: list[str] = []

    def send(self, name: str, *, max_tokens: int, prompt: str = "x") -> asyncio.Task[None]:
        return self._group.create_task(self._read(name, max_tokens, prompt))

    async def _read(self, name: str, max_tokens: int, prompt: str) -> None:
        stream = self._running.client.stream(model=MODEL, prompt=prompt, max_tokens=max_tokens, ignore_eos=True)
        async with stream:
            async for event in stream:
                if isinstance(event, Started):
                    self.started.append(name)
        self.done.append(name)

    async def until_started(self, number: int) -> None:
        async def are_started() -> bool:
            return len(self.started) >= number

        await until(are_started)


@contextlib.asynccontextmanager
async def sending(running: Deployment) -> AsyncIterator[Jobs]:
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        yield Jobs(running, group)


def allocating(tokens: int, **options: Any) -> SimEngine:
    """An engine beside memory for so many tokens, and no reserve unless told."""
    told = {"memory_reserve_bytes": 0, "block_size": 1, "max_concurrency": 8, "tokens_per_second": 400.0, **options}
    return sim(pool_bytes=tokens * TOKEN_BYTES, kv_bytes_per_token=TOKEN_BYTES, **told)


async def beat_of(running: Deployment, worker: str = "w") -> Heartbeat:
    seen = await WorkersBucket(running.bus).get(worker)
    assert seen is not None
    assert seen.beat is not None
    return seen.beat


async def test_as_many_run_as_free_memory_carries_and_the_next_when_one_ends(broker_url: str, prefix: str) -> None:
    """MEM-4, by free memory: 1,000 tokens, three requests of 400."""
    engine = allocating(1000)
    async with deployment(broker_url, prefix) as running:
        await running.worker(engine, worker="w")
        (shown,) = (await overview(running.bus)).workers
        assert (shown.kv_capacity_source, shown.kv_capacity_tokens) == ("memory", 1000)
        assert (shown.memory_source, shown.memory_total_bytes) == ("sim", 1000 * TOKEN_BYTES)
        async with sending(running) as jobs:
            for name in ("a", "b", "c"):
                jobs.send(name, max_tokens=400)
            await jobs.until_started(2)

            async def third_waits() -> bool:
                beat = await beat_of(running)
                return (beat.running, beat.waiting, beat.kv_reserved_tokens) == (2, 1, 800)

            await until(third_waits)
            await jobs.until_started(3)
            assert jobs.done, "the third started before one had ended"
        assert (engine.num_running_peak, engine.num_started, engine.num_failed) == (2, 3, 0)
        assert engine.kv_peak_tokens <= 1000


async def test_a_full_load_never_runs_out_of_memory_and_leaves_none_idle(broker_url: str, prefix: str) -> None:
    engine = allocating(1000, ttft_s=0.05, tokens_per_second=1000.0, block_size=16)
    async with deployment(broker_url, prefix) as running:
        await running.worker(engine, worker="w")
        async with sending(running) as jobs:
            for number in range(40):
                jobs.send(f"job{number}", max_tokens=20 + 37 * number % 300, prompt="word " * (1 + 11 * number % 90))
        assert len(jobs.done) == 40
        assert (engine.num_started, engine.num_failed) == (40, 0)
        assert engine.num_running_peak >= 3


async def test_memory_that_others_take_is_not_given_away_and_what_runs_goes_on(broker_url: str, prefix: str) -> None:
    engine = allocating(1000, tokens_per_second=100.0)
    async with deployment(broker_url, prefix) as running:
        await running.worker(engine, worker="w")
        async with sending(running) as jobs:
            jobs.send("first", max_tokens=200)
            await jobs.until_started(1)
            engine.memory.others_bytes = 700 * TOKEN_BYTES

            async def has_fallen() -> bool:
                beat = await beat_of(running)
                return beat.kv_capacity_tokens <= 300 and beat.kv_capacity_peak_tokens == 1000

            await until(has_fallen)
            large = jobs.send("large", max_tokens=400)
            await until(lambda: is_done(jobs, "first"))
            assert jobs.started == ["first"]
            assert not large.done(), "it is not refused: it fitted before, and may again"
            jobs.send("small", max_tokens=100)
            await until(lambda: is_done(jobs, "small"))
            assert jobs.started == ["first", "small"]
            engine.memory.others_bytes = 0
            await jobs.until_started(3)
        assert sorted(jobs.done) == ["first", "large", "small"]
        assert engine.num_failed == 0


async def test_what_memory_never_carried_is_refused_and_what_it_may_carry_again_expires(
    broker_url: str, prefix: str
) -> None:
    engine = allocating(1000)
    async with deployment(broker_url, prefix) as running:
        await running.monitor()
        await running.worker(engine, worker="w")
        engine.memory.others_bytes = 1000 * TOKEN_BYTES

        async def is_full() -> bool:
            beat = await beat_of(running)
            return (beat.kv_capacity_tokens, beat.capacity_tokens) == (0, 0)

        await until(is_full)
        with pytest.raises(RequestError) as refused:
            await running.client.complete(model=MODEL, prompt="x", max_tokens=1500)
        assert refused.value.code == "exceeds_capacity"
        with pytest.raises(JobExpiredError):
            await running.client.complete(model=MODEL, prompt="x", max_tokens=500, queue_timeout_s=1.0)
    assert engine.num_started == 0


async def test_an_engine_that_keeps_what_it_allocated_uses_it_again(broker_url: str, prefix: str) -> None:
    engine = allocating(1000, keeps_memory=True, tokens_per_second=1000.0)
    async with deployment(broker_url, prefix) as running:
        await running.worker(engine, worker="w")
        async with sending(running) as jobs:
            for number in range(5):
                await jobs.send(f"job{number}", max_tokens=900)
        assert len(jobs.done) == 5
        assert engine.num_failed == 0


async def test_an_engine_that_runs_out_after_all_is_started_again_and_the_job_ends_once(
    broker_url: str, prefix: str
) -> None:
    """MEM-7: others take what was promised already. No ledger can help that; the reserve is there for it."""
    engine = allocating(100)
    async with deployment(broker_url, prefix, max_attempts=1) as running:
        await running.worker(engine, worker="w")
        taking = asyncio.create_task(take_once_it_runs(engine, 70 * TOKEN_BYTES))
        with pytest.raises(JobFailedError):
            await running.client.complete(model=MODEL, prompt="x", max_tokens=80, ignore_eos=True)
        await taking

        async def has_less() -> bool:
            beat = await beat_of(running)
            return (beat.state, beat.kv_capacity_tokens, beat.kv_capacity_peak_tokens) == ("Ready", 30, 30)

        await until(has_less)
        await running.client.complete(model=MODEL, prompt="x", max_tokens=20)
        assert engine.num_failed == 1


async def take_once_it_runs(engine: SimEngine, num_bytes: int) -> None:
    async def runs() -> bool:
        return engine.num_running > 0

    await until(runs)
    engine.memory.others_bytes = num_bytes


async def is_done(jobs: Jobs, name: str) -> bool:
    return name in jobs.done


async def test_as_processes_with_what_status_says(broker_url: str, prefix: str, tmp_path: Path) -> None:
    """A worker told its pool, another attached to a server beside this machine's own memory."""
    config = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({**config, "torch_dtype": "bfloat16"}))

    def started(*arguments: str) -> ChildProcess:
        return part("serve", *arguments, url=broker_url, prefix=prefix, state_dir=tmp_path)

    headrace_cli = Headrace(broker_url, prefix)
    async with (
        FakeOpenAI() as server,
        started("router"),
        started(
            "worker", "--engine", "sim", "--model", MODEL, "--worker-id", "pool", "--memory-reserve", "0",
            "--kv-layout", "30,3,64,2", "-o", f"pool_bytes={1000 * TOKEN_BYTES}", "-o", "block_size=1",
            "-o", "tokens_per_second=400",
        ),
        started(
            "worker", "--engine", "openai", "--engine-url", server.url, "--model", "attached", "--worker-id", "host",
            "--model-config", str(tmp_path), "--memory-device", "host", "--memory-reserve", "64MiB",
        ),
        started(
            "worker", "--engine", "openai", "--engine-url", server.url, "--model", "attached", "--worker-id", "told",
            "--kv-tokens", "500",
        ),
        started("worker", "--engine", "sim", "--model", "reserved", "--worker-id", "own"),
        headrace.client.connect(broker_url, settings=Settings(prefix=prefix)) as client,
    ):  # fmt: skip
        await serving(client, MODEL)
        sources: dict[str, str] = {}
        status: dict[str, Any] = {}

        async def all_are_ready() -> bool:
            workers = {each["id"]: each for each in (await headrace_cli.json("status"))["workers"]}
            status.update(workers)
            sources.update({name: each["kv_capacity_source"] for name, each in workers.items()})
            return len(workers) == 4 and all(each["state"] == "Ready" for each in workers.values())

        await until(all_are_ready)
        assert sources == {"pool": "memory", "host": "memory", "told": "told", "own": "engine"}
        assert (status["pool"]["kv_capacity_tokens"], status["pool"]["kv_capacity_peak_tokens"]) == (1000, 1000)
        assert status["host"]["memory_reserved_bytes"] == 64 << 20
        assert status["host"]["memory_source"] == "system"
        carried = (status["host"]["memory_free_bytes"] - (64 << 20)) // TOKEN_BYTES
        assert abs(status["host"]["kv_capacity_tokens"] - carried) <= carried // 4, "others use this machine too"

        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            for number in range(3):
                prompt = f"number {number}"
                group.create_task(client.complete(model=MODEL, prompt=prompt, max_tokens=400, ignore_eos=True))

            async def two_run_and_one_waits() -> bool:
                (pool,) = [each for each in (await overview(client.bus)).workers if each.id == "pool"]
                assert pool.running <= 2
                return (pool.running, pool.waiting) == (2, 1)

            await until(two_run_and_one_waits)
