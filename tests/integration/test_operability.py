"""What an operator meets: a broker that is not usable at the start, slips in settings, a collector that is down."""

import asyncio
import signal
import time
from pathlib import Path

import pytest

import headrace.client
from headrace.cli.http import free_port
from headrace.lifecycle import ChildProcess
from headrace.settings import Settings
from tests.integration.test_bus_provision import server_without_jetstream
from tests.integration.test_telemetry import black_hole, refusing_port
from tests.processes import part, serving

MODEL = "sim-model"
EXIT_WITHIN_S = 5.0


async def ended(child: ChildProcess) -> tuple[int, str]:
    """Exit code and last words of a child that ends by itself."""
    async with child:
        code = await asyncio.wait_for(child.wait(), 30)
    return code, child.tail()


async def test_three_troubles_of_a_broker_have_three_messages_and_an_end(
    broker_url: str, prefix: str, tmp_path: Path
) -> None:  # OPS-3
    nowhere = f"nats://127.0.0.1:{free_port('127.0.0.1', 0)}"
    messages = []
    async with server_without_jetstream(tmp_path) as without_jetstream:
        for url, command, says in (
            (nowhere, ("serve", "router"), nowhere.removeprefix("nats://")),
            (without_jetstream, ("serve", "router"), "runs without JetStream"),
            (broker_url, ("status",), f"nothing is provisioned under the prefix {prefix}"),
        ):
            began = time.monotonic()
            code, tail = await ended(
                part(*command, url=url, prefix=prefix, state_dir=tmp_path / "own", HEADRACE_RETRY_FOR_S="1")
            )
            assert code == 1, tail
            assert time.monotonic() - began < 20
            assert says in tail
            assert "Traceback" not in tail
            messages.append(tail.splitlines()[-1])
    assert len(set(messages)) == 3


async def test_a_misspelt_variable_stops_the_start_and_is_named(tmp_path: Path) -> None:
    """OPS-2."""
    child = part(
        "serve", "router", url="nats://127.0.0.1:9", prefix="p.v1", state_dir=tmp_path, HEADRACE_QUEUE_LIMTI="5"
    )
    code, tail = await ended(child)
    assert code == 2
    assert "HEADRACE_QUEUE_LIMTI; did you mean HEADRACE_QUEUE_LIMIT?" in tail


async def test_a_misspelt_key_of_the_file_stops_the_start_and_is_named(tmp_path: Path) -> None:
    """OPS-2."""
    file = tmp_path / "headrace.toml"
    file.write_text("quue_limit = 5\n")
    child = part(
        "serve", "router", url="nats://127.0.0.1:9", prefix="p.v1", state_dir=tmp_path, HEADRACE_CONFIG=str(file)
    )
    code, tail = await ended(child)
    assert code == 2
    assert "unknown key 'quue_limit'; did you mean queue_limit?" in tail


@pytest.mark.parametrize("collector", [refusing_port, black_hole])
async def test_a_collector_that_is_not_there_costs_requests_nothing_and_delays_no_exit(
    collector: object, broker_url: str, prefix: str, tmp_path: Path
) -> None:
    """OBS-3."""
    assert callable(collector)
    with collector() as url:

        def traced(*arguments: str) -> ChildProcess:
            environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
            return part(*arguments, url=broker_url, prefix=prefix, state_dir=tmp_path, **environ)

        async with (
            traced("serve", "router") as router,
            traced("serve", "worker", "--engine", "sim", "--model", MODEL, "-o", "tokens_per_second=500") as worker,
            headrace.client.connect(broker_url, settings=Settings(prefix=prefix)) as client,
        ):
            await serving(client, MODEL)
            began = time.monotonic()
            for _ in range(20):
                await client.complete(model=MODEL, prompt="x", max_tokens=5, ignore_eos=True)
            assert time.monotonic() - began < 5
            for child in (worker, router):
                began = time.monotonic()
                child.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(child.wait(), 20) == 0
                assert time.monotonic() - began < EXIT_WITHIN_S
