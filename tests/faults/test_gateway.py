"""Gateways as processes: workers, gateways and routers die under open streams, and readers are slow."""

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

import headrace.client
from headrace.bus.server import BrokerInfo
from headrace.cli.http import answers, free_port
from headrace.client import Client
from headrace.errors import RequestError
from headrace.gateway import lifecycle, limits
from headrace.lifecycle import ChildProcess
from headrace.settings import Settings
from headrace.worker.engines.sim import SimEngine
from tests.deployment import deployment, sim, until
from tests.faults.broker import RestartableBroker
from tests.faults.checking import sim_answer
from tests.processes import part, serving

MODEL = "sim-model"
NUM_TOKENS = 60
NUM_MANY_TOKENS = 10_000
WITHIN_S = 30.0


class Fleet:
    """Parts as processes: two gateways by their URLs, two workers by their ids."""

    def __init__(self, client: Client, gateways: dict[str, ChildProcess], workers: dict[str, ChildProcess]) -> None:
        self.client = client
        self.gateways = gateways
        self.workers = workers

    async def worker_of(self, job: str) -> str:
        """The worker that runs a job."""
        worker = (await self.client.status(job)).worker
        assert worker is not None
        return worker


@pytest_asyncio.fixture
async def fleet(broker: BrokerInfo, prefix: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    def started(*arguments: str, **variables: str) -> ChildProcess:
        return part(*arguments, url=broker.url, prefix=prefix, state_dir=tmp_path, **variables)

    workers = {
        name: started(
            "serve", "worker", "--engine", "sim", "--model", MODEL, "--worker-id", name,
            "-o", "tokens_per_second=30", "-o", "kv_tokens=1000000",
        )
        for name in ("w1", "w2")
    }  # fmt: skip
    ports = [free_port("127.0.0.1", 0) for _ in range(2)]
    gateways = {f"http://127.0.0.1:{port}": started("serve", "gateway", HEADRACE_HTTP_PORT=str(port)) for port in ports}
    first, second = gateways.values()
    async with (
        started("serve", "router"),
        started("serve", "monitor", HEADRACE_NATS_SYSTEM_URL=broker.system_url),
        workers["w1"],
        workers["w2"],
        first,
        second,
        headrace.client.connect(broker.url, settings=Settings(prefix=prefix)) as client,
    ):
        await serving(client, MODEL)
        for port in ports:
            await until(lambda port=port: answers("127.0.0.1", port), timeout_s=WITHIN_S)
        yield Fleet(client, gateways, workers)


class Read:
    """A stream as read from one or more gateways: its text, and the offset to go on from."""

    def __init__(self) -> None:
        self.text = ""
        self.offset = 0
        self.is_whole = False

    async def take(self, response: aiohttp.ClientResponse, *, until_offset: int | None = None) -> None:
        """Read on, to the end or to an offset."""
        async for line in response.content:
            if line == b"data: [DONE]\n":
                self.is_whole = True
            elif line.startswith(b"data: "):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    self.text += choice["text"]
                self.offset = chunk["headrace"]["offset"]
                if until_offset is not None and self.offset >= until_offset:
                    return


def request(prompt: str) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WITHIN_S)) as opened:
        yield opened


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_stream_goes_on_when_its_worker_does_not(fleet: Fleet, number: signal.Signals) -> None:
    url = next(iter(fleet.gateways))
    text, num_chunks, victim = "", 0, ""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=WITHIN_S) as client:
        stream = await client.completions.create(
            model=MODEL, prompt="hello", max_tokens=NUM_TOKENS, stream=True, extra_body={"ignore_eos": True}
        )
        async for chunk in stream:
            text += chunk.choices[0].text
            num_chunks += 1
            if num_chunks == 5:
                victim = await fleet.worker_of(stream.response.headers["x-headrace-job"])
                fleet.workers[victim].send_signal(number)
        job = await fleet.client.status(stream.response.headers["x-headrace-job"])
    if number == signal.SIGSTOP:
        fleet.workers[victim].send_signal(signal.SIGCONT)
    assert text == sim_answer("hello", NUM_TOKENS)
    assert (job.attempt, job.num_tokens) == (2, NUM_TOKENS)
    assert job.worker != victim


async def test_a_stream_is_read_on_at_another_gateway(fleet: Fleet, session: aiohttp.ClientSession) -> None:
    one, two = fleet.gateways
    read = Read()
    async with session.post(f"{one}/v1/completions", json=request("move")) as response:
        job = response.headers["x-headrace-job"]
        await read.take(response, until_offset=20)
        fleet.gateways[one].send_signal(signal.SIGKILL)
        async with session.get(f"{two}/v1/jobs/{job}/stream", params={"after": read.offset}) as rest:
            await read.take(rest)
    assert read.is_whole
    assert read.text == sim_answer("move", NUM_TOKENS)
    assert (await fleet.client.status(job)).attempt == 1


