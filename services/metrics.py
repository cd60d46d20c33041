"""What a process counts. The only module that imports prometheus_client, but for the monitor that shows it.

Labels are bounded whatever clients send: models that routers know (200, then `other`), pools that are configured,
lanes, codes of ours. Never a job, a tenant, a prompt or a model that is not known.
"""

import os
import socket
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headrace.schemas.metrics import Family, Measured, Sample

__all__ = [
    "ATTEMPTS",
    "EVICTIONS",
    "FAILOVER_S",
    "HANDED_OVER",
    "HTTP_OPEN",
    "HTTP_REQUESTS",
    "INTER_TOKEN_S",
    "QUEUE_WAIT_S",
    "REQUESTS_ACCEPTED",
    "REQUESTS_REFUSED",
    "TOKENS",
    "TTFT_S",
    "Bounded",
    "eviction_kind",
    "measured",
    "model_label",
]

_MAX_MODELS: Final = 200
_OTHER: Final = "other"
_SHORT_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_EVICTION_KINDS: Final = ("disconnected", "heartbeat expired", "heartbeats stopped")

_registry: Final = CollectorRegistry(auto_describe=False)

REQUESTS_ACCEPTED: Final = Counter(
    "headrace_requests_accepted", "Requests taken in.", ("model", "pool", "lane"), registry=_registry
)
REQUESTS_REFUSED: Final = Counter(
    "headrace_requests_refused", "Requests refused before they were taken in.", ("code",), registry=_registry
)
QUEUE_WAIT_S: Final = Histogram(
    "headrace_queue_wait_seconds",
    "From taken in to the first claim.",
    ("model", "lane"),
    buckets=_LONG_S,
    registry=_registry,
)
TTFT_S: Final = Histogram(
    "headrace_time_to_first_token_seconds",
    "From taken in to the first token of the answer.",
    ("model",),
    buckets=_LONG_S,
    registry=_registry,
)
INTER_TOKEN_S: Final = Histogram(
    "headrace_inter_token_seconds",
    "Between pieces of an answer, by token, as the engine gave them.",
    ("model",),
    buckets=_SHORT_S,
    registry=_registry,
)
TOKENS: Final = Counter("headrace_tokens", "Tokens of attempts that ended.", ("model", "kind"), registry=_registry)
ATTEMPTS: Final = Counter(
    "headrace_attempts", "Attempts that ended, by how they did.", ("model", "outcome"), registry=_registry
)
EVICTIONS: Final = Counter("headrace_evictions", "Workers declared dead.", ("reason",), registry=_registry)
HANDED_OVER: Final = Counter("headrace_requests_handed_over", "Requests given to other workers.", registry=_registry)
FAILOVER_S: Final = Histogram(
    "headrace_failover_seconds",
    "From the decision that a worker is dead to the hand-over of the last request it held.",
    buckets=_SHORT_S,
    registry=_registry,
)
HTTP_REQUESTS: Final = Counter("headrace_http_requests", "HTTP answers begun.", ("status",), registry=_registry)
HTTP_OPEN: Final = Gauge("headrace_http_open_requests", "HTTP requests being answered.", registry=_registry)


class Bounded:
    """Values of a label: the first `limit` that come, and one name for all others."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def __call__(self, value: str) -> str:
        """The value itself, or `other`."""
        if value not in self._known:
            if len(self._known) >= self._limit:
                return _OTHER
            self._known.add(value)
        return value


model_label: Final = Bounded(_MAX_MODELS)
"""The label of a model that is known to exist."""


def eviction_kind(reason: str) -> str:
    """A label for why a worker was evicted, whatever an operator wrote."""
    return next((kind for kind in _EVICTION_KINDS if reason.startswith(kind)), _OTHER)


def measured(service: str, worker: str = "") -> Measured:
    """What this process counted since it started."""
    origin = f"{socket.gethostname()}-{os.getpid()}"
    families = []
    for metric in _registry.collect():
        samples = tuple(
            Sample(sample.name, dict(sample.labels), float(sample.value))
            for sample in metric.samples
            if not sample.name.endswith("_created")
        )
        if samples:
            families.append(Family(metric.name, metric.type, metric.documentation, samples))
    return Measured(service=service, process=worker or origin, origin=origin, families=tuple(families))
