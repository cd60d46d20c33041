"""Prometheus's text of the whole deployment: what every part counted, and what the monitor sees now."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from headrace import metrics
from headrace.bus.connection import Bus
from headrace.bus.heartbeats import WorkersView
from headrace.bus.overview import overview
from headrace.errors import BrokerError
from headrace.metrics import model_label
from headrace.monitor.counted import counted
from headrace.schemas.instances import GroupName
from headrace.schemas.metrics import Measured
from headrace.schemas.overview import Overview, QueueOverview, WorkerOverview

__all__ = ["Answers", "Exposition", "as_text"]

_WITHIN_S: Final = 0.5
_QUIET_S: Final = 0.1
_MAX_PARTS: Final = 2048
_MAX_ANSWER_BYTES: Final = 512 << 10
_MAX_BYTES: Final = 32 << 20
_NONE: Final[Mapping[GroupName, int]] = {}


class Exposition:
    """Asks all parts at each scrape, one scrape at a time; a part that does not answer is left out of that one.

    Those who come during a scrape share the next: however many ask, or leave again, nobody waits for more than two.
    """

    def __init__(self, bus: Bus, view: WorkersView, wanted: Callable[[], Mapping[GroupName, int]] = dict) -> None:
        self._bus = bus
        self._view = view
        self._wanted = wanted
        self._one_at_a_time = asyncio.Lock()
        self._num_begun = 0
        self._latest: bytes | BrokerError | None = None

    async def text(self) -> bytes:
        """The text format, version 0.0.4. Raises BrokerError where the broker does not answer."""
        num_begun = self._num_begun
        async with self._one_at_a_time:
            if self._num_begun == num_begun or self._latest is None:
                self._num_begun += 1
                self._latest = None
                self._latest = await self._scraped()
            latest = self._latest
        if isinstance(latest, BrokerError):
            raise latest.with_traceback(None)
        return latest

    async def _scraped(self) -> bytes | BrokerError:
        asking = asyncio.create_task(self._ask(), name="metrics of all parts")
        try:
            now = await overview(self._bus)
            parts = await asking
        except BrokerError as error:
            return error
        finally:
            asking.cancel()
        text, dropped = await asyncio.to_thread(as_text, parts, now, self._wanted())
        for kind, number in dropped.items():
            metrics.METRICS_DROPPED.add(kind, number=number)
        return text

    async def _ask(self) -> list[Measured]:
        """Until every live worker and, a moment long, nobody else has answered, or the time is over."""
        inbox = self._bus.new_inbox()
        answers = await self._bus.subscribe(inbox)
        found = Answers()
        until = time.monotonic() + _WITHIN_S
        try:
            await self._bus.publish(self._bus.names.metrics(), reply=inbox)
            while (left_s := until - time.monotonic()) > 0:
                wait_s = min(left_s, _QUIET_S) if self._have_all_workers(found.parts) else left_s
                message = await self._bus.next_message(answers, wait_s)
                if message is None:
                    break
                if not found.take(message.data):
                    metrics.METRICS_DROPPED.add("answer")
        finally:
            if not self._bus.nc.is_closed:
                await answers.unsubscribe()
        return list(found.parts)

    def _have_all_workers(self, found: Iterable[Measured]) -> bool:
        answered = {measured.process for measured in found}
        expected = [beat.worker for beat in self._view.beats.values() if beat.state in ("Ready", "Busy")]
        return answered.issuperset(expected)


class Answers:
    """What parts answered to one question, each part's first answer, within bounds."""

    def __init__(self) -> None:
        self._parts: dict[str, Measured] = {}
        self._num_bytes = 0

    @property
    def parts(self) -> Iterable[Measured]:
        """Those that were taken in."""
        return self._parts.values()

    def take(self, data: bytes) -> bool:
        """Take in one answer; False where it is too large, one too many, or cannot be read."""
        if len(data) > _MAX_ANSWER_BYTES or self._num_bytes + len(data) > _MAX_BYTES or len(self._parts) >= _MAX_PARTS:
            return False
        try:
            measured = msgspec.json.decode(data, type=Measured)
        except (msgspec.DecodeError, RecursionError):
            return False
        self._num_bytes += len(data)
        self._parts.setdefault(measured.origin, measured)
        return True


