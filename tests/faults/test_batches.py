"""A batch outlives everything that runs it: each line is answered once."""

import asyncio
import contextlib
import json
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Batch

import headrace.client
from headrace.bus.batches import BatchRecords
from headrace.bus.connection import Bus, StoreResult, Unknown
from headrace.bus.joblog import JobLog
from headrace.bus.server import BrokerInfo
from headrace.cli.http import answers, free_port
from headrace.lifecycle import ChildProcess
from headrace.schemas.batches import job_of_line
from headrace.settings import Settings
from tests.deployment import MODEL, deployment, sim, until
from tests.faults.broker import RestartableBroker
from tests.faults.checking import sim_answer
from tests.processes import part

URL: Final = "/v1/completions"
NUM_TOKENS = 20
WITHIN_S = 30.0


def jsonl(num_lines: int) -> bytes:
    return b"".join(
        json.dumps(
            {
                "custom_id": f"line {number}",
                "method": "POST",
                "url": URL,
                "body": {
                    "model": MODEL,
                    "prompt": f"line {number}",
                    "max_tokens": NUM_TOKENS,
                    "ignore_eos": True,
                },
            }
        ).encode()
        + b"\n"
        for number in range(1, num_lines + 1)
    )


def check_output(content: bytes, num_lines: int) -> None:
    """Each line is there once, with its own answer."""
    results = [json.loads(line) for line in content.splitlines()]
    assert Counter(result["custom_id"] for result in results) == Counter(f"line {n}" for n in range(1, num_lines + 1))
    for result in results:
        assert result["response"]["status_code"] == 200
        assert result["response"]["body"]["choices"][0]["text"] == sim_answer(result["custom_id"], NUM_TOKENS)


async def begin(client: AsyncOpenAI, num_lines: int) -> Batch:
    file = await client.files.create(file=("in.jsonl", jsonl(num_lines)), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")


async def follow(client: AsyncOpenAI, batch: Batch, *, within_s: float) -> AsyncIterator[Batch]:
    """The batch as it goes on, until it is over; a gateway that is away is waited for."""
    async with asyncio.timeout(within_s):
        while True:
            with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError):
                found = await client.batches.retrieve(batch.id)
                yield found
                if found.status in ("completed", "failed", "expired", "cancelled"):
                    return
            await asyncio.sleep(0.1)


async def num_results(url: str, prefix: str) -> int:
    """Results that are stored; `request_counts` of a batch come later."""
    async with headrace.client.connect(url, settings=Settings(prefix=prefix)) as looking:
        info = json.loads(await looking.bus.api(f"STREAM.INFO.{looking.bus.names.batch_stream}"))
        return int(info["state"]["messages"])


