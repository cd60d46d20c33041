"""Settling over the real broker: each payment comes back once, whoever sent what twice and whatever came first."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from headrace.bus.configuration import ConfigView
from headrace.bus.connection import Bus, Stored, connect
from headrace.bus.joblog import JobLog
from headrace.bus.usage import UsageBucket
from headrace.router.limits import TenantLimits
from headrace.router.settlement import Paid, Settlement
from headrace.schemas import events
from headrace.schemas.config import Config, TenantConfig
from headrace.schemas.refusals import Refusal
from headrace.schemas.usage import Used
from tests.deployment import until

LIMITS = TenantConfig(requests_per_minute=100, tokens_per_minute=10_000)


class Router:
    """What settles in one router."""

    def __init__(self, bus: Bus) -> None:
        view = ConfigView(bus)
        view.config = Config(tenants={"a": LIMITS})
        self.limits = TenantLimits(bus, view)
        self.settlement = Settlement(bus, self.limits)

    async def admit(self, job: str) -> Paid:
        paid = await self.settlement.admit("a", job, num_tokens=100, num_new=60, is_streaming=True)
        assert isinstance(paid, Paid)
        return paid


@contextlib.asynccontextmanager
async def routers(bus: Bus, number: int) -> AsyncIterator[list[Router]]:
    """Routers that settle and write back, each with a connection of its own."""
    async with contextlib.AsyncExitStack() as stack:
        made = [
            Router(await stack.enter_async_context(connect(bus.url, bus.settings, name="router")))
            for _ in range(number)
        ]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run()) for each in made for run in (each.settlement.run, each.limits.run)]
            yield made
            for task in tasks:
                task.cancel()


async def cancel(bus: Bus, job: str) -> None:
    """End a job that no worker has started."""
    end = events.ended("cancelled", job, attempt=1, offset=0, error=None)
    assert isinstance(await JobLog(bus).append("a", end, expected=0, ttl_s=600), Stored)


async def until_used(bus: Bus, used: Used) -> None:
    async def is_it() -> bool:
        return (await UsageBucket(bus).get("a")).usage.used(bus.clock.now()) == used

    await until(is_it)


async def test_a_job_that_ends_before_it_is_known_to_be_taken_in_is_settled_too(bus: Bus) -> None:
    async with routers(bus, 1) as (router,):
        early, late = await router.admit("early"), await router.admit("late")
        await cancel(bus, "early")
        await until(lambda: _is_heard(router, "early"))
        await until_used(bus, Used(2, 200))
        router.settlement.take_in(early)
        await until_used(bus, Used(1, 100))
        router.settlement.take_in(late)
        await cancel(bus, "late")
        await until_used(bus, Used(0, 0))


async def _is_heard(router: Router, job: str) -> bool:
    return ("a", job) in router.settlement._ended


async def test_a_request_sent_twice_gives_back_what_it_paid_twice_and_no_more(bus: Bus) -> None:
    async with routers(bus, 2) as (first, second):
        others = [await first.admit(f"other-{number}") for number in range(5)]
        taken, again, there_too = await first.admit("j"), await first.admit("j"), await second.admit("j")
        first.settlement.take_in(taken)
        await cancel(bus, "j")
        await until(lambda: _is_heard(second, "j"))
        for router, paid in ((first, again), (second, there_too)):  # these find the job there
            router.settlement.give_back(paid)
        await until_used(bus, Used(len(others), 100 * len(others)))
        for _ in range(3):  # said again, by whomever
            await JobLog(bus).announce_end("a", "j")
        first.settlement.take_in(others[0])
        await cancel(bus, "other-0")
        await until_used(bus, Used(4, 400))


async def test_a_notice_of_an_end_that_is_none_changes_nothing(bus: Bus) -> None:
    async with routers(bus, 1) as (router,):
        running, ended = await router.admit("running"), await router.admit("ended")
        for paid in (running, ended):
            router.settlement.take_in(paid)
        await JobLog(bus).announce_end("a", "running")
        await until(lambda: _is_heard(router, "running"))
        await cancel(bus, "ended")
        await until_used(bus, Used(1, 100))
        await cancel(bus, "running")
        await until_used(bus, Used(0, 0))


async def test_a_tenant_without_limits_is_neither_heard_nor_kept(bus: Bus) -> None:
    router = Router(bus)
    router.limits._view.config = Config()
    assert await router.settlement.admit("a", "j", num_tokens=1, num_new=1, is_streaming=True) is None
    assert not router.settlement._heard
    assert not router.settlement._known


async def test_what_is_older_than_a_minute_or_too_much_is_forgotten(bus: Bus) -> None:
    router = Router(bus)
    now = bus.clock.now()
    router.settlement._now = router.limits._now = lambda: now
    await router.admit("one")
    now += 59
    await router.admit("two")
    assert [job for _, job in router.settlement._known] == ["one", "two"]
    now += 3
    await router.admit("three")
    assert [job for _, job in router.settlement._known] == ["two", "three"]
    refused = await router.settlement.admit("a", "large", num_tokens=20_000, num_new=1, is_streaming=True)
    assert isinstance(refused, Refusal)
    assert len(router.settlement._known) == 2
    await router.settlement._heard["a"].unsubscribe()
