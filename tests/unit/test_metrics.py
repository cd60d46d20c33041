"""What is shown of what parts tell, and of names that nobody bounded before."""

import msgspec
import pytest

from headrace import metrics
from headrace.monitor.exposition import Answers, as_text
from headrace.schemas.metrics import Family, Measured, Sample
from headrace.schemas.overview import Overview, QueueOverview
from tests.scraping import Scrape


def shown(*parts: Measured, now: Overview | None = None) -> Scrape:
    return Scrape(as_text(parts, now or Overview(workers=(), queues=()))[0].decode())


def dropped(*parts: Measured) -> dict[str, int]:
    return dict(as_text(parts, Overview(workers=(), queues=()))[1])


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
        counter("headrace_x", 1, **dict.fromkeys("abcdefghi", "x")),
        Family("headrace_x", "summary", "", ()),
        Family("headrace_x", "counter", "", (Sample("headrace_other_total", {}, 1.0),)),
    ],
)
def test_what_is_not_well_formed_is_left_out(family: Family) -> None:
    assert {name for name, _ in shown(part(family)).samples} == set()
    assert dropped(part(family)).keys() <= {"family", "series"}
    assert dropped(part(family)).get("series", 0) == len(family.samples)


def family_of(name: str, num_series: int) -> Family:
    samples = tuple(Sample(f"{name}_total", {"model": f"m{number}"}, 1.0) for number in range(num_series))
    return Family(name, "counter", "What it means.", samples)


def test_a_part_shows_no_more_series_than_its_share_and_no_family_in_part() -> None:
    families = family_of("headrace_a", 3_000), family_of("headrace_b", 1_001), family_of("headrace_c", 1_000)
    forged, honest = part(*families, process="a"), part(counter("headrace_b", 1), process="b")
    seen = shown(forged, honest)
    assert len(seen.samples) == 3_000 + 1_000 + 1
    assert {name for name, labels in seen.samples if ("process", "a") in labels} == {
        "headrace_a_total", "headrace_c_total",
    }  # fmt: skip
    assert dropped(forged, honest) == {"family": 1, "series": 1_001}
    assert dropped(honest) == {}


def test_the_largest_answer_of_one_part_is_a_small_text() -> None:
    empty = Sample("headrace_x", {}, 1.0)
    forged = Measured(
        service="s" * 50,
        process="p" * 130,
        origin="o",
        families=(Family("headrace_x", "gauge", "", (empty,) * 60_000),),
    )
    assert not Answers().take(msgspec.json.encode(forged))
    most = msgspec.structs.replace(forged, families=(Family("headrace_x", "gauge", "", (empty,) * 4_000),) * 5)
    assert Answers().take(msgspec.json.encode(most))
    text, left_out = as_text([most], Overview(workers=(), queues=()))
    assert len(text) < 2 << 20
    assert left_out == {"family": 4, "series": 16_000}


def test_a_part_may_make_up_no_more_families_than_are_shown_of_one_and_of_all() -> None:
    def made_up(process: str) -> Measured:
        return part(*(counter(f"headrace_{process}_{number}", 1) for number in range(100)), process=process)

    seen = shown(*(made_up(process) for process in "abcdefgh"))
    assert len(seen.samples) == 256
    assert len(shown(made_up("a")).samples) == 64
    assert dropped(made_up("a")) == {"family": 36, "series": 36}


def test_where_parts_are_many_each_has_an_equal_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.monitor.counted._MAX_SERIES", 40)
    parts = [part(family_of("headrace_a", size), process=str(size)) for size in (10, 10, 11, 3_000)]
    seen = shown(*parts)
    assert seen.values("process") == {"10"}
    assert dropped(*parts) == {"family": 2, "series": 3_011}


def test_answers_that_are_too_large_too_many_or_no_answers_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(origin: str) -> bytes:
        return msgspec.json.encode(part(counter("headrace_x", 1), process=origin))

    taken = Answers()
    assert not taken.take(b"{")
    assert not taken.take(b"[" * 100_000)
    assert not taken.take(answer("x" * (512 << 10)))
    assert taken.take(answer("a"))
    monkeypatch.setattr("headrace.monitor.exposition._MAX_PARTS", 2)
    assert taken.take(answer("b"))
    assert not taken.take(answer("c"))
    assert [each.process for each in taken.parts] == ["a", "b"]
    monkeypatch.setattr("headrace.monitor.exposition._MAX_BYTES", len(answer("a")) + 10)
    taken = Answers()
    assert taken.take(answer("a"))
    assert not taken.take(answer("b"))


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
    declared = {label for family in metrics._ALL for label in getattr(family, "_labels", ())}
    assert declared == {
        "model", "pool", "lane", "code", "kind", "outcome", "reason", "ailment", "direction", "status",
    }  # fmt: skip
    assert {name for name in vars(metrics) if name.isupper() and name in metrics.__all__} == {
        name for name in metrics.__all__ if name.isupper()
    }
