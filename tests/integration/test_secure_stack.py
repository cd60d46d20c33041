"""All parts on a secured broker, each with a credential of its own: everything works, and nothing of it is refused."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

import headrace.client
from headrace.bus.deadletters import DeadLetters
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.members import GATEWAY, HOST, MONITOR, NOTICES, OPERATOR, ROUTER, Member
from headrace.bus.scales import Scales
from headrace.cli.http import free_port
from headrace.client import Accepted, Client, Delta, Done, Requeued, Started
from headrace.errors import JobCancelledError, JobFailedError
from headrace.lifecycle import ChildProcess
from headrace.schemas.instances import GroupName
from headrace.schemas.subjects import DEFAULT_TENANT
from headrace.settings import Settings
from tests.deployment import until
from tests.hosts import configure, sim_group
from tests.processes import part, serving
from tests.scraping import scrape
from tests.secured import ACME, SecuredBroker, secured_broker, worker

ONE, TWO, IDLE = "one", "org/two.0", "idle"
WORKERS = {"w1": ONE, "w2": ONE, "w3": TWO}
NUM_TOKENS = 40


class Stack:
    """The parts as processes, and a client of tenant `acme`."""

    def __init__(
        self, broker: SecuredBroker, client: Client, workers: dict[str, ChildProcess], port: int, monitor_port: int
    ) -> None:
        self.broker = broker
        self.client = client
        self.workers = workers
        self.port = port
        self.monitor_port = monitor_port

    async def headrace(self, *arguments: str) -> str:
        """Run a command as the operator; what it prints."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "headrace.cli", "--nats-url", self.broker.url, *arguments,
            env={
                "PATH": "/usr/bin:/bin",
                "HEADRACE_PREFIX": self.broker.names.prefix,
                "HEADRACE_NATS_CREDENTIALS": self.broker.credentials(OPERATOR),
            },
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, _ = await process.communicate()
        assert process.returncode == 0, arguments
        return output.decode()


@pytest_asyncio.fixture
async def stack(tmp_path: Path, prefix: str) -> AsyncIterator[Stack]:
    """Router, monitor with the system account's notices, three workers of two models, gateway."""
    members = [ACME, *(worker(name, model) for name, model in WORKERS.items())]
    port = free_port("127.0.0.1", 0)
    assert port is not None
    monitor_port = free_port("127.0.0.1", 0)
    assert monitor_port is not None
    async with secured_broker(tmp_path, prefix, members, models=(ONE, TWO, IDLE)) as broker:

        def started(member: Member, *arguments: str, **variables: str) -> ChildProcess:
            return part(
                *arguments, url=broker.url, prefix=prefix, state_dir=tmp_path / "unused",
                HEADRACE_NATS_CREDENTIALS=broker.credentials(member), **variables,
            )  # fmt: skip

        workers = {
            name: started(
                worker(name, model), "serve", "worker", "--engine", "sim", "--model", model, "--worker-id", name,
                "-o", "tokens_per_second=30", "-o", "kv_tokens=1000000",
            )
            for name, model in WORKERS.items()
        }  # fmt: skip
        async with (
            started(ROUTER, "serve", "router"),
            started(
                MONITOR,
                "serve",
                "monitor",
                HEADRACE_NATS_SYSTEM_CREDENTIALS=broker.credentials(NOTICES),
                HEADRACE_MONITOR_PORT=str(monitor_port),
            ),
            workers["w1"],
            workers["w2"],
            workers["w3"],
            started(GATEWAY, "serve", "gateway", HEADRACE_HTTP_HOST="127.0.0.1", HEADRACE_HTTP_PORT=str(port)),
            headrace.client.connect(
                broker.url, tenant="acme", credentials=broker.credentials(ACME), settings=Settings(prefix=prefix)
            ) as client,
        ):
            await serving(client, ONE)
            await serving(client, TWO)
            yield Stack(broker, client, workers, port, monitor_port)


