"""Traces: one per request across attempts, in OpenTelemetry's names, exported over OTLP when `OTEL_*` asks for it.

Nothing here holds a prompt, a completion or the text of an exception. Contexts are passed, never attached to the
running task, so a span may begin in one task and end in another, or live across the yields of an async generator.
Without an exporter a span costs a few microseconds and an incoming trace still reaches the outgoing headers.
"""

from headrace.telemetry.environment import Telemetry, configure, traces_endpoint
from headrace.telemetry.propagation import extract, inject
from headrace.telemetry.spans import (
    Attribute,
    Span,
    Step,
    inference_result,
    inference_span,
    job_attributes,
    start_span,
    step_span,
)

__all__ = [
    "Attribute",
    "Span",
    "Step",
    "Telemetry",
    "configure",
    "extract",
    "inference_result",
    "inference_span",
    "inject",
    "job_attributes",
    "start_span",
    "step_span",
    "traces_endpoint",
]