async def test_a_gateway_that_is_told_to_stop_ends_with_what_is_open(
    fleet: Fleet, session: aiohttp.ClientSession
) -> None:
    one, _ = fleet.gateways
    read = Read()
    async with session.post(f"{one}/v1/completions", json=request("end")) as response:
        await read.take(response, until_offset=10)
        fleet.gateways[one].send_signal(signal.SIGTERM)
        await read.take(response)
    assert read.text == sim_answer("end", NUM_TOKENS)
    async with asyncio.timeout(WITHIN_S):
        assert await fleet.gateways[one].wait() == 0


async def test_a_client_that_reads_nothing_for_long_gets_it_all_and_holds_nobody_up(
    broker_url: str, prefix: str, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:  # STR-8
    monkeypatch.setattr(limits, "_MAX_PENDING_MESSAGES", 8)
    monkeypatch.setattr(lifecycle, "_SEND_BUFFER_BYTES", 4096)

    async def read(prompt: str) -> str:
        reading = Read()
        async with session.post(f"{gateway.url}/v1/completions", json=request(prompt)) as response:
            await reading.take(response)
        return reading.text

    async def is_done() -> bool:
        return (await running.client.status("slow")).state == "done"

    async with deployment(broker_url, prefix) as running:
        await running.worker(sim(tokens_per_second=4000.0, max_model_len=20_000, kv_tokens=1_000_000))
        gateway = await running.gateway()
        body = json.dumps({**request("slow"), "max_tokens": NUM_MANY_TOKENS}).encode()
        loop = asyncio.get_running_loop()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            await loop.sock_connect(connection, ("127.0.0.1", int(gateway.url.rpartition(":")[2])))
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Headrace-Id: slow\r\n"
            await loop.sock_sendall(connection, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            prompts = [f"beside {number}" for number in range(10)]
            texts = await asyncio.gather(*map(read, prompts))
            assert list(texts) == [sim_answer(prompt, NUM_TOKENS) for prompt in prompts]
            await until(is_done, timeout_s=WITHIN_S)
            received = bytearray()
            async with asyncio.timeout(WITHIN_S):
                while not received.endswith(b"0\r\n\r\n"):
                    received += await loop.sock_recv(connection, 65_536)
    lines = [line for line in received.split(b"\n") if line.startswith(b"data: {")]
    chunks = [json.loads(line[6:]) for line in lines]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == sim_answer("slow", NUM_MANY_TOKENS)
    assert chunks[-1]["headrace"]["offset"] == NUM_MANY_TOKENS
    assert b"data: [DONE]" in received[-40:]


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_a_broker_that_is_away_for_a_while_is_waited_for(
    prefix: str, tmp_path: Path, session: aiohttp.ClientSession, is_streaming: bool
) -> None:
    read = Read()
    async with RestartableBroker(tmp_path) as broker, deployment(broker.info.url, prefix) as running:
        await running.worker(sim(tokens_per_second=30.0))
        gateway = await running.gateway()
        body = {**request("wait"), "stream": is_streaming}
        async with session.post(f"{gateway.url}/v1/completions", json=request("wait")) as response:
            await read.take(response, until_offset=10)
            await broker.end(signal.SIGKILL)
            late = asyncio.create_task(post(session, gateway.url, body))
            async with session.get(f"{gateway.url}/readyz") as probe:
                assert probe.status == 503
            await broker.start()
            await read.take(response)
        status, text = await late
    assert read.text == sim_answer("wait", NUM_TOKENS)
    assert status == 200
    assert ("[DONE]" in text) if is_streaming else (sim_answer("wait", NUM_TOKENS) in text)


async def post(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[int, str]:
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        return response.status, await response.text()


async def _is_idle(engine: SimEngine) -> bool:
    """Whether all that started was aborted; a job that is cancelled before its worker has it never starts."""
    return engine.num_running == 0 and engine.num_started == engine.num_aborted


async def test_a_client_that_leaves_before_its_job_is_accepted_ends_it(
    broker_url: str, prefix: str, session: aiohttp.ClientSession
) -> None:
    engine = sim(tokens_per_second=20.0)
    async with deployment(broker_url, prefix, routers=0) as running:
        await (await running.router()).stop()
        await running.worker(engine)
        gateway = await running.gateway()
        body = {**request("early"), "max_tokens": 2000}
        leaving = asyncio.create_task(post(session, gateway.url, body, {"X-Headrace-Id": "early"}))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(leaving, 0.5)
        await running.router()

        async def is_cancelled() -> bool:
            try:
                return (await running.client.status("early")).state == "cancelled"
            except RequestError:  # no router has taken it in yet
                return False

        await until(is_cancelled)
        await until(lambda: _is_idle(engine))
