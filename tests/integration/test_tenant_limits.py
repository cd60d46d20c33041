"""Limits of tenants over the real broker: routers agree on them, and nothing that is refused counts."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator

import pytest

import headrace.router.inflight
from headrace.bus.configuration import ConfigView
from headrace.bus.connection import Bus, Refused, Stored, StoreResult, connect
from headrace.bus.jobqueue import JobQueue
from headrace.bus.occupancy import last_sequence, num_messages
from headrace.bus.usage import UsageBucket
from headrace.router.inflight import InFlight
from headrace.router.limits import Permit, TenantLimits
from headrace.schemas.config import Config, TenantConfig
from headrace.schemas.jobs import Job
from headrace.schemas.refusals import Refusal
from headrace.schemas.subjects import JobId, QueueName, Tenant
from tests.deployment import until


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@contextlib.asynccontextmanager
async def routers(bus: Bus, number: int, config: TenantConfig, clock: Clock) -> AsyncIterator[list[TenantLimits]]:
    """The limits of `number` routers, each with a connection of its own."""
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for _ in range(number):
            own = await stack.enter_async_context(connect(bus.url, bus.settings, name="router"))
            view = ConfigView(own)
            view.config = Config(tenants={"a": config})
            made.append(TenantLimits(own, view, now=clock))
        yield made


@pytest.mark.parametrize("share", [0.5, 0.6, 0.95])
async def test_two_routers_pass_a_hundred_a_minute_however_they_are_spread(bus: Bus, share: float) -> None:
    clock, chance = Clock(), random.Random(7)
    async with routers(bus, 2, TenantConfig(requests_per_minute=100), clock) as (first, second):
        passed: list[float] = []
        for _ in range(30):  # over two minutes, in bursts
            asked = [first if chance.random() < share else second for _ in range(15)]
            results = await asyncio.gather(*(limits.admit("a", 10) for limits in asked))
            passed += [clock.now for result in results if isinstance(result, Permit)]
            refused = [result for result in results if isinstance(result, Refusal)]
            assert all(
                refusal.code == "rate_limited" and 1 <= (refusal.retry_after_s or 0) <= 61 for refusal in refused
            )
            clock.now += chance.uniform(0, 8)
        start = passed[0]
        assert 100 <= sum(at < start + 60 for at in passed) <= 105
        for at in passed:
            assert sum(at <= other < at + 60 for other in passed) <= 105


async def test_a_refusal_for_another_reason_gives_its_permit_to_others_too(bus: Bus) -> None:
    clock = Clock()
    async with routers(bus, 2, TenantConfig(requests_per_minute=5), clock) as (first, second):
        permits = [await first.admit("a", 1) for _ in range(5)]
        assert isinstance(await second.admit("a", 1), Refusal)
        for permit in permits:
            assert isinstance(permit, Permit)
            first.give_back(permit)
        assert isinstance(await first.admit("a", 1), Permit)  # its own at once
        clock.now += 1
        await first.settle("a")
        await until_admitted(second, 4)
        assert isinstance(await second.admit("a", 1), Refusal)


async def until_admitted(limits: TenantLimits, number: int) -> None:
    """The router believes a full record for a moment."""
    for _ in range(number):
        await until(lambda: _is_admitted(limits))


async def _is_admitted(limits: TenantLimits) -> bool:
    return isinstance(await limits.admit("a", 1), Permit)


async def test_tokens_are_limited_too_and_the_record_tells_what_was_used(bus: Bus) -> None:
    clock = Clock()
    config = TenantConfig(tokens_per_minute=1_000, requests_per_minute=50)
    async with routers(bus, 2, config, clock) as (first, second):
        assert isinstance(await first.admit("a", 600), Permit)
        refused = await second.admit("a", 500)
        assert isinstance(refused, Refusal)
        assert refused.code == "rate_limited"
        assert isinstance(await second.admit("a", 400), Permit)
        too_large = await first.admit("a", 1_001)
        assert isinstance(too_large, Refusal)
        assert too_large.code == "invalid_value"
        used = (await UsageBucket(bus).get("a")).usage.used(clock.now)
        assert (used.requests, used.tokens) == (2, 1_000)
        assert await first.admit("unlimited", 10**9) is None


async def test_no_request_of_an_unlimited_tenant_asks_the_broker(bus: Bus) -> None:
    limits = TenantLimits(bus, ConfigView(bus))
    sent = bus.nc.stats["out_msgs"]
    assert await limits.admit("a", 10) is None
    assert bus.nc.stats["out_msgs"] == sent


def job_of(bus: Bus, number: int) -> Job:
    return Job(
        tenant=Tenant("a"),
        job=JobId(f"j{number}"),
        op="chat",
        model="m",
        body=b"{}",
        body_hash="h",
        accepted_at=bus.clock.now(),
        queue_timeout_s=60,
        deadline_s=600,
        need_tokens=1,
    )


async def test_who_waited_long_for_its_turn_may_still_lose_a_race(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headrace.router.inflight, "_FOR_S", 1.0)
    lost = Refused(10071, "wrong last sequence")
    assert lost.is_lost_race
    fates: Iterator[tuple[float, StoreResult]] = iter([(1.1, Stored(1)), (0.0, lost), (0.0, Stored(2))])

    class Slow(JobQueue):
        async def publish(self, *_: object, **__: object) -> StoreResult:
            took_s, fate = next(fates)
            await asyncio.sleep(took_s)
            return fate

    flight, queue = InFlight(bus), Slow(bus, "m")

    async def publish(number: int) -> StoreResult | None:
        return await flight.publish(queue, job_of(bus, number), QueueName(queue="a"), {}, limit=7)

    first, second = await asyncio.gather(publish(1), publish(2))
    assert (first, second) == (Stored(1), Stored(2))


async def test_requests_in_flight_are_exact_under_concurrent_publishes_of_two_routers(bus: Bus) -> None:
    async with connect(bus.url, bus.settings, name="router") as other:
        queues = [JobQueue(bus, "m"), JobQueue(other, "m")]
        flights = [InFlight(bus), InFlight(other)]

        async def publish(number: int) -> bool:
            job = job_of(bus, number)
            queue = QueueName(pool=("default", "other")[number % 2], lane=("high", "low")[number // 2 % 2], queue="a")
            router = number // 4 % 2
            result = await flights[router].publish(queues[router], job, queue, {}, limit=7)
            assert result is None or isinstance(result, Stored)
            return result is not None

        results = await asyncio.gather(*(publish(number) for number in range(40)))
        assert sum(results) == 7
        assert await num_messages(bus, "m", "a") == 7
        assert await num_messages(bus, "m", "b") == await last_sequence(bus, "m", "b") == 0
