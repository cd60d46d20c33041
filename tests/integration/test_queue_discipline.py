"""Memory decides who runs, lanes and age decide who is next, and no worker idles beside a request it could run."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

import headrace.client
from headrace.bus.connection import Stored
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.jobqueue import JobQueue
from headrace.bus.keyvalue import Bucket
from headrace.bus.provision import ensure_jobs_stream, ensure_provisioned
from headrace.client import Accepted, Client, Done, Started
from headrace.errors import JobFailedError, RequestError
from headrace.schemas.config_text import decode_file, encode_entry, entries_of
from headrace.schemas.subjects import QueueName
from headrace.schemas.workers import Heartbeat
from headrace.worker import puller
from headrace.worker.engines.base import PROBE_PREFIX, EngineUsage
from headrace.worker.memory import Memory
from tests.deployment import MODEL, Deployment, deployment, sim, until


class Jobs:
    """Sends requests and notes in which order they start."""

    def __init__(self, client: Client, group: asyncio.TaskGroup) -> None:
        self._client = client
        self._group = group
        self.started: list[str] = []
        self.worker_of: dict[str, str] = {}
        self.done: list[str] = []

    async def send(self, name: str, *, max_tokens: int, **arguments: Any) -> asyncio.Task[None]:
        """Returns once it is accepted."""
        accepted = asyncio.Event()
        task = self._group.create_task(self._read(name, accepted, max_tokens=max_tokens, **arguments))
        async with asyncio.timeout(30):
            await accepted.wait()
        return task

    async def _read(self, name: str, accepted: asyncio.Event, *, prompt: str = "x", **arguments: Any) -> None:
        async with self._client.stream(model=MODEL, prompt=prompt, ignore_eos=True, **arguments) as stream:
            async for event in stream:
                if isinstance(event, Accepted):
                    accepted.set()
                elif isinstance(event, Started):
                    self.started.append(name)
                    self.worker_of[name] = event.worker
                elif isinstance(event, Done):
                    self.done.append(name)

    async def until_started(self, *names: str, timeout_s: float = 10.0) -> None:
        async def are_started() -> bool:
            return set(names) <= set(self.started)

        await until(are_started, timeout_s=timeout_s)


@contextlib.asynccontextmanager
async def sending(running: Deployment) -> AsyncIterator[Jobs]:
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        yield Jobs(running.client, group)


async def beat_of(running: Deployment, worker: str) -> Heartbeat:
    seen = await WorkersBucket(running.bus).get(worker)
    assert seen is not None
    assert seen.beat is not None
    return seen.beat


async def test_exactly_what_memory_carries_runs_and_the_next_starts_when_one_ends(broker_url: str, prefix: str) -> None:
    """MEM-4: 1,000 tokens, three requests of 400."""
    engine = sim(kv_tokens=1000, block_size=1, max_concurrency=8, tokens_per_second=400.0)
    async with deployment(broker_url, prefix) as running:
        await running.worker(engine, worker="w")
        async with sending(running) as jobs:
            for name in ("a", "b", "c"):
                await jobs.send(name, max_tokens=400)
            await jobs.until_started("a", "b")

            async def third_waits() -> bool:
                beat = await beat_of(running, "w")
                return (beat.running, beat.waiting, beat.kv_reserved_tokens) == (2, 1, 800)

            await until(third_waits)
            assert jobs.started == ["a", "b"]
            await jobs.until_started("c")
            assert jobs.done
    assert engine.num_running_peak == 2
    assert engine.num_started == 3


async def test_a_high_request_is_next_before_a_hundred_low_ones(broker_url: str, prefix: str) -> None:
    """QUE-1."""
    async with deployment(broker_url, prefix) as running:
        await running.worker(sim(tokens_per_second=100.0), worker="w", max_concurrency=1)
        async with sending(running) as jobs:
            await jobs.send("first", max_tokens=100)
            await jobs.until_started("first")
            async with asyncio.TaskGroup() as group:
                for number in range(100):
                    group.create_task(jobs.send(f"low{number}", max_tokens=1, priority="low"))
            await jobs.send("high", max_tokens=1, priority="high")
            assert jobs.started == ["first"]
            await jobs.until_started("high")
            assert jobs.started[:2] == ["first", "high"]


async def test_a_low_request_starts_within_the_ageing_limit_of_a_saturated_high_lane(
    broker_url: str, prefix: str
) -> None:
    async with deployment(broker_url, prefix, ageing_s=1.5) as running:
        await running.worker(sim(tokens_per_second=50.0), worker="w", max_concurrency=1)
        async with sending(running) as jobs:
            await jobs.send("high0", max_tokens=5, priority="high")
            for number in range(1, 60):
                await jobs.send(f"high{number}", max_tokens=5, priority="high")
            began = time.monotonic()
            await jobs.send("low", max_tokens=5, priority="low")
            await jobs.until_started("low")
            waited_s = time.monotonic() - began
            assert "high59" not in jobs.started, "the high lane was not saturated all the while"
            assert waited_s > 1.0
            assert waited_s < 1.5 + 2.5, "ageing limit, one job of 0.1 s, and the looks at heads"


async def test_a_small_request_is_backfilled_around_a_large_one_that_gets_its_room_in_time(
    broker_url: str, prefix: str
) -> None:
    """MEM-5: 200 tokens free, [900, 100] queued: the 100 starts now, the 900 within the ageing limit of its room."""
    async with deployment(broker_url, prefix, ageing_s=1.0) as running:
        engine = sim(kv_tokens=1000, block_size=1, max_concurrency=64, tokens_per_second=400.0)
        await running.worker(engine, worker="w")
        async with sending(running) as jobs:
            await jobs.send("first", max_tokens=800)  # 2 s
            await jobs.until_started("first")
            await jobs.send("large", max_tokens=900)
            for number in range(30):  # 0.25 s each, so that there is always one running
                await jobs.send(f"small{number}", max_tokens=100)
            await jobs.until_started("small0")
            assert "large" not in jobs.started
            await jobs.until_started("large", timeout_s=15)
            assert "first" in jobs.done
            assert any(f"small{number}" not in jobs.started for number in range(30)), "it had to wait for all of them"


async def test_short_requests_go_to_the_idle_worker_and_the_busy_one_holds_one(broker_url: str, prefix: str) -> None:
    """QUE-6."""
    async with deployment(broker_url, prefix, grace_s=0.2) as running:
        await running.worker(sim(tokens_per_second=10.0), worker="x", max_concurrency=1)
        async with sending(running) as jobs:
            long = await jobs.send("long", max_tokens=600)
            await jobs.until_started("long")
            await running.worker(sim(), worker="y", max_concurrency=1)
            for number in range(4):
                await jobs.send(f"short{number}", max_tokens=2)
            await jobs.until_started(*(f"short{number}" for number in range(4)))
            assert {jobs.worker_of[f"short{number}"] for number in range(4)} == {"y"}
            assert [held.consumer for held in (await beat_of(running, "x")).held] == [QueueName().consumer]
            long.cancel()


async def test_what_does_not_fit_here_goes_to_a_worker_where_it_starts(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running:
        await running.worker(sim(kv_tokens=100, block_size=1), worker="small")
        await running.worker(sim(kv_tokens=1000, block_size=1), worker="large")
        async with sending(running) as jobs:
            began = time.monotonic()
            for number in range(6):
                await jobs.send(f"job{number}", max_tokens=150)
            await jobs.until_started(*(f"job{number}" for number in range(6)))
            assert set(jobs.worker_of.values()) == {"large"}
            assert time.monotonic() - began < 5


async def test_a_request_held_beside_a_full_engine_moves_to_a_worker_that_gets_room(
    broker_url: str, prefix: str
) -> None:
    async with deployment(broker_url, prefix, grace_s=0.2) as running:
        await running.worker(sim(kv_tokens=1000, block_size=1, tokens_per_second=20.0), worker="x")
        async with sending(running) as jobs:
            long = await jobs.send("long", max_tokens=800)
            await jobs.until_started("long")
            await jobs.send("held", max_tokens=400)

            async def is_held() -> bool:
                return (await beat_of(running, "x")).waiting == 1

            await until(is_held)
            await running.worker(sim(kv_tokens=1000, block_size=1), worker="y")
            await jobs.until_started("held")
            assert jobs.worker_of["held"] == "y"
            long.cancel()


async def test_a_request_that_no_worker_could_hold_any_more_ends(broker_url: str, prefix: str) -> None:
    """Taken in while a larger worker was there; it is gone when the request is fetched."""
    async with deployment(broker_url, prefix) as running:
        await ensure_jobs_stream(running.bus, MODEL)
        stream = running.client.stream(model=MODEL, prompt="x", max_tokens=900)
        async with asyncio.timeout(120), stream:
            events = aiter(stream)
            assert isinstance(await anext(events), Accepted), "nobody is there who could say that it is too large"
            await running.worker(sim(kv_tokens=500, block_size=1), worker="small")
            with pytest.raises(JobFailedError) as failure:
                async for _ in events:
                    pass
        assert failure.value.code == "exceeds_capacity"

        async def is_gone() -> bool:
            return not any((await JobQueue(running.bus, MODEL).counts()).values())

        await until(is_gone)


async def test_small_requests_run_on_a_small_worker_behind_many_that_only_a_large_one_can_hold(
    broker_url: str, prefix: str
) -> None:
    async with deployment(broker_url, prefix, grace_s=0.2) as running:
        await running.worker(sim(kv_tokens=100, block_size=1), worker="small")
        await running.worker(sim(kv_tokens=1000, block_size=1, tokens_per_second=10.0), worker="large")
        async with sending(running) as jobs:
            large = [await jobs.send(f"large{number}", max_tokens=900) for number in range(16)]

            async def all_are_held() -> bool:
                return len((await beat_of(running, "small")).held) >= 8

            await until(all_are_held)
            assert (await beat_of(running, "small")).waiting == 0
            for number in range(10):
                await jobs.send(f"small{number}", max_tokens=2)
                await jobs.until_started(f"small{number}", timeout_s=2.0)
                assert jobs.worker_of[f"small{number}"] == "small"
            for task in large:
                task.cancel()


async def test_what_only_a_large_worker_can_run_goes_on_when_that_one_starts_again(
    broker_url: str, prefix: str
) -> None:
    async with deployment(broker_url, prefix) as running:
        await running.monitor()
        await running.worker(sim(kv_tokens=100, block_size=1), worker="small")
        large = await running.worker(sim(kv_tokens=1000, block_size=1, tokens_per_second=100.0), worker="large")
        async with sending(running) as jobs:
            await jobs.send("long", max_tokens=300)
            await jobs.until_started("long")
            await large.kill()

            async def is_kept() -> bool:
                return len((await beat_of(running, "small")).held) == 1

            await until(is_kept)
            assert (await beat_of(running, "small")).waiting == 0, "it takes no place from those that can run there"
            await running.worker(sim(kv_tokens=1000, block_size=1), worker="again")
        assert jobs.done == ["long"]
        assert jobs.worker_of["long"] == "again"


async def test_what_a_starting_worker_may_be_able_to_run_is_taken_in(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running:
        await running.worker(sim(kv_tokens=100, block_size=1), worker="small")
        await running.worker(sim(kv_tokens=1000, block_size=1, start_s=2.0), worker="large", is_awaited=False)

        async def is_starting() -> bool:
            seen = await WorkersBucket(running.bus).get("large")
            return seen is not None and seen.beat is not None and seen.beat.state == "Starting"

        await until(is_starting)
        async with sending(running) as jobs:
            await jobs.send("job", max_tokens=500)
            assert (await beat_of(running, "large")).state == "Starting"
        assert jobs.worker_of == {"job": "large"}


async def test_what_a_lending_worker_cannot_run_is_held_in_bounds_and_its_own_starts(
    broker_url: str, prefix: str
) -> None:
    async with deployment(broker_url, prefix, grace_s=0.2) as running:
        await ensure_provisioned(running.bus)
        await configure(running, f'[models.{MODEL}]\npools = [{{ name = "chat", lends_to = ["default"] }}]\n')
        await ensure_jobs_stream(running.bus, MODEL)
        async with sending(running) as jobs:
            large = [await jobs.send(f"large{number}", max_tokens=900) for number in range(100)]
            await running.worker(sim(kv_tokens=100, block_size=1), worker="lender", pool="chat")

            async def is_keeping() -> bool:
                return len((await beat_of(running, "lender")).held) >= 64

            await until(is_keeping)
            await jobs.send("own", max_tokens=1, pool="chat")
            await jobs.until_started("own", timeout_s=2.0)
            assert len((await beat_of(running, "lender")).held) < 64 + 16
            for task in large:
                task.cancel()


async def test_above_the_high_water_mark_nothing_is_fetched(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, grace_s=0.5) as running:
        engine = sim(kv_tokens=1000, block_size=1, max_concurrency=4)
        usage = EngineUsage(kv_usage_ratio=0.96)

        async def told() -> EngineUsage:
            return usage

        engine.usage = told  # type: ignore[method-assign]
        await running.worker(engine, worker="w")

        async def is_busy() -> bool:
            beat = await beat_of(running, "w")
            return beat.state == "Busy" and beat.effective_concurrency == 0

        await until(is_busy)
        async with sending(running) as jobs:
            await jobs.send("a", max_tokens=2)
            await asyncio.sleep(0.5)  # three looks around of the worker; nothing may come of them
            assert jobs.started == []
            assert (await beat_of(running, "w")).held == ()
            usage = EngineUsage(kv_usage_ratio=0.9)
            await asyncio.sleep(0.6)
            assert jobs.started == []
            usage = EngineUsage(kv_usage_ratio=0.5)
            await jobs.until_started("a")


async def test_repeated_beginnings_land_where_they_are_warm(
    broker_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others stand aside for ten times as long as they do: a busy machine may be too late for its own hints."""
    monkeypatch.setattr(puller, "_AFTER_PREFERRED_S", 10 * puller._AFTER_PREFERRED_S)
    async with deployment(broker_url, prefix) as running:
        for number in range(3):
            await running.worker(sim(), worker=f"w{number}")
        nums_warm: list[int] = []
        while not nums_warm or (nums_warm[-1] < 0.8 * 30 and len(nums_warm) < 4):
            nums_warm.append(await num_warm_of_30(running, seed=len(nums_warm)))
        assert max(nums_warm) >= 0.8 * 30, nums_warm


