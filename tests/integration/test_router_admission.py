"""What a configured router takes in, where it puts it, and what it refuses, over real routers and a real broker."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import nats
import pytest_asyncio
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from headrace.bus.connection import Stored
from headrace.bus.jobqueue import JobQueue
from headrace.bus.keyvalue import Bucket
from headrace.bus.provision import ensure_jobs_stream
from headrace.client import Done
from headrace.schemas.config import AliasConfig, AliasTarget, ModelConfig, PoolConfig, PoolRule, TenantConfig
from headrace.schemas.config_text import Entry, encode_entry
from headrace.schemas.replicas import Autoscale, ReplicaGroup
from headrace.schemas.subjects import QueueName
from tests.deployment import MODEL, Deployment, deployment, header, sim, until

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 3}
OTHER = "other-model"


@pytest_asyncio.fixture
async def running(broker_url: str, prefix: str) -> AsyncIterator[Deployment]:
    """Two routers, and a model without a worker."""
    async with deployment(broker_url, prefix, routers=2) as started:
        await ensure_jobs_stream(started.bus, MODEL)
        yield started


@pytest_asyncio.fixture
async def nc(broker_url: str) -> AsyncIterator[NatsClient]:
    connection = await nats.connect(broker_url)
    yield connection
    await connection.close()


async def configure(running: Deployment, nc: NatsClient, **entries: Entry) -> None:
    """Write keys (a dot is `__`) and wait until both routers act on a last one, which is a pool to refuse or not."""
    bucket, last = Bucket(running.bus, running.bus.names.config_bucket), 0
    for name, entry in entries.items():
        key = name.replace("__", ".").replace("_model", "-model")
        seen = await bucket.get(key)
        result = await bucket.put(key, encode_entry(entry), expected_revision=seen.revision if seen else 0)
        assert isinstance(result, Stored)
        last = result.sequence
    mark = ModelConfig(pools=(PoolConfig(name=f"mark-{last}"),))
    result = await bucket.put(f"models.mark-{last}", encode_entry(mark), expected_revision=0)
    assert isinstance(result, Stored)
    in_a_row = 0
    async with asyncio.timeout(30):
        while in_a_row < 16:  # any router may get it: two that know answer like this always
            message = await ask(running, nc, b"{}", model=f"mark-{last}", headers={"Headrace-Pool": f"mark-{last}"})
            knows = json.loads(message.data)["error"]["code"] == "invalid_value" and b"messages" in message.data
            in_a_row = in_a_row + 1 if knows else 0


async def ask(
    running: Deployment,
    nc: NatsClient,
    body: bytes | dict[str, Any],
    *,
    model: str = MODEL,
    tenant: str = "default",
    op: str = "chat",
    headers: dict[str, str] | None = None,
) -> Msg:
    """The first answer to a request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await nc.request(running.bus.names.infer(tenant, op, model), data, headers=headers, timeout=10)


async def outcome(*args: Any, **how: Any) -> str:
    """`accepted`, or the code of the refusal."""
    message = await ask(*args, **how)
    if header(message, "Headrace-Event") == "accepted":
        return "accepted"
    code: str = json.loads(message.data)["error"]["code"]
    if code in ("rate_limited", "queue_full", "no_worker"):
        assert int(header(message, "Retry-After") or 0) >= 1
    return code


async def queues(running: Deployment, model: str = MODEL) -> dict[QueueName, int]:
    return await JobQueue(running.bus, model).counts()


async def test_two_routers_and_a_hundred_requests_a_minute(running: Deployment, nc: NatsClient) -> None:
    await configure(running, nc, tenants__a=TenantConfig(requests_per_minute=100))
    ids = [{"Headrace-Id": f"j{number}"} for number in range(160)]
    outcomes = await asyncio.gather(*(outcome(running, nc, CHAT, tenant="a", headers=known) for known in ids))
    assert Counter(outcomes) == {"accepted": 100, "rate_limited": 60}
    assert await queues(running) == {QueueName(queue="a"): 100}
    taken = [known for known, result in zip(ids, outcomes, strict=True) if result == "accepted"]
    repeats = await asyncio.gather(*(outcome(running, nc, CHAT, tenant="a", headers=known) for known in taken[:10]))
    assert set(repeats) == {"accepted"}
    assert await outcome(running, nc, CHAT, tenant="b") == "accepted"