async def test_all_parts_work_and_none_is_refused_anything(stack: Stack, tmp_path: Path) -> None:
    assert (await stack.client.complete(model=TWO, prompt="hi", max_tokens=5)).usage is not None
    await check_cancel_and_status(stack.client)
    await check_attach(stack.client)
    await check_fallback(stack.client)
    await check_poison(stack)
    await check_gateway(stack)
    await check_batch(stack)
    await check_metrics(stack)
    await check_scaling(stack, tmp_path)
    await check_resume_after_kill(stack)
    await check_drain(stack)
    assert stack.broker.violations() == []


async def check_cancel_and_status(client: Client) -> None:
    stream = client.stream(model=ONE, prompt="long", max_tokens=5000, ignore_eos=True)
    async for event in stream:
        if isinstance(event, Delta) and event.offset > 2:
            break
    assert (await client.status(stream.job)).state == "running"
    assert (await stream.cancel()).state == "cancelled"
    with pytest.raises(JobCancelledError):
        _ = [event async for event in client.attach(stream.job)]
    assert (await client.status(stream.job)).state == "cancelled"


async def check_attach(client: Client) -> None:
    """A job that ended is read again from its log."""
    async with client.stream(model=ONE, prompt="again", max_tokens=NUM_TOKENS, ignore_eos=True) as stream:
        offsets = [event.offset async for event in stream if isinstance(event, Delta)]
    again = [event async for event in client.attach(stream.job)]
    assert [event.offset for event in again if isinstance(event, Delta)] == offsets
    assert isinstance(again[-1], Done)


async def check_fallback(client: Client) -> None:
    """A job of a model that nobody serves is its fallback's."""
    done = await client.complete(model=IDLE, prompt="or two", max_tokens=3, fallback=TWO, queue_timeout_s=1)
    assert done.usage is not None


async def check_poison(stack: Stack) -> None:
    """A job that kills engines ends as a dead letter, which the operator can read."""
    with pytest.raises(JobFailedError):
        await stack.client.complete(model=ONE, prompt="<sim die_after=2>", max_tokens=20)

    async def is_buried() -> bool:
        async with stack.broker.operator() as bus:
            letters = await DeadLetters(bus).newest(limit=5)
        return [letter.job.tenant for letter in letters] == ["acme"]

    await until(is_buried)
    assert "acme" in await stack.headrace("jobs", "dead")


async def check_gateway(stack: Stack) -> None:
    url = f"http://127.0.0.1:{stack.port}/v1"
    body = {"model": TWO, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "stream": True}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/chat/completions", json=body) as answer:
            assert answer.status == 200
            assert (await answer.text()).rstrip().endswith("data: [DONE]")
        async with session.get(f"{url}/models") as answer:
            assert {model["id"] for model in (await answer.json())["data"]} == {ONE, TWO, IDLE}


async def check_batch(stack: Stack) -> None:
    """A file taken in, its lines answered, its results given out and removed: all by the gateway's credential."""
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{stack.port}/v1", api_key="any", max_retries=0) as client:
        lines = [
            {
                "custom_id": f"c{number}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": TWO, "prompt": "p"},
            }
            for number in range(3)
        ]
        content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        made = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")

        async def is_over() -> bool:
            return (await client.batches.retrieve(made.id)).status == "completed"

        await until(is_over)
        over = await client.batches.retrieve(made.id)
        assert over.output_file_id is not None
        answers = (await client.files.content(over.output_file_id)).content.splitlines()
        assert sorted(json.loads(each)["custom_id"] for each in answers) == ["c0", "c1", "c2"]
        for kept in (file.id, over.output_file_id):
            assert (await client.files.delete(kept)).deleted
        assert [each.id for each in (await client.batches.list()).data] == [made.id]


async def check_resume_after_kill(stack: Stack) -> None:
    """A worker that is killed in mid-stream: another goes on, noticed by the system account's notice."""
    stream = stack.client.stream(model=ONE, prompt="on and on", max_tokens=NUM_TOKENS * 3, ignore_eos=True)
    offsets, owners, is_requeued = [], [], False
    async for event in stream:
        if isinstance(event, Started):
            owners.append(event.worker)
        if isinstance(event, Requeued):
            is_requeued = True
        if isinstance(event, Delta):
            offsets.append(event.offset)
            if len(offsets) == 10:
                stack.workers[owners[0]].send_signal(signal.SIGKILL)
    assert is_requeued
    assert len(set(owners)) == 2
    assert offsets == sorted(set(offsets))
    assert await stack.client.status(stream.job) is not None


