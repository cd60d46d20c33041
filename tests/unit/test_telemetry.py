"""Spans, propagation and the decision to export, without a collector."""

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, messaging_attributes
from opentelemetry.semconv.attributes import error_attributes
from opentelemetry.semconv.schemas import Schemas

from headrace.errors import JobCancelledError, JobFailedError
from headrace.logs import configure_logging
from headrace.schemas.refusals import Refusal
from headrace.telemetry import (
    Step,
    extract,
    inference_result,
    inference_span,
    inject,
    job_attributes,
    names,
    start_span,
    step_span,
    traces_endpoint,
)
from headrace.telemetry.otlp import OtlpPipeline
from headrace.telemetry.spans import MAX_ATTRIBUTE_CHARS, use_tracer

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
CANARY = "canary-7f3"


@pytest.fixture
def recorded() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    previous = use_tracer(provider.get_tracer("test"))
    yield exporter
    use_tracer(previous)


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


class TestPropagation:
    @pytest.mark.parametrize("name", ["traceparent", "Traceparent", "TRACEPARENT"])
    def test_a_context_survives_a_process_that_exports_nothing(self, name: str) -> None:
        context = extract({name: TRACEPARENT, "tracestate": "vendor=a:1,other@sys=x y"})
        with step_span(Step.ADMIT, parent=context) as span:
            out: dict[str, str] = {"Headrace-Job": "j"}
            inject(out, span.context)
        assert out == {"Headrace-Job": "j", "traceparent": TRACEPARENT, "tracestate": "vendor=a:1,other@sys=x y"}

    @pytest.mark.parametrize(
        "headers",
        [
            None,
            {},
            {"traceparent": ""},
            {"traceparent": CANARY},
            {"traceparent": TRACEPARENT[:-1]},
            {"traceparent": TRACEPARENT + "-more"},
            {"traceparent": TRACEPARENT.replace("00-", "ff-", 1)},
            {"traceparent": f"00-{'0' * 32}-00f067aa0ba902b7-01"},
            {"traceparent": f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01"},
            {"traceparent": TRACEPARENT.upper()},
            {"traceparent": "00-" + "\N{ARABIC-INDIC DIGIT ONE}" * 32 + "-00f067aa0ba902b7-01"},
            {"traceparent": "01-" + "4" * 100_000},
            {"tracestate": "a=1"},
        ],
    )
    def test_a_malformed_traceparent_is_a_fresh_trace(
        self, headers: dict[str, str] | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        context = extract(headers)
        assert not trace.get_current_span(context).get_span_context().is_valid
        assert caplog.records == []

    @pytest.mark.parametrize(
        "tracestate",
        ["a=" + "x" * 600, f"A B {CANARY}", "a=1,a=2", "a", "=", ",".join(f"k{n}=1" for n in range(33)), "a=\x00"],
    )
    def test_a_bad_tracestate_is_dropped_and_the_trace_goes_on(
        self, tracestate: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        out: dict[str, str] = {}
        inject(out, extract({"traceparent": TRACEPARENT, "tracestate": tracestate}))
        assert out == {"traceparent": TRACEPARENT}
        assert caplog.records == []

    def test_inject_replaces_another_trace_whatever_its_case(self) -> None:
        headers = {"Traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "tracestate": "old=1", "Other": "x"}
        inject(headers, extract({"traceparent": TRACEPARENT}))
        assert headers == {"Other": "x", "traceparent": TRACEPARENT}

    def test_inject_without_a_trace_changes_nothing(self) -> None:
        headers = {"traceparent": "kept"}
        inject(headers, Context())
        assert headers == {"traceparent": "kept"}


class TestSpan:
    def test_an_error_is_recorded_by_its_type_alone(self, recorded: InMemorySpanExporter) -> None:
        with pytest.raises(ValueError, match=CANARY), start_span("s", parent=Context()):
            raise ValueError(CANARY)
        span = only(recorded)
        assert span.status.status_code is trace.StatusCode.ERROR
        assert attributes(span) == {"error.type": "ValueError"}
        assert CANARY not in span.to_json()

    def test_a_refusal_is_recorded_by_its_code(self, recorded: InMemorySpanExporter) -> None:
        refusal = Refusal(code="engine_error", message=CANARY)
        with pytest.raises(JobFailedError), start_span("s", parent=Context()):
            raise JobFailedError(refusal)
        assert attributes(only(recorded)) == {"error.type": "engine_error"}
        assert CANARY not in only(recorded).to_json()

    @pytest.mark.parametrize(
        "exc", [asyncio.CancelledError(), JobCancelledError(Refusal(code="internal", message="cancelled"))]
    )
    def test_a_cancel_is_no_error(self, exc: BaseException, recorded: InMemorySpanExporter) -> None:
        with pytest.raises(type(exc)), start_span("s", parent=Context()):
            raise exc
        span = only(recorded)
        assert span.status.status_code is trace.StatusCode.UNSET
        assert attributes(span) == {"headrace.outcome": "cancelled"}

    def test_what_was_said_before_is_not_overridden(self, recorded: InMemorySpanExporter) -> None:
        span = start_span("s", parent=Context())
        span.fail("queue_full")
        with pytest.raises(RuntimeError), span:
            raise RuntimeError
        assert attributes(only(recorded)) == {"error.type": "queue_full"}

    def test_it_ends_once_and_none_values_are_left_out(self, recorded: InMemorySpanExporter) -> None:
        span = start_span("s", parent=Context(), attributes={"a": 1, "b": None}, start_time_ns=1_000)
        span.set({"c": None, "d": "x" * 1_000})
        span.add_event(names.EVENT_REQUEUED, {names.HEADRACE_REASON: "died", "none": None})
        span.end(2_000)
        span.end(3_000)
        span.set({"late": True})
        found = only(recorded)
        assert (found.start_time, found.end_time) == (1_000, 2_000)
        assert attributes(found) == {"a": 1, "d": "x" * MAX_ATTRIBUTE_CHARS}
        assert [(event.name, dict(event.attributes or {})) for event in found.events] == [
            ("headrace.requeued", {"headrace.reason": "died"})
        ]

    async def test_a_stream_left_midway_is_one_cancelled_span_over_all_of_it(
        self, recorded: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The generator is closed by another task, thus in another context, than the one that started it."""

        async def stream() -> AsyncIterator[int]:
            with inference_span("chat", "m", provider="headrace", parent=Context()):
                for n in range(10):
                    yield n

        tokens = stream()
        before_ns = time.time_ns()
        assert await asyncio.create_task(anext(tokens)) == 0  # type: ignore[arg-type]
        assert recorded.get_finished_spans() == ()
        closing_ns = time.time_ns()
        await asyncio.create_task(tokens.aclose())  # type: ignore[attr-defined]
        span = only(recorded)
        assert attributes(span)["headrace.outcome"] == "cancelled"
        assert span.start_time is not None
        assert span.end_time is not None
        assert before_ns <= span.start_time <= closing_ns <= span.end_time
        assert caplog.records == []

    async def test_it_is_never_made_current(self, recorded: InMemorySpanExporter) -> None:
        with start_span("s", parent=Context()):
            assert not trace.get_current_span().get_span_context().is_valid

    def test_an_applications_own_span_is_the_parent_by_default(self, recorded: InMemorySpanExporter) -> None:
        outer = start_span("outer", parent=Context())
        with (
            trace.use_span(trace.get_current_span(outer.context)),
            inference_span("chat", "m", provider="headrace", parent=None) as inner,
        ):
            assert inner.trace_id == outer.trace_id


class TestNames:
    def test_they_are_the_installed_conventions(self) -> None:
        known = {
            value
            for module in (gen_ai_attributes, messaging_attributes, error_attributes)
            for name, value in vars(module).items()
            if name.isupper()
        }
        ours = {
            value for name, value in vars(names).items() if name.isupper() and isinstance(value, str) and "." in value
        }
        assert {name for name in ours if name.startswith(("gen_ai.", "messaging.", "error."))} <= known
        assert Schemas.V1_44_0.value == names.SCHEMA_URL

    def test_a_requests_life(self, recorded: InMemorySpanExporter) -> None:
        where = job_attributes(job="j1", tenant="default", lane="high", attempt=2, delivery_count=2, worker="w1")
        step_span(Step.PROCESS, "smollm2", parent=Context(), attributes=where).end()
        with inference_span("completions", "smollm2", provider="vllm", parent=Context(), max_tokens=9) as engine:
            engine.set(inference_result(num_input_tokens=3, num_output_tokens=4, finish_reasons=["stop"], ttft_s=0.5))
        process, chat = recorded.get_finished_spans()
        assert (process.name, process.kind) == ("process smollm2", trace.SpanKind.CONSUMER)
        assert attributes(process) == {
            "messaging.system": "nats",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "gen_ai.request.model": "smollm2",
            "headrace.job": "j1",
            "headrace.tenant": "default",
            "headrace.lane": "high",
            "headrace.attempt": 2,
            "headrace.delivery_count": 2,
            "headrace.worker": "w1",
        }
        assert (chat.name, chat.kind) == ("text_completion smollm2", trace.SpanKind.CLIENT)
        assert attributes(chat) == {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": "smollm2",
            "gen_ai.request.stream": True,
            "gen_ai.request.max_tokens": 9,
            "gen_ai.usage.input_tokens": 3,
            "gen_ai.usage.output_tokens": 4,
            "gen_ai.response.finish_reasons": ("stop",),
            "gen_ai.response.time_to_first_chunk": 0.5,
        }

    def test_links_without_a_trace_are_left_out(self, recorded: InMemorySpanExporter) -> None:
        step_span(Step.FETCH, parent=Context(), links=[extract({"traceparent": TRACEPARENT}), Context()]).end()
        assert [link.context.span_id for link in only(recorded).links] == [0x00F067AA0BA902B7]
        assert only(recorded).name == "fetch"


class TestDecision:
    @pytest.mark.parametrize(
        ("environ", "endpoint"),
        [
            ({}, None),
            ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None),
            ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/"}, "http://c:4318/v1/traces"),
            ({"OTEL_EXPORTER_OTLP_ENDPOINT": "https://[::1]:4318"}, "https://[::1]:4318/v1/traces"),
            ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://u:secret@c/x?key=secret"}, "http://c/x"),
            ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "TRUE"}, None),
            ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, None),
            (
                {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "console, otlp"},
                "http://c/v1/traces",
            ),
            (
                {
                    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c",
                    "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
                },
                "http://c/v1/traces",
            ),
        ],
    )
    def test_it_follows_the_standard_variables(
        self, environ: dict[str, str], endpoint: str | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert traces_endpoint(environ) == endpoint
        assert caplog.records == []

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
            ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
            ("OTEL_TRACES_EXPORTER", "zipkin"),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318"),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:port"),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[c"),
        ],
    )
    def test_what_cannot_be_done_is_named_once_and_tracing_stays_off(
        self, name: str, value: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert traces_endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", name: value}) is None
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert name in record.getMessage()


def test_a_closed_pipeline_that_is_still_on_its_way_out_takes_no_failures_of_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    gate = threading.Event()

    def pipeline(endpoint: str) -> OtlpPipeline:
        made = OtlpPipeline(service_name="s", instance_id="i", version="1", endpoint=endpoint)
        shutdown = made._provider.shutdown
        monkeypatch.setattr(made._provider, "shutdown", lambda: gate.wait() and shutdown())
        made._stop_waiting.set()  # so that `close` waits for nothing
        return made

    exporter = logging.getLogger(OTLPSpanExporter.__module__)
    before = exporter.filters[:]
    first = pipeline("http://first")
    first.close()
    second = pipeline("http://second")
    try:
        exporter.error("Failed to export span batch code: %s", 503)
    finally:
        second.close()
        gate.set()
        for thread in threading.enumerate():
            if thread.name == "telemetry shutdown":
                thread.join(5)
    assert [record.getMessage() for record in caplog.records] == [
        "traces do not reach http://second (HTTP 503); spans are dropped, requests go on"
    ]
    assert exporter.filters == before


OFF = """
import sys, time
from headrace.telemetry import Step, configure, extract, step_span
with configure("router", instance_id="r1", version="1") as telemetry:
    assert not telemetry.is_enabled
    parent = extract({"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"})
    start = time.process_time()
    for _ in range(20_000):
        with step_span(Step.PROCESS, "m", parent=parent):
            pass
    print((time.process_time() - start) / 20_000 * 1e6)
loaded = [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter", "requests"))]
assert not loaded, loaded
"""


def test_off_loads_no_sdk_and_costs_next_to_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", OFF], env={}, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 100, "microseconds for a span"


class TestLogs:
    @pytest.fixture(autouse=True)
    def _restored(self) -> Iterator[None]:
        root, ours = logging.getLogger(), logging.getLogger("headrace")
        before = root.handlers[:], root.level, ours.level
        yield
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        ours.setLevel(before[2])

    def lines(self, level: str = "info", *, json: bool) -> list[str]:
        stream = io.StringIO()
        configure_logging("worker", "error", json=json, stream=io.StringIO())
        configure_logging("worker", level, json=json, worker="w1", stream=stream)
        log = logging.getLogger("headrace.test")
        log.info("started\nforged \x1b[31m", extra={"trace_id": "ab" * 16, "job": "j1"})
        logging.getLogger("nats").info("payload %s", CANARY)
        try:
            raise ValueError(CANARY)
        except ValueError:
            log.exception("engine failed")
        return stream.getvalue().splitlines()

    def test_text_is_one_line_a_record_without_what_an_exception_says(self) -> None:
        first, second = self.lines(json=False)
        assert first.endswith(f" INFO    worker/w1 started\\nforged \\u001b[31m job=j1 trace_id={'ab' * 16}")
        assert " ERROR   worker/w1 engine failed exception=ValueError (test_telemetry.py:" in second
        assert CANARY not in second

    def test_json_has_service_worker_and_trace(self) -> None:
        first, second = (json.loads(line) for line in self.lines(json=True))
        assert first.items() >= {"service": "worker", "worker": "w1", "trace_id": "ab" * 16, "job": "j1"}.items()
        assert first["message"] == "started\nforged \x1b[31m"
        assert second["exception"].startswith("ValueError (test_telemetry.py:")
        assert CANARY not in str(second)

    def test_debug_shows_what_an_exception_says(self) -> None:
        assert CANARY in self.lines("debug", json=False)[1]

    def test_a_span_an_application_made_current_is_named(self) -> None:
        stream = io.StringIO()
        configure_logging("client", "info", json=True, stream=stream)
        parent = trace.get_current_span(extract({"traceparent": TRACEPARENT}))
        with trace.use_span(parent):
            logging.getLogger("headrace.test").info("hello")
        assert json.loads(stream.getvalue())["trace_id"] == TRACEPARENT.split("-")[1]
