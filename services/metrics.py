"""What a process counts, in one thread. Only the monitor that shows it imports prometheus_client, which starts slowly.

Labels are bounded whatever clients send: models that routers know (200, then `other`), pools that are configured,
lanes, codes of ours. Never a job, a tenant, a prompt or a model that is not known.
"""

import bisect
import os
import socket
from collections.abc import Iterator
from typing import Final

from headrace.schemas.metrics import Family, Measured, Sample

__all__ = [
    "ATTEMPTS",
    "EVICTIONS",
    "FAILOVER_S",
    "HANDED_OVER",
    "HTTP_OPEN",
    "HTTP_REQUESTS",
    "INTER_TOKEN_S",
    "METRICS_DROPPED",
    "PROBES",
    "QUEUE_WAIT_S",
    "REPLICA_FAILURES",
    "REQUESTS_ACCEPTED",
    "REQUESTS_REFUSED",
    "RESTARTS",
    "SCALINGS",
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


class _Counter:
    """A number that only rises, for each combination of labels."""

    kind: Final = "counter"

    def __init__(self, name: str, meaning: str, labels: tuple[str, ...] = ()) -> None:
        self.name = name
        self.meaning = meaning
        self._labels = labels
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0}

    def add(self, *labels: str, number: float = 1) -> None:
        """Count so many more under these values of the labels, in their order."""
        self._values[labels] = self._values.get(labels, 0) + number

    def samples(self) -> Iterator[Sample]:
        """As the exposition has them."""
        for values, number in self._values.items():
            yield Sample(f"{self.name}_total", dict(zip(self._labels, values, strict=True)), float(number))


class _Histogram:
    """How many observations were at most so large, for each combination of labels."""

    kind: Final = "histogram"

    def __init__(self, name: str, meaning: str, labels: tuple[str, ...] = (), *, bounds: tuple[float, ...]) -> None:
        self.name = name
        self.meaning = meaning
        self._labels = labels
        self._bounds = bounds
        self._numbers: dict[tuple[str, ...], list[int]] = {} if labels else {(): [0] * (len(bounds) + 1)}
        self._sums: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def observe(self, value: float, *labels: str) -> None:
        """Take in one observation under these values of the labels, in their order."""
        numbers = self._numbers.get(labels)
        if numbers is None:
            numbers = self._numbers[labels] = [0] * (len(self._bounds) + 1)
        numbers[bisect.bisect_left(self._bounds, value)] += 1
        self._sums[labels] = self._sums.get(labels, 0.0) + value

    def samples(self) -> Iterator[Sample]:
        """As the exposition has them: each bucket counts those below it too."""
        for values, numbers in self._numbers.items():
            labels = dict(zip(self._labels, values, strict=True))
            num_up_to = 0
            for bound, number in zip((*map(repr, self._bounds), "+Inf"), numbers, strict=True):
                num_up_to += number
                yield Sample(f"{self.name}_bucket", {**labels, "le": bound}, float(num_up_to))
            yield Sample(f"{self.name}_count", labels, float(num_up_to))
            yield Sample(f"{self.name}_sum", labels, self._sums[values])


class _Open:
    """How many are open now: a context that counts while it lasts."""

    kind: Final = "gauge"

    def __init__(self, name: str, meaning: str) -> None:
        self.name = name
        self.meaning = meaning
        self._number = 0

    def __enter__(self) -> None:
        self._number += 1

    def __exit__(self, *exc_info: object) -> None:
        self._number -= 1

    def samples(self) -> Iterator[Sample]:
        """As the exposition has it."""
        yield Sample(self.name, {}, float(self._number))


REQUESTS_ACCEPTED: Final = _Counter("headrace_requests_accepted", "Requests taken in.", ("model", "pool", "lane"))
REQUESTS_REFUSED: Final = _Counter(
    "headrace_requests_refused", "Requests refused before they were taken in.", ("code",)
)
QUEUE_WAIT_S: Final = _Histogram(
    "headrace_queue_wait_seconds", "From taken in to the first claim.", ("model", "lane"), bounds=_LONG_S
)
TTFT_S: Final = _Histogram(
    "headrace_time_to_first_token_seconds",
    "From taken in to the first token of the answer.",
    ("model",),
    bounds=_LONG_S,
)
INTER_TOKEN_S: Final = _Histogram(
    "headrace_inter_token_seconds",
    "Between pieces of an answer, by token, as the engine gave them.",
    ("model",),
    bounds=_SHORT_S,
)
TOKENS: Final = _Counter("headrace_tokens", "Tokens of attempts that ended.", ("model", "kind"))
ATTEMPTS: Final = _Counter("headrace_attempts", "Attempts that ended, by how they did.", ("model", "outcome"))
EVICTIONS: Final = _Counter("headrace_evictions", "Workers declared dead.", ("reason",))
HANDED_OVER: Final = _Counter("headrace_requests_handed_over", "Requests given to other workers.")
FAILOVER_S: Final = _Histogram(
    "headrace_failover_seconds",
    "From the decision that a worker is dead to the hand-over of the last request it held.",
    bounds=_SHORT_S,
)
PROBES: Final = _Counter("headrace_probes", "Requests of workers to their own engines.", ("model", "outcome"))
RESTARTS: Final = _Counter("headrace_worker_restarts", "Engines started again for their health.", ("model", "ailment"))
SCALINGS: Final = _Counter(
    "headrace_scale_decisions", "Changes of the number of replicas.", ("model", "pool", "direction")
)
REPLICA_FAILURES: Final = _Counter(
    "headrace_replica_failures", "Workers of host agents that ended, or did not come up, unasked.", ("model",)
)
HTTP_REQUESTS: Final = _Counter("headrace_http_requests", "HTTP answers begun.", ("status",))
METRICS_DROPPED: Final = _Counter("headrace_metrics_dropped", "Of parts' answers to a scrape, not shown.", ("kind",))
HTTP_OPEN: Final = _Open("headrace_http_open_requests", "HTTP requests being answered.")

_ALL: Final = (
    REQUESTS_ACCEPTED, REQUESTS_REFUSED, QUEUE_WAIT_S, TTFT_S, INTER_TOKEN_S, TOKENS, ATTEMPTS, EVICTIONS, HANDED_OVER,
    FAILOVER_S, PROBES, RESTARTS, SCALINGS, REPLICA_FAILURES, HTTP_REQUESTS, HTTP_OPEN, METRICS_DROPPED,
)  # fmt: skip


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
    families = [
        Family(each.name, each.kind, each.meaning, samples) for each in _ALL if (samples := tuple(each.samples()))
    ]
    return Measured(service=service, process=worker or origin, origin=origin, families=tuple(families))