async def test_what_is_refused_or_repeated_consumes_nothing(running: Deployment, nc: NatsClient) -> None:
    await configure(
        running, nc, tenants__a=TenantConfig(requests_per_minute=12), models__sim_model=ModelConfig(queue_limit=10)
    )
    await until(lambda: _has_limit(running, 10))
    known = {"Headrace-Id": "one"}
    for _ in range(5):
        assert await outcome(running, nc, CHAT, tenant="a", headers=known) == "accepted"
    for _ in range(5):
        assert await outcome(running, nc, {**CHAT, "n": 0}, tenant="a") == "invalid_value"
    for _ in range(9):
        assert await outcome(running, nc, CHAT, tenant="a") == "accepted"
    for _ in range(5):
        assert await outcome(running, nc, CHAT, tenant="a") == "queue_full"
    assert sum((await queues(running)).values()) == 10
    await configure(running, nc, models__sim_model=ModelConfig(queue_limit=20))
    await until(lambda: _has_limit(running, 20))
    # Permits of the requests refused as `queue_full` come back to the other router within some seconds.
    for _ in range(2):
        await until(lambda: _is(running, nc, "accepted"))
    assert await outcome(running, nc, CHAT, tenant="a") == "rate_limited"
    assert sum((await queues(running)).values()) == 12


async def _has_limit(running: Deployment, limit: int) -> bool:
    info = json.loads(await running.bus.api(f"STREAM.INFO.{running.bus.names.jobs_stream(MODEL)}"))
    return bool(info["config"]["max_msgs"] == limit)


async def _is(running: Deployment, nc: NatsClient, wanted: str) -> bool:
    return await outcome(running, nc, CHAT, tenant="a") == wanted


async def test_requests_in_flight_are_limited_exactly(running: Deployment, nc: NatsClient) -> None:
    await configure(running, nc, tenants__a=TenantConfig(max_in_flight=5))
    lanes = [{"Headrace-Priority": ("high", "normal", "low")[number % 3]} for number in range(20)]
    outcomes = await asyncio.gather(*(outcome(running, nc, CHAT, tenant="a", headers=lane) for lane in lanes))
    assert Counter(outcomes) == {"accepted": 5, "rate_limited": 15}
    assert sum((await queues(running)).values()) == 5
    await running.worker()
    await until(lambda: _is(running, nc, "accepted"))


async def has_ended(running: Deployment, job: str) -> bool:
    """Wait for the job's end; whether it was a good one."""
    return any([isinstance(event, Done) async for event in running.client.attach(job)])


async def test_rules_choose_the_pool_and_tenants_their_queue(running: Deployment, nc: NatsClient) -> None:
    pools = (PoolConfig(name="long"), PoolConfig(name="batch"), PoolConfig(name="theirs", tenants=("a",)))
    rules = (PoolRule(pool="long", min_prompt_tokens=1_000), PoolRule(pool="batch", stream=False))
    await configure(
        running, nc, models__sim_model=ModelConfig(pools=pools, rules=rules), tenants__a=TenantConfig(weight=2)
    )
    long = {"messages": [{"role": "user", "content": "word " * 2_000}]}
    assert await outcome(running, nc, CHAT) == "accepted"
    assert await outcome(running, nc, long) == "accepted"
    assert await outcome(running, nc, {**CHAT, "stream": False}, headers={"Headrace-Priority": "low"}) == "accepted"
    assert await outcome(running, nc, long, tenant="a", headers={"Headrace-Pool": "theirs"}) == "accepted"
    assert await outcome(running, nc, CHAT, headers={"Headrace-Pool": "theirs"}) == "invalid_value"
    assert await outcome(running, nc, CHAT, headers={"Headrace-Pool": "nowhere"}) == "invalid_value"
    assert await queues(running) == {
        QueueName(): 1,
        QueueName("long"): 1,
        QueueName("batch", "low"): 1,
        QueueName("theirs", "normal", "a"): 1,
    }


async def test_an_alias_leads_to_one_model_for_an_id(running: Deployment, nc: NatsClient) -> None:
    targets = (AliasTarget(model="m", version="1"), AliasTarget(model="m", version="2"))
    for target in targets:
        await ensure_jobs_stream(running.bus, target.name)
    await configure(running, nc, aliases__chat=AliasConfig(targets=targets))
    alias = AliasConfig(targets=targets)
    expected = Counter(alias.choose(f"j{number}") for number in range(20))
    for number in range(20):
        how: dict[str, Any] = {"model": "chat", "headers": {"Headrace-Id": f"j{number}"}}
        message = await ask(running, nc, CHAT, **how)
        assert json.loads(message.data)["model"] == alias.choose(f"j{number}")
        assert await outcome(running, nc, CHAT, **how) == "accepted"
        assert await outcome(running, nc, {**CHAT, "max_tokens": 4}, **how) == "invalid_value"
    assert {name: sum((await queues(running, name)).values()) for name in expected} == expected


async def test_a_configured_model_is_known_before_its_first_worker(running: Deployment, nc: NatsClient) -> None:
    assert await outcome(running, nc, CHAT, model="new-model") == "model_not_found"
    await configure(running, nc, models__new_model=ModelConfig())
    assert await outcome(running, nc, CHAT, model="new-model") == "accepted"
    assert await queues(running, "new-model") == {QueueName(): 1}


