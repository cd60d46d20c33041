"""The figures of the measurements, and what is printed of them."""

import asyncio
import contextlib
import io
import os
from collections.abc import AsyncIterator

import pytest

from headrace.bench.dispatch import DispatchPhase, DispatchResult, shown_dispatch
from headrace.bench.failover import FailoverKind, FailoverResult, shown_failover
from headrace.bench.figures import Distribution, distribution, in_ms, middle
from headrace.bench.ground import Machine, machine
from headrace.bench.relay import RelayResult, RelayRun, shown_relay
from headrace.bench.tables import distributions, figure
from headrace.bench.usage import Usage, cpu_seconds, usage
from headrace.cli.render import console
from headrace.cli.takeover import Watched
from headrace.client import Accepted, Delta, Done, Requeued, Started, StreamEvent
from headrace.errors import HeadraceError

WHERE = Machine(cpus=2, load=0.5, system="Linux x86_64", python="3.11.7")


def printed(*parts: object) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for part in parts:
            console().print(part)
    return out.getvalue()


# figures


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([7.0], (7, 7, 7, 7, 7)),
        ([2.0, 1.0], (1, 1, 2, 2, 2)),
        (list(range(1, 21)), (1, 10, 18, 20, 20)),
        (list(range(100, 0, -1)), (1, 50, 90, 99, 100)),
        (list(range(1, 201)), (1, 100, 180, 198, 200)),
    ],
    ids=["one", "two", "twenty", "hundred", "two hundred"],
)
def test_each_figure_is_a_sample_by_nearest_rank(samples: list[float], expected: tuple[float, ...]) -> None:
    found = distribution(samples)
    assert found is not None
    assert (found.min, found.p50, found.p90, found.p99, found.max) == expected
    assert found.n == len(samples)
    assert middle(samples) == found.p50


def test_nothing_has_no_distribution() -> None:
    assert distribution([]) is None


def test_milliseconds_to_the_microsecond() -> None:
    assert in_ms([0.0123456, 2]) == [12.346, 2000]


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0"), (0.4123, "0.412"), (9.996, "10"), (12.34, "12.3"), (123.4, "123"), (12345, "12,345")]
)
def test_figures_for_people(value: float, shown: str) -> None:
    assert figure(value) == shown


def test_a_machine_says_what_it_is() -> None:
    here = machine()
    assert here.cpus >= 1
    assert "Python 3." in str(here)


# CPU time


def test_cpu_time_is_what_was_spent_between_two_readings() -> None:
    before = usage({"me": os.getpid(), "nobody": None, "gone": 1 << 30})
    if before.cpu_s["me"] is None:
        pytest.skip("no /proc")
    while (cpu_seconds(os.getpid()) or 0) < before.cpu_s["me"] + 0.02:
        sum(range(10_000))
    after = usage({"me": os.getpid(), "nobody": None, "gone": 1 << 30})
    spent = after.since(before)
    assert spent["me"] is not None
    assert 0.0199 < spent["me"] < 5  # two ticks, as a difference of floats
    assert (spent["nobody"], spent["gone"]) == (None, None)
    assert Usage(at=0, cpu_s={"new": 1.0}).since(before) == {"new": None}


# streams that are watched


def delta(offset: int, text: str, num_tokens: int = 1) -> Delta:
    return Delta(job="j", text=text, offset=offset, num_tokens=num_tokens, chunk={})


def done(text: str) -> Done:
    return Done(job="j", response={}, text=text, finish_reason="stop", usage=None)


async def the(*events: StreamEvent) -> AsyncIterator[StreamEvent]:
    for event in events:
        yield event


def watch(*events: StreamEvent, threshold: int = 2) -> Watched:
    seconds = iter(range(100))
    watched = Watched(threshold=threshold, clock=lambda: next(seconds))
    asyncio.run(watched.read(the(*events)))
    return watched