async def num_warm_of_30(running: Deployment, *, seed: int) -> int:
    """How many requests of six beginnings, each asked five times more, ran where their beginning had been before."""
    beginnings = [f"{seed} {number} " + "it was the best of times " * 60 for number in range(6)]

    async def ask(beginning: str, turn: int) -> str:
        async with running.client.stream(model=MODEL, prompt=f"{beginning} {turn}", max_tokens=2) as stream:
            worker = ""
            async for event in stream:
                worker = event.worker if isinstance(event, Started) else worker
            return worker

    warm = {beginning: {await ask(beginning, 0)} for beginning in beginnings}

    async def is_told() -> bool:
        return sum([len((await beat_of(running, f"w{number}")).prefixes) for number in range(3)]) >= 6 * (seed + 1)

    await until(is_told)
    await asyncio.sleep(1.0)  # a router lists the workers twice a second
    num_warm = 0
    for turn in range(1, 6):
        for beginning in beginnings:
            worker = await ask(beginning, turn)
            num_warm += worker in warm[beginning]
            warm[beginning].add(worker)
    return num_warm


async def configure(running: Deployment, text: str) -> None:
    """Write it, and wait until the parts that run have had the time they may take to follow."""
    await ensure_provisioned(running.bus)
    bucket = Bucket(running.bus, running.bus.names.config_bucket)
    for key, entry in entries_of(decode_file(text, is_json=False)).items():
        assert isinstance(await bucket.put(key, encode_entry(entry), expected_revision=0), Stored)
    await asyncio.sleep(1.5)