def as_text(
    parts: Sequence[Measured], now: Overview, wanted: Mapping[GroupName, int] = _NONE
) -> tuple[bytes, Counter[str]]:
    """The metrics of the parts, each with its place as labels, and gauges of queues, workers and wanted replicas; and
    what was dropped of the former, by `kind`.
    """
    registry = CollectorRegistry(auto_describe=False)
    families, dropped = counted(parts)
    registry.register(_Collected([*families, *_of_queues(now.queues), *_of_workers(now.workers), _of_groups(wanted)]))
    return generate_latest(registry), dropped


class _Collected:
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


def _of_queues(queues: Iterable[QueueOverview]) -> list[Metric]:
    labels = ("model", "pool", "lane")
    queued = GaugeMetricFamily("headrace_queue_depth", "Requests that wait.", labels=labels)
    running = GaugeMetricFamily("headrace_queue_running", "Requests handed to workers, not settled.", labels=labels)
    oldest = GaugeMetricFamily("headrace_queue_oldest_age_seconds", "How long the oldest has waited.", labels=labels)
    by_lane: dict[tuple[str, str, str], list[QueueOverview]] = defaultdict(list)
    for queue in queues:
        by_lane[queue.model, queue.pool, queue.lane].append(queue)
    for key, members in by_lane.items():
        queued.add_metric(key, sum(each.queued for each in members))
        running.add_metric(key, sum(each.running for each in members))
        oldest.add_metric(key, max(each.oldest_age_s or 0.0 for each in members))
    return [queued, running, oldest]


def _of_workers(workers: Iterable[WorkerOverview]) -> list[Metric]:
    labels = ("model", "pool", "worker")
    state = GaugeMetricFamily("headrace_worker_state", "1 for the state it is in.", labels=(*labels, "state"))
    running = GaugeMetricFamily("headrace_worker_running", "Requests that its engine works on.", labels=labels)
    waiting = GaugeMetricFamily("headrace_worker_waiting", "Requests it holds that do not fit now.", labels=labels)
    slots = GaugeMetricFamily("headrace_worker_slots", "Requests it may run at once.", labels=labels)
    kv_tokens = GaugeMetricFamily("headrace_worker_kv_tokens", "KV-cache tokens.", labels=(*labels, "kind"))
    memory = GaugeMetricFamily(
        "headrace_worker_memory_bytes", "Memory that its capacity is measured in.", labels=(*labels, "kind")
    )
    left_out = GaugeMetricFamily("headrace_worker_left_out", "1 where restarts did not help.", labels=labels)
    for worker in workers:
        key = (worker.model, worker.pool, worker.id)
        state.add_metric((*key, worker.state), 1)
        running.add_metric(key, worker.running)
        waiting.add_metric(key, worker.waiting)
        slots.add_metric(key, worker.max_concurrency)
        left_out.add_metric(key, int(worker.health is not None and worker.health.is_left_out))
        kv_tokens.add_metric((*key, "capacity"), worker.kv_capacity_tokens)
        kv_tokens.add_metric((*key, "reserved"), worker.kv_reserved_tokens)
        for kind in ("total", "free", "reserved"):
            if (value := getattr(worker, f"memory_{kind}_bytes")) is not None:
                memory.add_metric((*key, kind), value)
    return [state, running, waiting, slots, kv_tokens, memory, left_out]


def _of_groups(wanted: Mapping[GroupName, int]) -> Metric:
    """By model and pool; of models beyond the bound of the label, the sum."""
    number: dict[tuple[str, str], int] = defaultdict(int)
    for name, replicas in sorted(wanted.items()):
        number[model_label(name.model), name.pool] += replicas
    metric = GaugeMetricFamily("headrace_replicas_wanted", "Replicas that shall be there.", labels=("model", "pool"))
    for key, replicas in number.items():
        metric.add_metric(key, replicas)
    return metric
