"""Limits of tenants over HTTP, each with its key: refusals cost nothing, and aborts give back what they did not use."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.joblog import JobLog
from headrace.bus.keyvalue import Bucket
from headrace.bus.occupancy import num_messages
from headrace.bus.provision import provision
from headrace.bus.usage import UsageBucket
from headrace.schemas.config import TenantConfig
from headrace.schemas.config_text import encode_entry
from headrace.schemas.keys import ApiKey, hash_of
from headrace.schemas.usage import Used
from tests.deployment import MODEL, Deployment, deployment, sim, until

ASKED: dict[str, Any] = {"model": MODEL, "prompt": "hello there", "max_tokens": 2}
NUM_ABORTS = 200


class Asking:
    """Asks one gateway as the tenants `a`, which has limits, and `b`, which has none."""

    def __init__(self, running: Deployment, url: str, session: aiohttp.ClientSession) -> None:
        self.running = running
        self._url = url
        self._session = session

    def post(self, tenant: str, *, job: str | None = None, **fields: Any) -> Any:
        headers = {"Authorization": f"Bearer key-{tenant}"} | ({"X-Headrace-Id": job} if job is not None else {})
        return self._session.post(f"{self._url}/v1/completions", json={**ASKED, **fields}, headers=headers)

    async def outcome(self, tenant: str, **fields: Any) -> str:
        """`ok`, or the code of the refusal."""
        async with self.post(tenant, **fields) as response:
            body = await response.json()
            if response.status == 200:
                return "ok"
            if response.status == 429:
                assert int(response.headers["retry-after"]) >= 1
            return str(body["error"]["code"])

    async def outcomes(self, tenant: str, number: int, **fields: Any) -> Counter[str]:
        return Counter(await asyncio.gather(*(self.outcome(tenant, **fields) for _ in range(number))))

    async def leave(self, *, after_chunks: int = 0, **fields: Any) -> None:
        """Ask as `a`, and leave after that many chunks; with none, once it is accepted."""
        async with self.post("a", **{"stream": True, **fields}) as response:
            assert response.status == 200, await response.text()
            while after_chunks and (line := await response.content.readline()):
                after_chunks -= line.startswith(b"data: {")
            response.close()

    async def used(self) -> Used:
        """What the routers say together that `a` has used of its limits a minute."""
        return (await UsageBucket(self.running.bus).get("a")).usage.used(self.running.bus.clock.now())

    async def until_used(self, requests: int, tokens: int) -> None:
        """Wait for exactly that; what routers hold ready is written back within two seconds."""

        async def is_it() -> bool:
            return await self.used() == Used(requests, tokens)

        try:
            await until(is_it)
        except TimeoutError:
            pytest.fail(f"{await self.used()} is used")


@contextlib.asynccontextmanager
async def asking(broker_url: str, prefix: str, **limits: Any) -> AsyncIterator[Asking]:
    """Two routers and a gateway, and no worker yet; `limits` are those of the tenant `a`."""
    async with deployment(broker_url, prefix, routers=0) as running, aiohttp.ClientSession() as session:
        await provision(running.bus, models=(MODEL,))
        for tenant, entry in (("a", TenantConfig(**limits, keys=(_key("a"),))), ("b", TenantConfig(keys=(_key("b"),)))):
            bucket = Bucket(running.bus, running.bus.names.config_bucket)
            await bucket.put(f"tenants.{tenant}", encode_entry(entry), expected_revision=0)
        for _ in range(2):
            await running.router()
        gateway = await running.gateway()
        yield Asking(running, gateway.url, session)


def _key(tenant: str) -> ApiKey:
    return ApiKey(name="k", sha256=hash_of(f"key-{tenant}".encode()))


async def test_a_tenant_at_its_limit_is_refused_and_another_is_not(broker_url: str, prefix: str) -> None:
    async with asking(broker_url, prefix, requests_per_minute=10) as tenants:
        await tenants.running.worker(sim(tokens_per_second=0))
        assert await tenants.outcomes("a", 15) == {"ok": 10, "rate_limited": 5}
        assert await tenants.outcomes("b", 15) == {"ok": 15}
        assert await tenants.outcome("a") == "rate_limited"


async def test_refused_requests_use_nothing(broker_url: str, prefix: str) -> None:
    async with asking(broker_url, prefix, requests_per_minute=10, tokens_per_minute=1000, models=(MODEL,)) as tenants:
        await tenants.running.worker(sim(tokens_per_second=0))
        for _ in range(12):
            assert await tenants.outcome("a", temperature="hot") == "invalid_value"
            assert await tenants.outcome("a", model="other") == "model_not_found"
            assert await tenants.outcome("a", max_tokens=100_000) == "context_length_exceeded"
            assert await tenants.outcome("a", max_tokens=2_000) == "invalid_value"  # above the limit by itself
        assert await tenants.outcomes("a", 10) == {"ok": 10}
        assert await tenants.outcome("a") == "rate_limited"


async def test_what_is_left_in_the_queue_gives_back_all_of_it(broker_url: str, prefix: str) -> None:
    async with asking(broker_url, prefix, requests_per_minute=5, tokens_per_minute=10_000) as tenants:
        for _ in range(6):  # thirty requests, of five a minute
            await asyncio.gather(*(tenants.leave(max_tokens=1_000) for _ in range(5)))
            await tenants.until_used(0, 0)
        await tenants.running.worker(sim(tokens_per_second=0))
        assert await tenants.outcomes("a", 6) == {"ok": 5, "rate_limited": 1}


async def test_an_answer_gives_back_the_tokens_it_did_not_have(broker_url: str, prefix: str) -> None:
    async with asking(broker_url, prefix, tokens_per_minute=2_000) as tenants:
        await tenants.running.worker(sim(tokens_per_second=0, default_tokens=7))
        for number, is_streaming in enumerate((False, True, False, True), start=1):
            async with tenants.post("a", max_tokens=1_500, stream=is_streaming) as response:
                assert response.status == 200
                await response.read()
            await tenants.until_used(number, number * await _tokens_of_one(tenants, 7))


async def _tokens_of_one(tenants: Asking, num_new: int) -> int:
    """What an answer of that many tokens costs, by what the same request without a limit of its own pays at first."""
    return (len(str(ASKED["prompt"])) + 3) // 4 + num_new - 1


async def test_a_stream_that_is_left_gives_back_what_was_not_generated(broker_url: str, prefix: str) -> None:
    async with asking(broker_url, prefix, requests_per_minute=2, tokens_per_minute=2_000) as tenants:
        await tenants.running.worker(sim(tokens_per_second=50, default_tokens=5_000))
        await tenants.leave(max_tokens=1_900, after_chunks=5)

        async def is_given_back() -> bool:
            used = await tenants.used()
            return used.requests == 1 and 5 <= used.tokens <= 200

        await until(is_given_back)
        assert await tenants.outcome("a", max_tokens=5) == "ok"
        assert await tenants.outcome("a") == "rate_limited"  # something was generated, so the first counts


async def test_what_failed_before_its_first_token_gives_back_all_of_it(broker_url: str, prefix: str) -> None:
    async with asking(broker_url, prefix, requests_per_minute=3, tokens_per_minute=3_500) as tenants:
        await tenants.running.worker(sim(error_after=0))
        for number in (3, 1):
            outcomes = await asyncio.gather(*(tenants.outcome("a", max_tokens=1_000) for _ in range(number)))
            assert {"ok", "rate_limited"}.isdisjoint(outcomes)
            await tenants.until_used(0, 0)


async def test_two_hundred_aborts_leave_nothing_in_flight(broker_url: str, prefix: str) -> None:  # OBS-5
    limits = {"max_in_flight": NUM_ABORTS, "requests_per_minute": 1_000, "tokens_per_minute": 100_000_000}
    async with asking(broker_url, prefix, **limits) as tenants:
        engine = sim(tokens_per_second=20, default_tokens=4_000, ttft_s=0.1)
        await tenants.running.worker(engine, max_concurrency=8)
        jobs = [f"j{number}" for number in range(NUM_ABORTS)]
        await asyncio.gather(
            *(tenants.leave(job=job, max_tokens=4_000, after_chunks=number < 4) for number, job in enumerate(jobs))
        )
        bus = tenants.running.bus

        async def is_idle() -> bool:
            beats = (await WorkersBucket(bus).list()).values()
            held = [request for seen in beats if seen.beat is not None for request in seen.beat.held]
            return not held and engine.num_running == 0 and await num_messages(bus, MODEL, "a") == 0

        await until(is_idle)
        states = [await JobLog(bus).state("a", job) for job in jobs]
        assert {state.state for state in states} == {"cancelled"}
        began = sum(state.num_tokens > 0 for state in states)
        assert 4 <= began < NUM_ABORTS

        async def only_those_count() -> bool:
            return (await tenants.used()).requests == began

        await until(only_those_count)
        assert await tenants.outcomes("a", NUM_ABORTS, max_tokens=1) == {"ok": NUM_ABORTS}