async def test_a_model_may_refuse_while_it_has_no_worker_and_lenders_count(running: Deployment, nc: NatsClient) -> None:
    lends = PoolConfig(name="spare", lends_to=("default",))
    model = ModelConfig(on_no_worker="refuse", pools=(lends, PoolConfig(name="alone")))
    await configure(running, nc, models__sim_model=model)
    assert await outcome(running, nc, CHAT) == "no_worker"
    assert await queues(running) == {}
    await running.worker(pool="spare")
    await until(lambda: _is_known_to_all(running, nc))
    assert await outcome(running, nc, CHAT, headers={"Headrace-Pool": "alone"}) == "no_worker"


async def test_no_request_is_refused_or_sent_away_that_would_bring_a_replica(
    running: Deployment, nc: NatsClient
) -> None:
    await running.worker(model=OTHER)
    from_zero = ReplicaGroup(engine="sim", autoscale=Autoscale(min_replicas=0, max_replicas=2))
    model = ModelConfig(on_no_worker="refuse", instances=(from_zero,), pools=(PoolConfig(name="alone"),))
    await configure(running, nc, models__sim_model=model)
    assert await outcome(running, nc, CHAT, headers={"Headrace-Pool": "alone"}) == "no_worker"
    message = await ask(running, nc, CHAT, headers={"Headrace-Fallback": OTHER})
    accepted = json.loads(message.data)
    assert (accepted["model"], accepted["position"], accepted["eta_s"]) == (MODEL, 0, None)
    assert await queues(running) == {QueueName(): 1}
    always_one = msgspec.structs.replace(from_zero, autoscale=Autoscale(min_replicas=1, max_replicas=2))
    await configure(running, nc, models__sim_model=msgspec.structs.replace(model, instances=(always_one,)))
    assert await outcome(running, nc, CHAT) == "no_worker"


async def _is_known_to_all(running: Deployment, nc: NatsClient) -> bool:
    return {await outcome(running, nc, CHAT) for _ in range(8)} == {"accepted"}


async def test_a_request_goes_to_its_fallback_when_its_model_cannot_start_it(
    running: Deployment, nc: NatsClient
) -> None:
    wish = {"Headrace-Fallback": OTHER}
    await ensure_jobs_stream(running.bus, OTHER)
    assert await outcome(running, nc, CHAT, headers=wish) == "accepted"
    assert await queues(running) == {QueueName(): 1}, "nobody could start it anywhere, so it waits where it was meant"
    await running.worker(model=OTHER)
    await configure(running, nc, models__sim_model=ModelConfig(fallback=OTHER))
    for headers in ({"Headrace-Id": "told"} | wish, {"Headrace-Id": "configured"}):
        message = await ask(running, nc, CHAT, headers=headers)
        assert json.loads(message.data)["model"] == OTHER
        assert await has_ended(running, headers["Headrace-Id"])
        again = await ask(running, nc, CHAT, headers=headers)
        assert header(again, "Headrace-Attached") == "1"
    assert await queues(running) == {QueueName(): 1}


async def test_a_wait_beyond_the_queue_timeout_leads_to_the_fallback(running: Deployment, nc: NatsClient) -> None:
    await running.worker(sim(tokens_per_second=40.0), max_concurrency=1)
    await running.worker(model=OTHER)
    second = {**CHAT, "max_tokens": 40, "ignore_eos": True}
    assert await outcome(running, nc, second, headers={"Headrace-Id": "measured"}) == "accepted"
    assert await has_ended(running, "measured")
    for _ in range(8):
        assert await outcome(running, nc, second) == "accepted"
    hasty = {"Headrace-Fallback": OTHER, "Headrace-Queue-Timeout": "2"}

    async def goes_elsewhere() -> bool:  # the worker tells its measured rate with its next beat
        return bool(json.loads((await ask(running, nc, CHAT, headers=hasty)).data)["model"] == OTHER)

    await until(goes_elsewhere, timeout_s=3)
    patient = {**hasty, "Headrace-Queue-Timeout": "60"}
    assert json.loads((await ask(running, nc, CHAT, headers=patient)).data)["model"] == MODEL


async def test_a_full_queue_leads_to_the_fallback(running: Deployment, nc: NatsClient) -> None:
    await running.worker(sim(tokens_per_second=2.0), max_concurrency=1)
    await running.worker(model=OTHER)
    await configure(running, nc, models__sim_model=ModelConfig(queue_limit=2))
    await until(lambda: _has_limit(running, 2))
    held = {"messages": CHAT["messages"], "max_tokens": 200, "ignore_eos": True}
    for _ in range(2):
        assert await outcome(running, nc, held) == "accepted"
    assert await outcome(running, nc, CHAT) == "queue_full"
    message = await ask(running, nc, CHAT, headers={"Headrace-Fallback": OTHER})
    assert json.loads(message.data)["model"] == OTHER
    assert await outcome(running, nc, CHAT, headers={"Headrace-Fallback": MODEL}) == "queue_full"
    assert await outcome(running, nc, CHAT, headers={"Headrace-Fallback": "nobody"}) == "queue_full"
    assert sum((await queues(running)).values()) == 2
