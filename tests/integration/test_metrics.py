"""Prometheus metrics of every part at the monitor, whatever clients send."""

import asyncio
import contextlib
import itertools
import socket
from pathlib import Path

import aiohttp
import msgspec
import pytest

import headrace.client
from headrace.bus.connection import Message
from headrace.cli.http import answers, free_port
from headrace.errors import HeadraceError, RequestError
from headrace.lifecycle import ChildProcess
from headrace.schemas.metrics import Family, Measured, Sample
from headrace.settings import Settings
from tests.deployment import MODEL, Deployment, deployment, sim, until
from tests.processes import part, serving
from tests.scraping import Scrape, scrape


def a_port() -> int:
    port = free_port("127.0.0.1", 0)
    assert port is not None
    return port


async def listening(port: int) -> None:
    await until(lambda: answers("127.0.0.1", port))


async def test_every_part_is_at_the_monitor(broker_url: str, prefix: str, tmp_path: Path) -> None:
    http_port, monitor_port = a_port(), a_port()

    def started(*arguments: str, **variables: str) -> ChildProcess:
        return part("serve", *arguments, url=broker_url, prefix=prefix, state_dir=tmp_path, **variables)

    async with (
        started("router"),
        started("worker", "--engine", "sim", "--model", "org/m-3.1", "--worker-id", "w1"),
        started("gateway", HEADRACE_HTTP_PORT=str(http_port)),
        started("monitor", HEADRACE_MONITOR_PORT=str(monitor_port)),
        headrace.client.connect(broker_url, settings=Settings(prefix=prefix)) as client,
    ):
        await serving(client, "org/m-3.1")
        await listening(http_port)
        await listening(monitor_port)
        body = {"model": "org/m-3.1", "prompt": "canary-7f3", "max_tokens": 5}
        async with aiohttp.ClientSession(f"http://127.0.0.1:{http_port}") as session:
            for each in (body, {**body, "max_tokens": -1}, {**body, "model": "nobody-knows"}):
                async with session.post("/v1/completions", json=each) as response:
                    await response.read()
        async with asyncio.timeout(30):  # a worker counts an attempt after its reader has the end
            while (seen := await scrape(monitor_port)).total("headrace_attempts_total", outcome="done") < 2:
                await asyncio.sleep(0.05)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{monitor_port}") as session:
            async with session.get("/healthz") as response:
                assert response.status == 200
            async with session.get("/metrics", headers={"Host": "evil.example.com"}) as response:
                assert response.status == 403
    assert seen.values("service") == {"router", "worker", "gateway", "monitor"}
    assert seen.total("headrace_requests_accepted_total", model="org/m-3.1", lane="normal", pool="default") >= 2
    assert seen.total("headrace_requests_refused_total", code="model_not_found") >= 1
    assert seen.total("headrace_http_requests_total", status="200") == 1
    assert seen.total("headrace_http_requests_total", status="404") == 1
    assert seen.total("headrace_http_open_requests") == 0
    assert seen.total("headrace_attempts_total", outcome="done", process="w1") >= 2
    assert seen.total("headrace_tokens_total", kind="completion") >= 6
    assert seen.total("headrace_time_to_first_token_seconds_count", model="org/m-3.1") >= 2
    assert seen.total("headrace_inter_token_seconds_count") >= 4
    assert seen.total("headrace_worker_kv_tokens", worker="w1", kind="capacity") > 0
    assert seen.total("headrace_queue_depth", model="org/m-3.1") == 0
    assert "canary-7f3" not in seen.text
    assert "nobody-knows" not in seen.text


async def test_a_forged_answer_leaves_the_scrape_small_and_is_counted(broker_url: str, prefix: str) -> None:
    port = a_port()
    async with deployment(broker_url, prefix, monitor_port=port) as running:
        await running.monitor()
        await listening(port)
        sample = Sample("headrace_forged_total", {}, 1.0)
        answers_of_one = [b"no answer"] + [
            msgspec.json.encode(
                Measured(
                    service="router",
                    process=f"forged-{number}",
                    origin=f"forged-{number}",
                    families=(Family("headrace_forged", "counter", "", (sample,) * number),),
                )
            )
            for number in (1, 5_000, 30_000)
        ]

        async def forge(message: Message) -> None:
            for data in answers_of_one:
                await running.bus.publish(message.reply, data)

        forging = await running.bus.subscribe(running.bus.names.metrics(), cb=forge)
        await running.bus.flush()
        before = await scrape(port)
        after = await scrape(port)
        await forging.unsubscribe()
    for seen in (before, after):
        assert len(seen.text) < 100_000
        assert seen.values("process") > {"forged-1"}
        assert "forged-5000" not in seen.text

    def counted(seen: Scrape, kind: str) -> float:
        return seen.total("headrace_metrics_dropped_total", kind=kind)

    assert counted(after, "answer") >= counted(before, "answer") + 2
    assert counted(after, "series") >= counted(before, "series") + 5_000
    assert counted(after, "family") >= counted(before, "family") + 1