async def check_metrics(stack: Stack) -> None:
    seen = await scrape(stack.monitor_port)
    assert seen.values("service") == {"router", "worker", "gateway", "monitor"}
    assert seen.values("process") >= set(WORKERS)


async def check_scaling(stack: Stack, folder: Path) -> None:
    """The monitor decides by what waits, and takes its decision away where nobody wants one."""
    file = folder / "scaled.toml"
    file.write_text(
        f'[models.{IDLE}]\ninstances = [{{ engine = "sim", replicas = 0, autoscale = {{ min_replicas = 0 }} }}]\n'
    )
    await stack.headrace("config", "apply", str(file))
    stream = stack.client.stream(model=IDLE, prompt="wake up", queue_timeout_s=60)
    assert isinstance(await anext(aiter(stream)), Accepted)
    name = GroupName(IDLE, "default")

    async def replicas() -> int | None:
        async with stack.broker.operator() as bus:
            known = (await Scales(bus).read()).get(name)
        return known.scale.replicas if known is not None and known.scale is not None else None

    async def is_one() -> bool:
        return await replicas() == 1

    async def is_none() -> bool:
        return await replicas() is None

    await until(is_one)
    seen = await scrape(stack.monitor_port)
    assert seen.total("headrace_replicas_wanted", model=IDLE, pool="default") == 1
    assert seen.total("headrace_scale_decisions_total", model=IDLE, direction="up") == 1
    await stream.cancel()
    file.write_text(f"[models.{IDLE}]\n")
    await stack.headrace("config", "apply", str(file))
    await until(is_none)


async def check_drain(stack: Stack) -> None:
    """The command line as the operator: status, evict, drain."""
    workers = json.loads(await stack.headrace("status", "--json"))["workers"]
    assert "w3" in {each["id"] for each in workers}
    await stack.headrace("evict", "w3")
    assert (await stack.client.complete(model=TWO, prompt="still there", max_tokens=2)).usage is not None
    await stack.headrace("drain", "w3")
    async with stack.broker.operator() as bus:
        seen = await WorkersBucket(bus).get("w3")
    assert seen is None or seen.beat is None


async def test_the_operator_may_be_any_tenant_and_start_parts(tmp_path: Path, prefix: str) -> None:
    async with secured_broker(tmp_path, prefix, [], models=(ONE,)) as broker:

        def started(*arguments: str) -> ChildProcess:
            return part(*arguments, url=broker.url, prefix=prefix, state_dir=tmp_path, HEADRACE_NATS_CREDENTIALS=own)

        own = broker.credentials(OPERATOR)
        async with (
            started("serve", "router"),
            started("serve", "monitor"),
            started("serve", "worker", "--engine", "sim", "--model", ONE),
            headrace.client.connect(broker.url, tenant=DEFAULT_TENANT, settings=broker.settings(OPERATOR)) as client,
        ):
            await serving(client, ONE)
        assert broker.violations() == []


async def test_a_host_agent_and_its_workers_have_one_credential_and_make_the_models_stream(
    tmp_path: Path, prefix: str
) -> None:
    async with secured_broker(tmp_path, prefix, [ACME]) as broker:

        def started(member: Member, *arguments: str) -> ChildProcess:
            return part(
                *arguments, url=broker.url, prefix=prefix, state_dir=tmp_path / "unused",
                HEADRACE_NATS_CREDENTIALS=broker.credentials(member),
            )  # fmt: skip

        async with broker.operator() as bus:
            await configure(bus, ONE, sim_group(1))
        async with (
            started(ROUTER, "serve", "router"),
            started(HOST, "serve", "host", "--memory", "4GiB"),
            headrace.client.connect(
                broker.url, tenant="acme", credentials=broker.credentials(ACME), settings=Settings(prefix=prefix)
            ) as client,
        ):
            await serving(client, ONE)
        assert broker.violations() == []
