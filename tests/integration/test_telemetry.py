"""Export over OTLP to a real receiver, and to collectors that are down, mute or unwilling."""

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.context import Context

from headrace.telemetry import (
    Step,
    Telemetry,
    configure,
    extract,
    inference_result,
    inference_span,
    inject,
    job_attributes,
    names,
    start_span,
    step_span,
)
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan

CLOSE_LIMIT_S = 2.0
CANARY = "canary-7f3"


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as running:
        yield running


def telemetry(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], service: str = "headrace-router") -> Telemetry:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    for name, value in {"NO_PROXY": "127.0.0.1", **environ}.items():
        monkeypatch.setenv(name, value)
    return configure(service, instance_id="i1", version="9.9")


def named(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    (span,) = [span for span in spans if span.name == name]
    return span


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_one_trace_from_client_to_engine(
    compression: str, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {**receiver.environ, "OTEL_EXPORTER_OTLP_COMPRESSION": compression}
    with telemetry(monkeypatch, environ) as running:
        assert running.is_enabled
        accepted_ns = time.time_ns()
        with inference_span("chat", "m", provider="headrace", parent=Context()) as client:
            with step_span(Step.PUBLISH, parent=client.context) as publish:
                request: dict[str, str] = {"traceparent": "stale"}
                inject(request, publish.context)
            with step_span(Step.ADMIT, parent=extract(request)) as admit:
                job: dict[str, str] = {}
                inject(job, admit.context)
            step_span(Step.WAIT, "m", parent=extract(job), start_time_ns=accepted_ns).end()
            where = job_attributes(job="j1", attempt=1, delivery_count=1, worker="w1")
            with step_span(Step.PROCESS, "m", parent=extract(job), attributes=where) as process:
                with inference_span("chat", "m", provider="llama.cpp", parent=process.context) as engine:
                    engine.set(inference_result(num_output_tokens=5, finish_reasons=["stop"], ttft_s=0.25))
                process.add_event(names.EVENT_REQUEUED, {names.HEADRACE_REASON: "worker died"})
                step_span(Step.SETTLE, "m", parent=process.context).end()
    spans = receiver.wait_for(lambda spans: len(spans) == 7, timeout_s=5)
    assert {span.trace_id for span in spans} == {client.trace_id}
    parents = {span.name: span.parent_span_id for span in spans if span.name != "chat m"}
    ids = {span.name: span.span_id for span in spans}
    assert parents == {
        "publish": next(span.span_id for span in spans if span.parent_span_id == ""),
        "admit": ids["publish"],
        "wait m": ids["admit"],
        "process m": ids["admit"],
        "settle m": ids["process m"],
    }
    assert named(spans, "wait m").start_time_ns == accepted_ns
    assert [(event.name, event.attributes) for event in named(spans, "process m").events] == [
        ("headrace.requeued", {"headrace.reason": "worker died"})
    ]
    called = next(span for span in spans if span.parent_span_id == ids["process m"] and span.kind == "CLIENT")
    assert called.attributes["gen_ai.response.time_to_first_chunk"] == 0.25
    assert called.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    root = next(span for span in spans if span.parent_span_id == "")
    assert root.resource["service.instance.id"] == "i1"
    assert root.resource["service.version"] == "9.9"
    assert (root.service, root.scope, root.schema_url) == ("headrace-router", "headrace", names.SCHEMA_URL)


WORKER = """
import json, sys
from headrace.telemetry import Step, configure, extract, job_attributes, step_span
with configure("headrace-worker", instance_id="w", version="1"):
    headers = json.loads(sys.argv[1])
    where = job_attributes(job="j", attempt=int(sys.argv[2]), delivery_count=int(sys.argv[2]))
    step_span(Step.PROCESS, "m", parent=extract(headers), attributes=where).end()
"""


def test_a_redelivery_is_seen_in_the_same_trace_from_another_process(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with telemetry(monkeypatch, receiver.environ):
        with step_span(Step.ADMIT, parent=extract({"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})) as admit:
            headers: dict[str, str] = {}
            inject(headers, admit.context)
        for attempt in ("1", "2"):
            subprocess.run([sys.executable, "-c", WORKER, json.dumps(headers), attempt], check=True, timeout=30)
    spans = receiver.wait_for(lambda spans: len(spans) == 3, timeout_s=5)
    assert {span.trace_id for span in spans} == {"a" * 32}
    processed = [span for span in spans if span.service == "headrace-worker"]
    assert [span.attributes["headrace.delivery_count"] for span in processed] == [1, 2]
    assert {span.parent_span_id for span in processed} == {named(spans, "admit").span_id}


def test_a_prompt_in_an_exception_reaches_no_span(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    running = telemetry(monkeypatch, receiver.environ)
    with running, pytest.raises(ValueError, match=CANARY), start_span("failing", parent=Context()):
        raise ValueError(CANARY)
    (span,) = receiver.wait_for(bool, timeout_s=5)
    assert (span.status, span.status_message) == ("ERROR", "ValueError")
    assert CANARY.encode() not in b"".join(receiver.bodies)


def test_the_standard_variables_win_over_our_names(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    named_by_user = {"OTEL_SERVICE_NAME": "mine", "OTEL_RESOURCE_ATTRIBUTES": "service.version=2,team=x"}
    with telemetry(monkeypatch, {**receiver.environ, **named_by_user}):
        start_span("s", parent=Context()).end()
    (span,) = receiver.wait_for(bool, timeout_s=5)
    assert span.resource.items() >= {"service.version": "2", "team": "x", "headrace.service": "headrace-router"}.items()
    assert span.service == "mine"


def test_the_sampler_is_the_environments(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    with telemetry(monkeypatch, {**receiver.environ, "OTEL_TRACES_SAMPLER": "parentbased_always_off"}):
        start_span("dropped", parent=Context()).end()
        start_span("kept", parent=extract({"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})).end()
    assert [span.name for span in receiver.wait_for(bool, timeout_s=5)] == ["kept"]


def test_many_batches_are_sent_before_closing(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    with telemetry(monkeypatch, {**receiver.environ, "OTEL_BSP_SCHEDULE_DELAY": "60000"}):
        for _ in range(2_000):
            start_span("s", parent=Context()).end()
    assert len(receiver.spans()) == 2_000


def test_values_the_sdk_refuses_turn_tracing_off(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with telemetry(monkeypatch, {**receiver.environ, "OTEL_BSP_MAX_QUEUE_SIZE": "-1"}) as running:
        assert not running.is_enabled
        start_span("s", parent=Context()).end()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "max_queue_size" in caplog.text


# --- Collectors that do not take spans ----------------------------------------------------------------------------


@contextlib.contextmanager
def refusing_port() -> Iterator[str]:
    """A port where nothing listens: it is bound, so nobody else gets it, and refuses connections."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """Accepts connections, reads nothing and never answers; at the end it drops them."""
    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(listener.accept()[0])

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in accepted:
                connection.close()


@contextlib.contextmanager
def answering(status: int) -> Iterator[str]:
    """Answers every request with `status`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(params=["refused", "black hole", "503", "401"])
def bad_collector(request: pytest.FixtureRequest) -> Iterator[str]:
    kinds = {"refused": refusing_port(), "black hole": black_hole(), "503": answering(503), "401": answering(401)}
    with kinds[request.param] as url:
        yield url


def test_a_bad_collector_slows_no_span_and_delays_no_exit(
    bad_collector: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": bad_collector, "OTEL_BSP_SCHEDULE_DELAY": "1"}
    running = telemetry(monkeypatch, environ)
    began_s = time.perf_counter()
    for _ in range(5_000):  # more than the queue holds
        start_span("s", parent=Context()).end()
    per_span_s = (time.perf_counter() - began_s) / 5_000
    began_s = time.perf_counter()
    running.close()
    assert time.perf_counter() - began_s < CLOSE_LIMIT_S
    assert per_span_s < 0.002
    assert len(caplog.records) == 1, caplog.text
    assert f"{bad_collector}/v1/traces" in caplog.text


EXITING = """
import sys, time
from headrace.telemetry import configure, start_span
from opentelemetry.context import Context
telemetry = configure("s", instance_id="i", version="1")
start_span("s", parent=Context()).end()
began_s = time.perf_counter()
telemetry.close()
print(time.time(), flush=True)
"""


@pytest.mark.parametrize("collector", [black_hole, refusing_port])
def test_a_process_exits_at_once_when_closed(collector: object) -> None:
    """Nothing the SDK leaves behind (its thread still waits for the mute collector) holds up the interpreter."""
    assert callable(collector)
    with collector() as url:
        environ = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": url, "NO_PROXY": "127.0.0.1"}
        done = subprocess.run(
            [sys.executable, "-c", EXITING], env=environ, stdout=subprocess.PIPE, check=True, timeout=30
        )
        assert time.time() - float(done.stdout) < 1.0


def test_a_collector_known_to_refuse_costs_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing_port() as url:
        running = telemetry(monkeypatch, {"OTEL_EXPORTER_OTLP_ENDPOINT": url})
        start_span("s", parent=Context()).end()
        began_s = time.perf_counter()
        running.close()
        assert time.perf_counter() - began_s < 1.0


def test_an_application_keeps_its_own_provider(receiver: OtlpReceiver) -> None:
    program = """
from headrace.telemetry import configure, start_span
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, ConsoleSpanExporter
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter()))
trace.set_tracer_provider(provider)
with configure("s", instance_id="i", version="1") as telemetry:
    assert not telemetry.is_enabled
    start_span("theirs", parent=Context()).end()
"""
    environ = {**os.environ, **receiver.environ}
    done = subprocess.run([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE, check=True, timeout=30)
    assert b'"name": "theirs"' in done.stdout
    assert receiver.spans() == []
