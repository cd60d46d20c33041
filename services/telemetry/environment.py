"""Whether this process exports its spans: decided by the standard `OTEL_*` variables, nothing of ours.

Off, no part of the SDK is imported. What the variables say but cannot be done is one warning and tracing stays off:
a service never fails to start for its traces.
"""

import logging
import os
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import urlsplit

from opentelemetry import trace

from headrace.telemetry.spans import use_tracer

if TYPE_CHECKING:
    from headrace.telemetry.otlp import OtlpPipeline

__all__ = ["Telemetry", "configure", "traces_endpoint"]

log = logging.getLogger(__name__)

_PROTOCOL: Final = "http/protobuf"


class Telemetry:
    """The process's tracing, on or off, until it is closed; enter it around `asyncio.run`, since closing may block.

    Closing sends what is queued and returns within two seconds whatever the collector does, at once if it is already
    known not to answer. Safe to close twice.
    """

    def __init__(self, pipeline: "OtlpPipeline | None" = None) -> None:
        self._pipeline = pipeline
        self._previous = use_tracer(pipeline.tracer) if pipeline is not None else None

    @property
    def is_enabled(self) -> bool:
        """Whether spans are exported by this process's own pipeline."""
        return self._pipeline is not None

    def close(self) -> None:
        """Send what is queued, for two seconds at most, and stop exporting; spans ended later are dropped."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            use_tracer(self._previous)
            pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def configure(service_name: str, *, instance_id: str, version: str) -> Telemetry:
    """Start exporting this process's spans if the environment asks for it.

    `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` win over the arguments; sampler, batch and exporter variables
    are the SDK's own. An application that has set a tracer provider keeps it: spans go there, and closing it is its
    affair.
    """
    endpoint = traces_endpoint(os.environ)
    if endpoint is None or not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return Telemetry()
    try:
        from headrace.telemetry.otlp import OtlpPipeline

        pipeline = OtlpPipeline(service_name=service_name, instance_id=instance_id, version=version, endpoint=endpoint)
    except Exception as exc:  # whatever the SDK finds wrong with its variables must not stop a service
        log.warning("tracing is off: the OpenTelemetry SDK cannot start: %s: %s", type(exc).__name__, exc)
        return Telemetry()
    return Telemetry(pipeline)


def traces_endpoint(environ: Mapping[str, str]) -> str | None:
    """The collector's URL for traces, without credentials, fit to be shown; None if traces are not to be exported.

    Set by `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, or `OTEL_EXPORTER_OTLP_ENDPOINT` with `/v1/traces` added. None too if
    `OTEL_SDK_DISABLED` is true, `OTEL_TRACES_EXPORTER` lacks `otlp`, or the protocol is not `http/protobuf`, the only
    one supported: sending that to a gRPC port would only fail later. Unusable values are warned of.
    """

    def value(name: str) -> str:
        return environ.get(name, "").strip()

    exporters = {name.strip() for name in (value("OTEL_TRACES_EXPORTER") or "otlp").split(",")}
    base = value("OTEL_EXPORTER_OTLP_ENDPOINT").removesuffix("/")
    url = value("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or (f"{base}/v1/traces" if base else "")
    if not url or value("OTEL_SDK_DISABLED").lower() == "true" or exporters == {"none"}:
        return None
    if "otlp" not in exporters:
        return _off("OTEL_TRACES_EXPORTER", value("OTEL_TRACES_EXPORTER"), "otlp or none")
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := value(name):
            if protocol != _PROTOCOL:
                return _off(name, protocol, f"{_PROTOCOL}, usually on port 4318")
            break
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return _off("OTEL_EXPORTER_OTLP_ENDPOINT", "…", "a URL such as http://localhost:4318")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return _off("OTEL_EXPORTER_OTLP_ENDPOINT", "…", "a URL such as http://localhost:4318")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path}"


def _off(name: str, value: str, allowed: str) -> str | None:
    """No endpoint, and a warning that says why."""
    log.warning("tracing is off: %s is %r, but must be %s", name, value[:80], allowed)
    return None