async def one_of_each(running: Deployment, number: int) -> None:
    """Requests of a client that makes up every name it can."""
    made_up = f"made-up-{number}"
    for arguments in (
        {"model": made_up, "prompt": made_up},
        {"model": MODEL, "prompt": made_up, "pool": made_up},
        {"model": MODEL, "prompt": made_up, "max_tokens": 1, "user": made_up},
        {"model": MODEL, "prompt": made_up, "max_tokens": -number - 1},
        {"model": MODEL, "prompt": made_up, "max_tokens": 1, "job_id": made_up},
    ):
        with contextlib.suppress(HeadraceError):
            await running.client.complete(**arguments)


async def test_labels_stay_bounded_whatever_clients_send(broker_url: str, prefix: str) -> None:
    port = a_port()
    async with deployment(broker_url, prefix, monitor_port=port) as running:
        await running.monitor()
        await running.worker(sim(tokens_per_second=5000.0), worker="w1")
        await one_of_each(running, 0)
        await running.client.complete(model=MODEL, prompt="x", max_tokens=3)
        await listening(port)
        before = await with_refused(port, 3)
        for number in range(1, 40):
            await one_of_each(running, number)
        after = await with_refused(port, before.total("headrace_requests_refused_total") + 39 * 3)
    assert after.whole.keys() == before.whole.keys()
    assert "made-up" not in after.text


async def with_refused(port: int, number: float) -> Scrape:
    """A scrape that all parts answered in time, with so many refused requests at least."""
    scrapes: list[Scrape] = []

    async def is_whole() -> bool:
        scrapes.append(await scrape(port))
        return "w1" in scrapes[-1].values("worker") and scrapes[-1].total("headrace_requests_refused_total") >= number

    await until(is_whole)
    return scrapes[-1]


async def test_after_two_hundred_aborts_nothing_is_in_flight_and_counters_never_fell(
    broker_url: str, prefix: str
) -> None:  # OBS-5
    port = a_port()
    async with deployment(broker_url, prefix, monitor_port=port) as running:
        await running.monitor()
        await running.worker(sim(tokens_per_second=20.0, max_concurrency=16), worker="w1")
        await listening(port)
        scrapes = [await scrape(port)]

        async def abort_one() -> None:
            stream = running.client.stream(model=MODEL, prompt="x", max_tokens=200, ignore_eos=True)
            async with stream:
                async for _ in stream:
                    break
            with contextlib.suppress(RequestError):
                await stream.cancel()

        for _ in range(10):
            async with asyncio.timeout(30), asyncio.TaskGroup() as group:
                for _ in range(20):
                    group.create_task(abort_one())
            scrapes.append(await scrape(port))

        async def is_idle() -> bool:
            scrapes.append(await scrape(port))
            names = (
                "headrace_worker_running",
                "headrace_worker_waiting",
                "headrace_queue_depth",
                "headrace_queue_running",
            )
            return all(scrapes[-1].total(name) == 0 for name in names)

        await until(is_idle, timeout_s=20)
    counted = {name for name, _ in scrapes[-1].samples if name.endswith(("_total", "_count", "_bucket"))}
    assert len(counted) > 10
    for earlier, later in itertools.pairwise(scrapes):
        for key, value in earlier.whole.items():
            if key[0] in counted:
                assert later.whole[key] >= value
    accepted = [seen.total("headrace_requests_accepted_total") for seen in (scrapes[0], scrapes[-1])]
    assert accepted[1] - accepted[0] == 200


async def test_a_port_that_is_taken_is_waited_for_and_keeps_no_monitor_from_its_work(
    broker_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headrace.monitor.http._AGAIN_S", 0.05)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        async with deployment(broker_url, prefix, monitor_port=port) as running:
            await running.monitor()
            taken.close()

            async def is_served() -> bool:
                with contextlib.suppress(aiohttp.ClientError, AssertionError):
                    return isinstance(await scrape(port), Scrape)
                return False

            await until(is_served)


async def test_clients_that_say_nothing_keep_nobody_out(
    broker_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.monitor.http._MAX_CONNECTIONS", 8)
    port = a_port()
    async with deployment(broker_url, prefix, monitor_port=port) as running, contextlib.AsyncExitStack() as silent:
        await running.monitor()
        await listening(port)
        readers = []
        for _ in range(40):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            silent.callback(writer.close)
            readers.append(reader)
        await scrape(port)

        async def are_few() -> bool:
            return sum(not reader.at_eof() and reader.exception() is None for reader in readers) < 8

        await until(are_few)


async def test_scrapes_that_nobody_waits_for_any_more_delay_nobody(broker_url: str, prefix: str) -> None:
    port = a_port()
    async with deployment(broker_url, prefix, monitor_port=port) as running:
        await running.monitor()
        await listening(port)
        for _ in range(100):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await writer.drain()
            writer.close()
        async with asyncio.timeout(5):
            await scrape(port)
