"""The export pipeline: OpenTelemetry's SDK and its OTLP/HTTP exporter. Imported only when traces are wanted."""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from headrace.telemetry import names

__all__ = ["OtlpPipeline"]

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S: Final = 1.5
WARNING_INTERVAL_S: Final = 60.0

_EXPORTER_LOGGER: Final = OTLPSpanExporter.__module__
_QUEUE_LOGGERS: Final = ("opentelemetry.sdk._shared_internal", "opentelemetry.sdk.trace.export")
_LOGGERS: Final = (_EXPORTER_LOGGER, *_QUEUE_LOGGERS)


class OtlpPipeline:
    """Spans from `tracer` to the collector, in batches, by a thread of the SDK's; nobody else ever waits for it.

    The queue is bounded (`OTEL_BSP_MAX_QUEUE_SIZE`, 2048 spans by default); when it is full the oldest span is dropped.
    A collector that does not take the spans is one warning a minute.
    """

    def __init__(self, *, service_name: str, instance_id: str, version: str, endpoint: str) -> None:
        resource = Resource.create(
            {
                "service.name": service_name,
                "service.instance.id": instance_id,
                "service.version": version,
                **OTELResourceDetector().detect().attributes,
                names.HEADRACE_SERVICE: service_name,
            }
        )
        self._stop_waiting = threading.Event()
        self._failures = _FailureFilter(endpoint, self._stop_waiting)
        self._exporter = _CheckedExporter(OTLPSpanExporter(), self._stop_waiting)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self.tracer = self._provider.get_tracer("headrace", version, names.SCHEMA_URL)
        for name in _LOGGERS:
            logger = logging.getLogger(name)
            # One that was closed may still be on its way out, and would take our failures for its own.
            for stale in [each for each in logger.filters if isinstance(each, _FailureFilter)]:
                logger.removeFilter(stale)
            logger.addFilter(self._failures)

    def close(self) -> None:
        """Send what is queued and stop, in `FLUSH_TIMEOUT_S` at most; at the first sign that it would fail, at once.

        The SDK's own shutdown waits for half a minute, so it runs in a thread that is left behind when time is up; it
        is a daemon and delays no exit.
        """
        threading.Thread(target=self._shut_down, name="telemetry shutdown", daemon=True).start()
        if not self._stop_waiting.wait(FLUSH_TIMEOUT_S):
            self._failures.warn("no answer")
        self._exporter.shutdown()

    def _shut_down(self) -> None:
        self._provider.shutdown()
        self._stop_waiting.set()
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(self._failures)


class _CheckedExporter(SpanExporter):
    """The OTLP exporter; clears `stop_waiting` at the end of each batch and sends nothing after `shutdown`."""

    def __init__(self, exporter: OTLPSpanExporter, stop_waiting: threading.Event) -> None:
        self._exporter = exporter
        self._stop_waiting = stop_waiting
        self._is_shut_down = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._is_shut_down.is_set():
            return SpanExportResult.FAILURE
        try:
            return self._exporter.export(spans)
        finally:
            self._stop_waiting.clear()

    def shutdown(self) -> None:
        if not self._is_shut_down.is_set():
            self._is_shut_down.set()
            self._exporter.shutdown()  # type: ignore[no-untyped-call,unused-ignore]


class _FailureFilter(logging.Filter):
    """Replaces what the SDK logs about failed exports, a record for each attempt, by one warning a minute.

    The exporter's records are also the only sign of a failed attempt it will repeat, so they set `stop_waiting`.
    """

    def __init__(self, endpoint: str, stop_waiting: threading.Event) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._stop_waiting = stop_waiting
        self._next_warning_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        if record.name == _EXPORTER_LOGGER:
            self._stop_waiting.set()
        self.warn(_reason(record))
        return False

    def warn(self, reason: str) -> None:
        """Say that spans are lost, unless that was said in the last minute."""
        now_s = time.monotonic()
        if now_s >= self._next_warning_s:
            self._next_warning_s = now_s + WARNING_INTERVAL_S
            log.warning("traces do not reach %s (%s); spans are dropped, requests go on", self._endpoint, reason)


def _reason(record: logging.LogRecord) -> str:
    """The HTTP status or the type of the exception in an exporter's record; its texts may hold credentials."""
    for value in record.args if isinstance(record.args, tuple) else ():
        if isinstance(value, BaseException):
            return type(value).__name__
        if isinstance(value, int):
            return f"HTTP {value}"
    return "queue full" if record.name in _QUEUE_LOGGERS else "no usable answer"