@contextlib.asynccontextmanager
async def tenants(running: Deployment) -> AsyncIterator[tuple[Client, Client]]:
    """Clients of the tenants a and b."""
    async with (
        headrace.client.connect(running.url, tenant="a", settings=running.settings) as a,
        headrace.client.connect(running.url, tenant="b", settings=running.settings) as b,
    ):
        yield a, b


async def test_a_tenant_that_comes_late_takes_turns(broker_url: str, prefix: str) -> None:
    """QUE-3: A queues 50, then B queues 5 of equal size; B's last starts by position 11."""
    async with deployment(broker_url, prefix) as running:
        await configure(running, "[tenants.a]\n[tenants.b]\n")
        async with (
            tenants(running) as (a, b),
            asyncio.timeout(120),
            asyncio.TaskGroup() as group,
        ):
            await running.worker(sim(tokens_per_second=100.0), worker="w", max_concurrency=1)
            order: list[str] = []
            of_a, of_b = Jobs(a, group), Jobs(b, group)
            of_a.started = of_b.started = order
            await of_a.send("first", max_tokens=200)
            await of_a.until_started("first")
            for number in range(50):
                await of_a.send(f"a{number}", max_tokens=5)
            for number in range(5):
                await of_b.send(f"b{number}", max_tokens=5)
            await of_b.until_started("b4", timeout_s=30)
            assert order.index("b4") <= 11, "counted from the one that ran as they came"


