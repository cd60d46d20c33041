"""One trace from the client to the engine, over the broker, as a collector receives it."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

import headrace.client
from headrace import telemetry
from headrace.bus.overview import overview
from headrace.cli.http import answers, free_port
from headrace.lifecycle import ChildProcess
from headrace.settings import Settings
from tests.deployment import until
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.processes import part, serving

MODEL = "sim-model"
WANTED = {f"chat {MODEL}", f"publish {MODEL}", "admit", f"wait {MODEL}", f"process {MODEL}"}


def _traced(receiver: OtlpReceiver, url: str, prefix: str, state_dir: Path) -> Callable[..., ChildProcess]:
    """Starts parts that send their spans to the receiver."""

    def started(*arguments: str, **variables: str) -> ChildProcess:
        return part(*arguments, url=url, prefix=prefix, state_dir=state_dir, **receiver.environ, **variables)

    return started


async def test_one_trace_has_client_router_queue_wait_worker_and_engine(
    broker_url: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OtlpReceiver() as receiver:
        for name, value in receiver.environ.items():
            monkeypatch.setenv(name, value)
        parts = [
            part("serve", "router", url=broker_url, prefix=prefix, state_dir=tmp_path, **receiver.environ),
            part(
                "serve", "worker", "--engine", "sim", "--model", MODEL, "--worker-id", "traced",
                url=broker_url, prefix=prefix, state_dir=tmp_path, **receiver.environ,
            ),
        ]  # fmt: skip
        with telemetry.configure("headrace-client", instance_id="test", version="0"):
            async with (
                parts[0],
                parts[1],
                headrace.client.connect(broker_url, settings=Settings(prefix=prefix)) as client,
            ):
                await serving(client, MODEL)
                done = await client.complete(
                    model=MODEL, messages=[{"role": "user", "content": "canary-7f3"}], max_tokens=5
                )
        # The parts have stopped, so all of their spans were sent.
        spans = receiver.spans()
    of_client = next(span for span in spans if span.name == f"chat {MODEL}" and span.service == "headrace-client")
    trace = [span for span in spans if span.trace_id == of_client.trace_id]
    names = {span.name for span in trace}
    assert names >= WANTED
    services = {span.service for span in trace}
    assert services == {"headrace-client", "headrace-router", "headrace-worker"}
    engine = next(span for span in trace if span.name == f"chat {MODEL}" and span.service == "headrace-worker")
    assert engine.attributes["gen_ai.usage.output_tokens"] == 5
    assert chain(trace, engine) == [f"chat {MODEL}", f"process {MODEL}", "admit", f"publish {MODEL}", f"chat {MODEL}"]
    assert done.usage is not None
    assert not any(b"canary-7f3" in body for body in receiver.bodies)
    assert done.text
    assert not any(done.text.encode() in body for body in receiver.bodies)


async def test_the_trace_of_a_caller_over_http_goes_through_to_the_engine(
    broker_url: str, prefix: str, tmp_path: Path
) -> None:  # OBS-1
    port = free_port("127.0.0.1", 0)
    caller = "4bf92f3577b34da6a3ce929d0e0e4736"
    with OtlpReceiver() as receiver:
        traced = _traced(receiver, broker_url, prefix, tmp_path)

        async with (
            traced("serve", "router"),
            traced("serve", "worker", "--engine", "sim", "--model", MODEL),
            traced("serve", "gateway", HEADRACE_HTTP_PORT=str(port)),
            headrace.client.connect(broker_url, settings=Settings(prefix=prefix)) as client,
        ):
            await serving(client, MODEL)
            await until(lambda: answers("127.0.0.1", port or 0))
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session,
                session.post(
                    f"http://127.0.0.1:{port}/v1/completions",
                    json={"model": MODEL, "prompt": "canary-7f3", "max_tokens": 5, "stream": True},
                    headers={"traceparent": f"00-{caller}-00f067aa0ba902b7-01"},
                ) as response,
            ):
                assert "[DONE]" in await response.text()
        trace = [span for span in receiver.spans() if span.trace_id == caller]
        bodies = receiver.bodies
    engine = next(
        span for span in trace if span.name.endswith(MODEL) and span.attributes.get("gen_ai.usage.output_tokens")
    )
    assert {span.service for span in trace} == {"headrace-gateway", "headrace-router", "headrace-worker"}
    assert engine.attributes["gen_ai.usage.output_tokens"] == 5
    assert not any(b"canary-7f3" in body for body in bodies)


async def test_an_answer_that_a_second_worker_ends_is_one_trace(
    broker_url: str, prefix: str, tmp_path: Path
) -> None:  # OBS-1
    """The worker that is killed takes its own spans with it; the second tells that the job came a second time."""
    port = free_port("127.0.0.1", 0)
    caller = "0af7651916cd43dd8448eb211c80319c"
    with OtlpReceiver() as receiver:
        traced = _traced(receiver, broker_url, prefix, tmp_path)

        def worker(name: str) -> ChildProcess:
            speed = "tokens_per_second=40"
            return traced("serve", "worker", "--engine", "sim", "--model", MODEL, "--worker-id", name, "-o", speed)

        async with (
            traced("serve", "router"),
            traced("serve", "monitor"),
            worker("first") as first,
            traced("serve", "gateway", HEADRACE_HTTP_PORT=str(port)),
            headrace.client.connect(broker_url, settings=Settings(prefix=prefix)) as client,
        ):
            await serving(client, MODEL)
            await until(lambda: answers("127.0.0.1", port or 0))
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=40)) as session,
                session.post(
                    f"http://127.0.0.1:{port}/v1/completions",
                    json={"model": MODEL, "prompt": "x", "max_tokens": 40, "stream": True},
                    headers={"traceparent": f"00-{caller}-00f067aa0ba902b7-01"},
                ) as response,
            ):
                await response.content.readline()
                async with worker("second"):
                    os.kill(first.pid, signal.SIGKILL)
                    assert "[DONE]" in await response.text()
        trace = [span for span in receiver.spans() if span.trace_id == caller]
    processed = [span for span in trace if span.name == f"process {MODEL}"]
    assert [span.attributes["headrace.worker"] for span in processed] == ["second"]
    assert processed[0].attributes["headrace.delivery_count"] == 2
    assert {span.service for span in trace} == {"headrace-gateway", "headrace-router", "headrace-worker"}


async def test_a_client_that_leaves_in_mid_stream_leaves_one_span_as_long_as_the_stream(
    broker_url: str, prefix: str, tmp_path: Path
) -> None:  # OBS-2
    port = free_port("127.0.0.1", 0)
    caller = "b7ad6b7169203331b7ad6b7169203331"
    with OtlpReceiver() as receiver:
        traced = _traced(receiver, broker_url, prefix, tmp_path)

        parts = [
            traced("serve", "router"),
            traced("serve", "worker", "--engine", "sim", "--model", MODEL, "-o", "tokens_per_second=20"),
            traced("serve", "gateway", HEADRACE_HTTP_PORT=str(port)),
        ]
        async with (
            parts[0],
            parts[1],
            parts[2],
            headrace.client.connect(broker_url, settings=Settings(prefix=prefix)) as client,
        ):
            await serving(client, MODEL)
            await until(lambda: answers("127.0.0.1", port or 0))
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session,
                session.post(
                    f"http://127.0.0.1:{port}/v1/completions",
                    json={"model": MODEL, "prompt": "x", "max_tokens": 400, "stream": True, "ignore_eos": True},
                    headers={"traceparent": f"00-{caller}-00f067aa0ba902b7-01"},
                ) as response,
            ):
                began = time.monotonic()
                num_pieces = 0
                while num_pieces < 10:
                    num_pieces += (await response.content.readline()).startswith(b"data:")
                lasted_s = time.monotonic() - began

            async def is_idle() -> bool:
                return all(not worker.running for worker in (await overview(client.bus)).workers)

            await until(is_idle)
        spans = [span for span in receiver.spans() if span.trace_id == caller]
    of_gateway = [span for span in spans if span.service == "headrace-gateway" and span.name.endswith(f" {MODEL}")]
    of_client = [span for span in of_gateway if not span.name.startswith("publish")]
    assert len(of_client) == 1
    assert of_client[0].attributes["headrace.outcome"] == "cancelled"
    assert (of_client[0].end_time_ns - of_client[0].start_time_ns) / 1e9 >= lasted_s
    assert not any("detach" in child.tail() or "Traceback" in child.tail() for child in parts)


def chain(trace: list[ReceivedSpan], span: ReceivedSpan) -> list[str]:
    """Names from a span up to the root of its trace."""
    by_id = {each.span_id: each for each in trace}
    found = [span.name]
    while span.parent_span_id in by_id:
        span = by_id[span.parent_span_id]
        found.append(span.name)
    return found
