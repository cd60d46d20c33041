"""What is shown of what parts tell, and of names that nobody bounded before."""

import pytest

from headrace import metrics
from headrace.monitor.exposition import as_text
from headrace.schemas.metrics import Family, Measured, Sample
from headrace.schemas.overview import Overview, QueueOverview
from tests.scraping import Scrape


def shown(*parts: Measured, now: Overview | None = None) -> Scrape:
    return Scrape(as_text(parts, now or Overview(workers=(), queues=())).decode())


def part(*families: Family, process: str = "p") -> Measured:
    return Measured(service="worker", process=process, origin=process, families=families)


def counter(name: str, value: float, **labels: str) -> Family:
    return Family(name, "counter", "What it means.", (Sample(f"{name}_total", labels, value),))


def test_a_family_of_several_processes_is_shown_once() -> None:
    seen = shown(part(counter("headrace_x", 1), process="a"), part(counter("headrace_x", 2), process="b"))
    assert [family.name for family in seen.families if family.name == "headrace_x"] == ["headrace_x"]
    assert seen.total("headrace_x_total") == 3
    assert seen.total("headrace_x_total", process="b", service="worker") == 2


@pytest.mark.parametrize(
    "family",
    [
        counter("bad", 1),
        counter("headrace_bad-name", 1),
        counter("headrace_x", 1, Bad="x"),
        counter("headrace_x", 1, label="x" * 121),
        Family("headrace_x", "summary", "", ()),
        Family("headrace_x", "counter", "", (Sample("headrace_other_total", {}, 1.0),)),
    ],
)
def test_what_is_not_well_formed_is_left_out(family: Family) -> None:
    assert {name for name, _ in shown(part(family)).samples} == set()


def test_text_that_would_break_a_line_is_escaped() -> None:
    seen = shown(part(counter("headrace_x", 1, label='a"b\nheadrace_y_total 9\\')))
    assert seen.values("label") == {'a"b\nheadrace_y_total 9\\'}
    assert seen.total("headrace_y_total") == 0


def test_a_family_of_another_type_is_not_mixed_in() -> None:
    gauge = Family("headrace_x", "gauge", "", (Sample("headrace_x", {}, 5.0),))
    seen = shown(part(counter("headrace_x", 1), process="a"), part(gauge, process="b"))
    assert seen.samples.keys() == {("headrace_x_total", frozenset({("service", "worker"), ("process", "a")}))}


def test_queues_of_one_lane_are_one() -> None:
    queues = tuple(
        QueueOverview(model="m", pool="default", lane="low", queue=queue, queued=3, running=1, oldest_age_s=age)
        for queue, age in (("a", 1.0), ("b", 7.0), ("c", None))
    )
    seen = shown(now=Overview(workers=(), queues=queues))
    labels = {"model": "m", "pool": "default", "lane": "low"}
    assert seen.total("headrace_queue_depth", **labels) == 9
    assert seen.total("headrace_queue_oldest_age_seconds", **labels) == 7.0
    assert "queue" not in {label for _, has in seen.samples for label in dict(has)}


def test_more_values_than_are_allowed_are_one() -> None:
    bounded = metrics.Bounded(3)
    assert [bounded(f"m{number}") for number in range(6)] == ["m0", "m1", "m2", "other", "other", "other"]
    assert bounded("m1") == "m1"


def test_reasons_of_evictions_are_few() -> None:
    reasons = ["disconnected: Read Error", "heartbeats stopped", "heartbeat expired", "because I say so 17"]
    assert [metrics.eviction_kind(reason) for reason in reasons] == [
        "disconnected", "heartbeats stopped", "heartbeat expired", "other",
    ]  # fmt: skip


def test_a_bucket_counts_those_below_it_and_its_own_bound() -> None:
    histogram = metrics._Histogram("headrace_x_seconds", "Meaning.", ("model",), bounds=(0.5, 1.0))
    for value in (0.1, 0.5, 0.7, 3.0):
        histogram.observe(value, "m")
    family = Family("headrace_x_seconds", histogram.kind, histogram.meaning, tuple(histogram.samples()))
    seen = shown(part(family))
    buckets = [seen.total("headrace_x_seconds_bucket", le=bound) for bound in ("0.5", "1.0", "+Inf")]
    assert buckets == [2, 3, 4]
    assert seen.total("headrace_x_seconds_count") == 4
    assert seen.total("headrace_x_seconds_sum") == pytest.approx(4.3)


def test_what_never_happened_is_zero_where_it_has_no_labels() -> None:
    names = {sample.name for family in metrics.measured("monitor").families for sample in family.samples}
    assert {"headrace_requests_handed_over_total", "headrace_failover_seconds_count"} <= names


def test_no_family_has_a_label_that_a_client_chooses() -> None:
    allowed = {"model", "pool", "lane", "code", "kind", "outcome", "reason", "status", "le"}
    told = metrics.measured("router")
    assert {label for family in told.families for sample in family.samples for label in sample.labels} <= allowed
    assert {name for name in vars(metrics) if name.isupper() and name in metrics.__all__} == {
        name for name in metrics.__all__ if name.isupper()
    }
