"""A small real OTLP/HTTP collector for tests: it takes protobuf over HTTP, plain or gzip, and keeps every span."""

import asyncio
import gzip
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

__all__ = ["OtlpReceiver", "ReceivedEvent", "ReceivedSpan"]


@dataclass(frozen=True)
class ReceivedEvent:
    """An event of a span."""

    name: str
    attributes: dict[str, Any]


@dataclass(frozen=True)
class ReceivedSpan:
    """One span as the wire had it. Ids are hex; `parent_span_id` of a root is ""; times are ns since the epoch."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_span_id: str
    start_time_ns: int
    end_time_ns: int
    status: str
    status_message: str
    attributes: dict[str, Any]
    resource: dict[str, Any]
    scope: str
    schema_url: str
    events: tuple[ReceivedEvent, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    trace_state: str = ""

    @property
    def service(self) -> str:
        """`service.name` of the process that sent it."""
        return str(self.resource.get("service.name", ""))


@dataclass
class OtlpReceiver:
    """Listens on loopback, on a port the OS chose, while its block runs.

        with OtlpReceiver() as receiver:
            start_service(env={**os.environ, **receiver.environ})
            spans = receiver.wait_for(lambda spans: any(span.name == "admit" for span in spans), timeout_s=5)

    `bodies` has every request body it took, uncompressed, for tests that look for what must not be in one.
    """

    bodies: list[bytes] = field(default_factory=list)
    _spans: list[ReceivedSpan] = field(default_factory=list)
    _arrived: threading.Condition = field(default_factory=threading.Condition)

    def __enter__(self) -> Self:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.receiver = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="OTLP receiver")
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        """Base URL, the value of `OTEL_EXPORTER_OTLP_ENDPOINT`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def environ(self) -> dict[str, str]:
        """Variables that make a process send its spans here, soon after they end."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_BSP_SCHEDULE_DELAY": "50", "NO_PROXY": "127.0.0.1"}

    def spans(self) -> list[ReceivedSpan]:
        """All spans so far, in order of arrival."""
        with self._arrived:
            return list(self._spans)

    def wait_for(self, predicate: Callable[[Sequence[ReceivedSpan]], bool], timeout_s: float) -> list[ReceivedSpan]:
        """Block until `predicate` holds for all spans so far; AssertionError with their names if that takes longer."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: predicate(self._spans), timeout_s):
                raise AssertionError(f"not in {timeout_s} s; spans so far: {sorted(span.name for span in self._spans)}")
            return list(self._spans)

    async def wait_for_async(
        self, predicate: Callable[[Sequence[ReceivedSpan]], bool], timeout_s: float
    ) -> list[ReceivedSpan]:
        """`wait_for` without blocking the event loop."""
        return await asyncio.to_thread(self.wait_for, predicate, timeout_s)

    def accept(self, body: bytes) -> None:
        """Take one decoded request body. Raises DecodeError, keeping nothing, if it is not OTLP."""
        spans = list(_decode(ExportTraceServiceRequest.FromString(body)))
        with self._arrived:
            self.bodies.append(body)
            self._spans.extend(spans)
            self._arrived.notify_all()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    receiver: OtlpReceiver


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 10

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path != "/v1/traces":
            self._answer(404)
        elif self.headers.get("Content-Type") != "application/x-protobuf":
            self._answer(415)
        else:
            try:
                self.server.receiver.accept(
                    gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
                )
            except (DecodeError, OSError, EOFError):
                self._answer(400)
            else:
                self._answer(200, ExportTraceServiceResponse().SerializeToString())

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def _decode(request: ExportTraceServiceRequest) -> Sequence[ReceivedSpan]:
    return [
        ReceivedSpan(
            name=span.name,
            kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_span_id=span.parent_span_id.hex(),
            start_time_ns=span.start_time_unix_nano,
            end_time_ns=span.end_time_unix_nano,
            status=trace_pb2.Status.StatusCode.Name(span.status.code).removeprefix("STATUS_CODE_"),
            status_message=span.status.message,
            attributes=_attributes(span.attributes),
            resource=_attributes(resource_spans.resource.attributes),
            scope=scope_spans.scope.name,
            schema_url=scope_spans.schema_url,
            events=tuple(ReceivedEvent(event.name, _attributes(event.attributes)) for event in span.events),
            links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
            trace_state=span.trace_state,
        )
        for resource_spans in request.resource_spans
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]


def _attributes(pairs: Sequence[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    return getattr(value, kind)
