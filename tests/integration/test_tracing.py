"""One trace from the client to the engine, over the broker, as a collector receives it."""

from pathlib import Path

import pytest

import headrace.client
from headrace import telemetry
from headrace.settings import Settings
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.processes import part, serving

MODEL = "sim-model"
WANTED = {f"chat {MODEL}", f"publish {MODEL}", "admit", f"wait {MODEL}", f"process {MODEL}"}


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


def chain(trace: list[ReceivedSpan], span: ReceivedSpan) -> list[str]:
    """Names from a span up to the root of its trace."""
    by_id = {each.span_id: each for each in trace}
    found = [span.name]
    while span.parent_span_id in by_id:
        span = by_id[span.parent_span_id]
        found.append(span.name)
    return found