async def test_weights_of_three_to_one_give_tokens_three_to_one(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running:
        await configure(running, "[tenants.a]\nweight = 3\n[tenants.b]\n")
        async with (
            tenants(running) as (a, b),
            asyncio.timeout(90),
            asyncio.TaskGroup() as group,
        ):
            await running.worker(sim(tokens_per_second=1000.0), worker="w", max_concurrency=2)
            order: list[str] = []
            of_a, of_b, of_others = Jobs(a, group), Jobs(b, group), Jobs(running.client, group)
            of_a.started = of_b.started = order
            for number in range(2):
                await of_others.send(f"first{number}", max_tokens=3000)
            await of_others.until_started("first0", "first1")
            for number in range(120):
                await of_a.send(f"a{number}", max_tokens=(10, 30, 20)[number % 3])
                await of_b.send(f"b{number}", max_tokens=(20, 10, 30)[number % 3])

            async def are_enough() -> bool:
                return len(order) >= 140

            await until(are_enough, timeout_s=60)
            served = {"a": 0, "b": 0}
            for name in order[:140]:
                number = int(name[1:])
                served[name[0]] += ((10, 30, 20) if name[0] == "a" else (20, 10, 30))[number % 3]
            assert 2.7 <= served["a"] / served["b"] <= 3.3


async def test_a_pool_lends_its_workers_only_while_its_own_queues_are_empty(broker_url: str, prefix: str) -> None:
    lending = f'[models.{MODEL}]\npools = [{{ name = "chat", lends_to = ["batch"] }}, {{ name = "batch" }}]\n'
    async with deployment(broker_url, prefix) as running:
        await configure(running, lending)
        await running.worker(sim(tokens_per_second=100.0), worker="chat1", pool="chat", max_concurrency=1)
        async with sending(running) as jobs:
            await jobs.send("lent", max_tokens=100, pool="batch")
            await jobs.until_started("lent")
            assert jobs.worker_of["lent"] == "chat1"
            for number in range(3):
                await jobs.send(f"batch{number}", max_tokens=2, pool="batch")
            for number in range(3):
                await jobs.send(f"chat{number}", max_tokens=2, pool="chat")
            await jobs.until_started("batch2")
            assert jobs.started[1:4] == ["chat0", "chat1", "chat2"]


async def test_what_only_a_lender_can_hold_goes_to_it(broker_url: str, prefix: str) -> None:
    """A router takes it in, for a worker that is lent can run it; so must no worker of the pool itself refuse it."""
    lending = f'[models.{MODEL}]\npools = [{{ name = "large", lends_to = ["default"] }}]\n'
    async with deployment(broker_url, prefix) as running:
        await configure(running, lending)
        await running.worker(sim(), worker="small", kv_tokens=100, max_concurrency=4)
        await running.worker(sim(), worker="large", pool="large", kv_tokens=10_000, max_concurrency=4)
        async with sending(running) as jobs:
            for number in range(5):
                await jobs.send(f"large{number}", max_tokens=200)
                await jobs.until_started(f"large{number}")
            assert set(jobs.worker_of.values()) == {"large"}


async def test_long_prompts_keep_short_chats_waiting_no_longer_than_one_job(broker_url: str, prefix: str) -> None:
    """Two pools by rule: a burst of long prompts over steady short chats."""
    rules = f'[models.{MODEL}]\npools = [{{ name = "long" }}]\nrules = [{{ pool = "long", min_prompt_tokens = 200 }}]\n'
    async with deployment(broker_url, prefix) as running:
        await configure(running, rules)
        await running.worker(sim(tokens_per_second=200.0), worker="short", max_concurrency=2)
        await running.worker(sim(tokens_per_second=200.0), worker="long", pool="long", max_concurrency=1)
        async with sending(running) as jobs:
            for number in range(6):
                await jobs.send(f"long{number}", max_tokens=200, prompt="word " * 400)  # 1 s each
            waits: list[float] = []
            for number in range(10):
                began = time.monotonic()
                await jobs.send(f"chat{number}", max_tokens=4)
                await jobs.until_started(f"chat{number}")
                waits.append(time.monotonic() - began)
            assert {jobs.worker_of[f"chat{number}"] for number in range(10)} == {"short"}
            assert max(waits) < 1.0, "less than one long job"
            assert set(jobs.worker_of.values()) == {"short", "long"}


async def test_a_request_without_a_limit_reserves_the_default_and_the_engine_is_sent_it(
    broker_url: str, prefix: str
) -> None:
    engine = sim(kv_tokens=4000, block_size=1, tokens_per_second=5.0)
    sent: list[int] = []
    generate = engine.generate

    def noting(request: Any, *, max_tokens: int, **others: Any) -> Any:
        if not others["request_id"].startswith(PROBE_PREFIX):
            sent.append(max_tokens)
        return generate(request, max_tokens=max_tokens, **others)

    engine.generate = noting  # type: ignore[method-assign]
    async with deployment(broker_url, prefix, grace_s=0.2) as running:
        await running.worker(engine, worker="w")
        chat = [{"role": "user", "content": "hi"}]
        async with running.client.stream(model=MODEL, messages=chat) as stream:
            async for event in stream:
                if isinstance(event, Started):
                    break
            num_prompt = 5  # one word, and four for the message

            async def is_reserved() -> bool:
                return (await beat_of(running, "w")).kv_reserved_tokens == num_prompt + 1024 - 1

            await until(is_reserved)
            assert sent == [1024]
            await stream.cancel()


async def test_little_free_memory_beside_an_engine_that_took_its_own_changes_nothing(
    broker_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Memory(total_bytes=24 << 30, free_bytes=1 << 20, source="system")
    monkeypatch.setattr("headrace.worker.memory.read_host_memory", lambda: full)
    async with deployment(broker_url, prefix) as running:
        await running.worker(sim(kv_tokens=1000, block_size=1, tokens_per_second=400.0), worker="w")
        assert (await beat_of(running, "w")).memory_free_bytes == 1 << 20
        async with sending(running) as jobs:
            for name in ("a", "b", "c"):
                await jobs.send(name, max_tokens=400)
            await jobs.until_started("a", "b")

            async def third_waits() -> bool:
                beat = await beat_of(running, "w")
                return (beat.running, beat.waiting) == (2, 1)

            await until(third_waits)
            await jobs.until_started("c")


async def test_the_eleventh_of_ten_is_refused_and_ten_are_held(broker_url: str, prefix: str) -> None:
    """QUE-5: a limit of 10 with the only slot blocked."""
    async with deployment(broker_url, prefix, queue_limit=10, grace_s=0.2) as running:
        await running.worker(sim(tokens_per_second=5.0), worker="w", max_concurrency=1)
        async with sending(running) as jobs:
            tasks = [await jobs.send(f"job{number}", max_tokens=600) for number in range(10)]
            await jobs.until_started("job0")
            with pytest.raises(RequestError) as refused:
                await running.client.complete(model=MODEL, prompt="x", max_tokens=1)
            assert refused.value.code == "queue_full"
            assert (refused.value.retry_after_s or 0) >= 1
            assert sum((await JobQueue(running.bus, MODEL).counts()).values()) == 10
            for task in tasks:
                task.cancel()