class Parts:
    """Parts as processes that are killed, and begun again at once."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack
        self._start: dict[str, Callable[[], ChildProcess]] = {}
        self._running: dict[str, ChildProcess] = {}

    async def add(self, name: str, start: Callable[[], ChildProcess]) -> None:
        self._start[name] = start
        self._running[name] = await self._stack.enter_async_context(start())

    async def kill(self, name: str) -> None:
        """End it with nothing said, and start another."""
        self._running[name].send_signal(signal.SIGKILL)
        await self._running[name].wait()
        await self.add(name, self._start[name])


@pytest.mark.timeout(1800)
async def test_every_part_is_killed_in_turn(prefix: str, tmp_path: Path, num_batch_lines: int) -> None:
    port = free_port("127.0.0.1", 0)
    url = f"http://127.0.0.1:{port}"
    async with (
        contextlib.AsyncExitStack() as stack,
        RestartableBroker(tmp_path) as broker,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=WITHIN_S) as client,
    ):

        def start(*arguments: str, **variables: str) -> Callable[[], ChildProcess]:
            return lambda: part(*arguments, url=broker.info.url, prefix=prefix, state_dir=tmp_path, **variables)

        parts = Parts(await stack.enter_async_context(contextlib.AsyncExitStack()))
        await parts.add("router", start("serve", "router"))
        await parts.add("monitor", start("serve", "monitor", HEADRACE_NATS_SYSTEM_URL=broker.info.system_url))
        await parts.add(
            "worker",
            start(
                "serve", "worker", "--engine", "sim", "--model", MODEL, "--worker-id", "w1",
                "--max-concurrency", "32", "-o", "tokens_per_second=80", "-o", "kv_tokens=1000000",
            ),
        )  # fmt: skip
        await parts.add("gateway", start("serve", "gateway", HEADRACE_HTTP_PORT=str(port)))
        assert port is not None
        await until(lambda: answers("127.0.0.1", port), timeout_s=WITHIN_S)
        batch = await begin(client, num_batch_lines)

        async def restart_broker() -> None:
            await broker.end(signal.SIGKILL)
            await broker.start()

        faults: list[tuple[str, Callable[[], Any]]] = [
            ("gateway", lambda: parts.kill("gateway")),
            ("router", lambda: parts.kill("router")),
            ("worker", lambda: parts.kill("worker")),
            ("broker", restart_broker),
        ]
        began_at, over = time.monotonic(), batch
        async with asyncio.timeout(60.0 + num_batch_lines / 10):
            for number, (name, fault) in enumerate(faults, 1):
                done = 0
                while done < num_batch_lines * number / (len(faults) + 2):
                    done = await num_results(broker.info.url, prefix)
                    await asyncio.sleep(0.05)
                print(f"{time.monotonic() - began_at:.1f} s: {done} lines are answered, the {name} is killed")
                await fault()
        async for seen in follow(client, batch, within_s=60.0 + num_batch_lines / 10):
            over = seen
        print(f"{time.monotonic() - began_at:.1f} s: {over.status}, {over.request_counts}")
        assert over.status == "completed"
        assert over.error_file_id is None
        assert over.output_file_id is not None
        content = await client.files.content(over.output_file_id)
        check_output(content.content, num_batch_lines)
        async with headrace.client.connect(broker.info.url, settings=Settings(prefix=prefix)) as looking:
            for line in range(1, num_batch_lines + 1):
                events = await JobLog(looking.bus).read("default", job_of_line(batch.id, line, 0))
                assert [event.kind for event in events if event.is_terminal] == ["done"]


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], ids=["killed", "frozen", "stopped"]
)
async def test_another_gateway_takes_a_batch_over(
    broker: BrokerInfo, prefix: str, tmp_path: Path, number: signal.Signals
) -> None:
    num_lines = 200
    ports = [free_port("127.0.0.1", 0) for _ in range(2)]
    engine = sim(tokens_per_second=100.0, kv_tokens=1_000_000)
    async with deployment(broker.url, prefix) as running, contextlib.AsyncExitStack() as stack:
        await running.worker(engine, max_concurrency=16)
        where: dict[str, Any] = {"url": broker.url, "prefix": prefix, "state_dir": tmp_path}
        children = [part("serve", "gateway", **where, HEADRACE_HTTP_PORT=str(port)) for port in ports]
        clients = []
        for child, port in zip(children, ports, strict=True):
            await stack.enter_async_context(child)
            assert port is not None
            await until(lambda port=port: answers("127.0.0.1", port), timeout_s=WITHIN_S)
            client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", timeout=WITHIN_S)
            clients.append(await stack.enter_async_context(client))
        batch = await begin(clients[0], num_lines)
        records = BatchRecords(running.bus)

        async def has_some() -> bool:
            seen = await records.batch("default", batch.id)
            return seen is not None and seen.record.completed >= 20

        await until(has_some, timeout_s=WITHIN_S)  # the first is nudged, so it has the batch
        children[0].send_signal(number)
        over = batch
        async for seen in follow(clients[1], batch, within_s=WITHIN_S):
            over = seen
        children[0].send_signal(signal.SIGCONT)
        assert over.status == "completed"
        if number == signal.SIGSTOP:
            found = await clients[0].batches.retrieve(batch.id)
            assert found == over
        assert over.output_file_id is not None
        check_output((await clients[1].files.content(over.output_file_id)).content, num_lines)
        assert {file.purpose async for file in clients[1].files.list()} == {"batch", "batch_output"}
        assert engine.num_started == num_lines
        record = await records.batch("default", batch.id)
        assert record is not None
        assert record.record.epoch == 2


@pytest.mark.parametrize("seed", range(6))
async def test_answers_of_the_broker_are_lost(
    broker: BrokerInfo, prefix: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_lines, rng, store = 60, random.Random(seed), Bus.store
    counts: Counter[str] = Counter()
    late: list[asyncio.Task[StoreResult]] = []

    async def lossy(
        self: Bus, subject: str, data: bytes, *, headers: Mapping[str, str], timeout_s: float | None = None
    ) -> StoreResult:
        names = self.names
        heads = (f"$KV.{names.batches_bucket}.", f"$O.{names.files_store}.", f"{names.prefix}.batch.")
        fate = rng.choice(["heard"] * 7 + ["unheard", "unsent", "late"]) if subject.startswith(heads) else "heard"
        counts[fate] += 1
        if fate == "late":
            late.append(asyncio.create_task(_later(store(self, subject, data, headers=headers))))
        elif fate != "unsent":
            result = await store(self, subject, data, headers=headers, timeout_s=timeout_s)
            if fate == "heard":
                return result
        return Unknown(f"the test lost its answer ({fate})")

    engine = sim(tokens_per_second=400.0, kv_tokens=1_000_000)
    # Now and then it is given up, and begun again.
    async with deployment(broker.url, prefix, retry_for_s=0.5) as running:
        await running.worker(engine, max_concurrency=16)
        gateway = await running.gateway()
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", timeout=WITHIN_S, max_retries=9) as client:
            monkeypatch.setattr(Bus, "store", lossy)
            batch = await begin(client, num_lines)
            # Another stands beside it where the answer to its making was lost, and the client asked again.
            batches = [each async for each in client.batches.list()]
            assert batch.id in [each.id for each in batches]
            over = batch
            for each in batches:
                async for seen in follow(client, each, within_s=40.0):
                    over = seen if seen.id == batch.id else over
            await asyncio.gather(*late)
            assert min(counts[fate] for fate in ("unheard", "unsent", "late")) > 0
            assert over.status == "completed"
            assert over.output_file_id is not None
            check_output((await client.files.content(over.output_file_id)).content, num_lines)
            name = f"{over.id}_output.jsonl"
            assert [file.id async for file in client.files.list() if file.filename == name] == [over.output_file_id]
        assert engine.num_started == num_lines * len(batches)
    await asyncio.gather(*late, return_exceptions=True)  # some begin as the gateway ends


async def _later(storing: Coroutine[Any, Any, StoreResult]) -> StoreResult:
    await asyncio.sleep(0.3)
    return await storing


async def test_a_run_on_this_machine_goes_on_after_a_kill(broker: BrokerInfo, prefix: str, tmp_path: Path) -> None:
    num_lines = 100
    file, output = tmp_path / "in.jsonl", tmp_path / "in.jsonl.output.jsonl"
    file.write_bytes(jsonl(num_lines))
    engine = sim(tokens_per_second=100.0, kv_tokens=1_000_000)

    def run() -> ChildProcess:
        return part("batch", "run", str(file), "--json", url=broker.url, prefix=prefix, state_dir=tmp_path)

    def num_answered() -> int:
        return output.read_bytes().count(b"\n") if output.exists() else 0

    async with deployment(broker.url, prefix) as running:
        await running.worker(engine, max_concurrency=8)
        for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
            before = num_answered()
            async with run() as child:
                async with asyncio.timeout(WITHIN_S):
                    while num_answered() < before + 10:
                        await asyncio.sleep(0.02)
                child.send_signal(number)
                assert await child.wait() == code
        async with run() as child:
            assert await child.wait() == 0, child.tail()
            summary = json.loads(child.tail().splitlines()[-1])
    assert summary["completed"] == summary["total"] == num_lines
    assert summary["resumed"] >= 10
    assert summary["errors"] is None
    check_output(output.read_bytes(), num_lines)
    assert engine.num_started == num_lines