def test_a_takeover_is_timed_from_the_last_token_before_to_the_first_after() -> None:
    watched = watch(
        Accepted(job="j", sequence=1, position=0, eta_s=0),
        Started(job="j", worker="a", attempt=1),  # 0 s
        delta(0, "x"),  # 1 s
        delta(1, "y", 2),  # 2 s
        Requeued(job="j", attempt=2, reason="worker_lost"),
        Started(job="j", worker="b", attempt=2),  # 3 s
        delta(3, "", 0),
        delta(3, "z"),  # 4 s
        done("xyz"),
    )
    assert [(each.worker, each.at, each.num_tokens, each.gap_s) for each in watched.starts] == [
        ("a", 0, 0, None),
        ("b", 3, 3, 2),
    ]
    assert (watched.num_tokens, watched.text, watched.reached.is_set()) == (4, "xyz", True)


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ((delta(0, "a"), delta(2, "c")), "token 2 came after 1 tokens"),
        ((delta(0, "a"), delta(0, "a")), "token 0 came after 1 tokens"),
        ((delta(0, "a"), done("b")), "not what was streamed"),
    ],
    ids=["hole", "twice", "other text"],
)
def test_a_damaged_stream_is_no_measurement(events: tuple[StreamEvent, ...], said: str) -> None:
    with pytest.raises(HeadraceError, match=said):
        watch(*events)


def test_a_stream_that_ends_early_keeps_nobody_waiting() -> None:
    assert watch(delta(0, "a"), done("a"), threshold=9).reached.is_set()


# what is printed

SOME = Distribution(n=20, min=1.0, p50=2.0, p90=3.0, p99=4.0, max=4.0)


def test_a_table_sets_medians_beside_a_figure() -> None:
    text = printed(distributions("T", (("a", SOME), ("nothing", None)), beside=0.5))
    assert "4.0" in next(line for line in text.splitlines() if line.startswith("a "))
    assert next(line for line in text.splitlines() if line.startswith("nothing")).split() == ["nothing", "0"]


def test_failover_says_how_many_streams_moved_and_what_a_gap_includes() -> None:
    kind = FailoverKind(
        kind="kill", num_kills=20, num_streams=40, num_moved=21, to_claimed=SOME, to_started=SOME,
        token_gap=None, to_claimed_ms=[1.0], to_started_ms=[1.0], token_gap_ms=[],
    )  # fmt: skip
    text = printed(*shown_failover(FailoverResult(machine=WHERE, tokens_per_second=50, num_survivors=0, kinds=[kind])))
    assert "SIGKILL, with notices: to `started` in the log" in text
    assert "SIGKILL, with notices: to `started` at the client" in text
    assert "21 of 40 streams were on a lost worker; all 40 ended" in text
    assert "includes the 20 ms" in text
    assert "2 CPUs, load 0.5" in text


def test_dispatch_is_shown_beside_a_round_trip() -> None:
    phase = DispatchPhase(
        num_early_fetches=1, round_trip=SOME, publish_fetch=SOME, accepted=SOME, delivered=SOME, at_worker=SOME,
        started=SOME, first_token=None,
    )  # fmt: skip
    text = printed(*shown_dispatch(DispatchResult(machine=WHERE, rate=100, reached=99.5, idle=phase, loaded=phase)))
    assert "At 100 jobs/s (99.5 reached), ms" in text
    assert text.count("core NATS round trip") == 2
    assert "its worker has claimed it" in text


def test_relay_shows_medians_and_ranges_of_each_kind() -> None:
    def run(num_streams: int, pace: int, per_second: float, worker_us: float | None) -> RelayRun:
        return RelayRun(
            num_streams=num_streams, pace=pace, num_tokens=100, seconds=1.0, per_second=per_second, per_event=2.5,
            cpu_us={"worker": worker_us},
        )  # fmt: skip

    runs = [run(0, 0, 5000, None), run(1, 0, 100, 1.0), run(1, 0, 300, 3.0), run(1, 0, 200, 2.0), run(8, 50, 390, 9.0)]
    text = printed(*shown_relay(RelayResult(machine=WHERE, runs=runs)))
    lines = {line.partition("  ")[0]: line.split() for line in text.splitlines()}
    assert lines["1 stream, flat out"][4:9] == ["200", "100", "–", "300", "2.5"]
    assert "8 streams, 50 tokens/s each" in lines
    assert "Medians of 3 run(s)" in text
