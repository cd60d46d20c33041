"""Who is taken out: for any pool, and for the pools that people have."""

from itertools import pairwise

from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.discipline.growth import NUM_SAMPLES, MemorySample, growth_of
from headrace.discipline.health import (
    FAILURE_RATE,
    MAX_RESTARTS,
    MIN_ANSWERS,
    PACE_FLOOR_S,
    RESTARTS_WITHIN_S,
    Remedy,
    findings,
    remedy,
    within_bounds,
)
from headrace.schemas.workers import Ailment, Heartbeat, WorkerHealth, WorkerState

FACTOR = 3.0
MIB = 1 << 20

healths = st.builds(
    WorkerHealth,
    finished=st.integers(0, 32),
    failed=st.integers(0, 32),
    seconds_per_token=st.none() | st.floats(0.0001, 10),
    num_paces=st.integers(0, 20),
    ttft_s=st.none() | st.floats(0.001, 100),
    num_firsts=st.integers(0, 20),
    load=st.none() | st.floats(0, 64),
    is_left_out=st.booleans(),
)
states: st.SearchStrategy[WorkerState] = st.sampled_from(["Starting", "Ready", "Busy", "Draining", "Failed"])


@st.composite
def pools(draw: st.DrawFn) -> list[Heartbeat]:
    number = draw(st.integers(1, 12))
    return [
        Heartbeat(
            worker=f"w{index}",
            epoch="e",
            state=draw(states),
            model="m",
            pool=draw(st.sampled_from(["default", "other"])),
            health=draw(st.none() | healths),
        )
        for index in range(number)
    ]


def beat(worker: str, *, state: WorkerState = "Ready", **figures: object) -> Heartbeat:
    health = WorkerHealth(engine_run=3, **figures)  # type: ignore[arg-type]
    return Heartbeat(worker=worker, epoch="e", state=state, model="m", health=health)


def paced(worker: str, seconds: float) -> Heartbeat:
    return beat(worker, seconds_per_token=seconds, num_paces=20)


def answering(worker: str, finished: int, failed: int) -> Heartbeat:
    return beat(worker, finished=finished, failed=failed)


def taken_out(*beats: Heartbeat, slow_factor: float = FACTOR) -> dict[str, str]:
    found = within_bounds(findings(beats, slow_factor=slow_factor), beats)
    return {finding.worker: finding.ailment for finding in found}


@given(pools())
def test_bounds_hold_for_any_pool(beats: list[Heartbeat]) -> None:
    found = findings(beats, slow_factor=FACTOR)
    chosen = within_bounds(found, beats)
    assert set(chosen) <= set(found)
    by_worker = {each.worker: each for each in beats}
    for name in ("default", "other"):
        pool = [each for each in beats if each.pool == name]
        going = [finding for finding in chosen if by_worker[finding.worker].pool == name]
        num_up = sum(each.state in ("Ready", "Busy") for each in pool)
        assert all(by_worker[finding.worker].state in ("Ready", "Busy") for finding in going)
        assert all(each.ailment in ("errs", "slow") for each in going)
        if not going:
            continue
        is_alone = sum(each.health is None or not each.health.is_left_out for each in pool) == 1
        assert is_alone or len(pool) - num_up + len(going) <= max(1, len(pool) // 3)
        if any(each.ailment == "slow" for each in going):
            assert num_up > len(going)  # somebody stays, for there is nothing to be slow against else


@given(pools(), st.randoms())
def test_the_order_of_the_beats_changes_nothing(beats: list[Heartbeat], random: object) -> None:
    other = sorted(beats, key=lambda each: hash((each.worker, id(random))))
    assert findings(beats, slow_factor=FACTOR) == findings(other, slow_factor=FACTOR)
    found = findings(beats, slow_factor=FACTOR)
    assert within_bounds(found, beats) == within_bounds(found, other)


@given(pools())
def test_nobody_is_slow_where_that_is_switched_off(beats: list[Heartbeat]) -> None:
    assert all(finding.ailment == "errs" for finding in findings(beats, slow_factor=0))


@given(st.lists(st.floats(0.0001, 10), min_size=1, max_size=9))
def test_a_pool_as_fast_as_each_other_has_nobody_slow(seconds: list[float]) -> None:
    assume(max(seconds) <= FACTOR * min(seconds))
    assert not taken_out(*(paced(f"w{index}", each) for index, each in enumerate(seconds)))


def test_the_slow_one_of_three_and_of_two() -> None:
    assert taken_out(paced("a", 0.03), paced("b", 0.02), paced("slow", 0.1)) == {"slow": "slow"}
    assert not taken_out(paced("a", 0.02), paced("slow", 0.1))  # five times: of two nobody knows who is odd
    assert taken_out(paced("a", 0.02), paced("slow", 0.13)) == {"slow": "slow"}
    assert not taken_out(paced("alone", 10.0))
    assert not taken_out(paced("a", 0.0001), paced("b", 0.0001), paced("c", 0.9 * PACE_FLOOR_S))


def test_one_that_runs_more_at_once_may_take_as_much_longer() -> None:
    def loaded(worker: str, seconds: float, load: float) -> Heartbeat:
        return beat(worker, seconds_per_token=seconds, num_paces=20, load=load)

    others = (loaded("a", 0.03, 1), loaded("b", 0.03, 1))
    assert not taken_out(*others, loaded("full", 0.12, 4))
    assert not taken_out(*others, loaded("full", 0.04, 1), loaded("c", 0.05, 1))
    assert taken_out(*others, loaded("slow", 0.4, 4)) == {"slow": "slow"}
    assert taken_out(loaded("a", 0.03, 8), loaded("b", 0.03, 8), loaded("slow", 0.1, 8)) == {"slow": "slow"}
    assert not taken_out(loaded("a", 0.03, 8), loaded("b", 0.03, 8), loaded("empty", 0.04, 1))


def test_the_first_token_counts_with_twice_the_factor() -> None:
    def first(worker: str, seconds: float) -> Heartbeat:
        return beat(worker, ttft_s=seconds, num_firsts=8)

    assert taken_out(first("a", 0.4), first("b", 0.5), first("late", 3.5)) == {"late": "slow"}
    assert not taken_out(first("a", 0.4), first("b", 0.5), first("late", 2.5))
    assert not taken_out(first("a", 0.01), first("b", 0.01), first("late", 1.9))


def test_one_that_errs_half_the_time() -> None:
    assert taken_out(answering("errs", 8, 8), answering("a", 16, 0), answering("b", 30, 2)) == {"errs": "errs"}
    assert taken_out(answering("alone", 8, 8)) == {"alone": "errs"}
    assert not taken_out(answering("errs", 3, 4), answering("a", 16, 0))  # too few to say
    assert not taken_out(answering("a", 8, 8), answering("b", 8, 8))  # it is what they are asked
    assert not taken_out(answering("a", 16, 0), beat("down", state="Failed", finished=0, failed=16))


def test_counts_that_cannot_be_say_nothing_of_anybody() -> None:
    forged = answering("forged", 8 - 10**400, 10**400)
    assert taken_out(forged, answering("b", 4, 4), answering("c", 16, 0)) == taken_out(
        answering("forged", 0, 0), answering("b", 4, 4), answering("c", 16, 0)
    )


def test_of_three_that_err_one_goes_and_the_worst_first() -> None:
    beats = [answering("bad", 10, 8), answering("worst", 4, 16), *(answering(f"w{each}", 20, 0) for each in range(3))]
    assert taken_out(*beats) == {"worst": "errs"}
    assert taken_out(*beats, answering("w9", 20, 0)) == {"worst": "errs", "bad": "errs"}


def test_those_left_out_for_good_count_as_out_but_for_the_last() -> None:
    out = beat("out", state="Failed", is_left_out=True)
    assert not taken_out(out, answering("a", 20, 0), answering("errs", 8, 8))
    assert taken_out(out, answering("errs", 8, 8)) == {"errs": "errs"}


@given(st.integers(0, 32), st.integers(0, 32))
def test_the_failure_rate_alone_decides_where_there_is_nobody_else(finished: int, failed: int) -> None:
    number = finished + failed
    assert bool(taken_out(answering("w", finished, failed))) == (
        number >= MIN_ANSWERS and failed / number >= FAILURE_RATE
    )


ailments: st.SearchStrategy[Ailment] = st.sampled_from(["errs", "slow", "memory", "probe"])


@given(ailments, st.lists(st.floats(0, 10_000), max_size=6), st.booleans())
def test_what_becomes_of_a_sick_one(ailment: Ailment, restarted_at: list[float], has_peers: bool) -> None:
    now = 10_000.0
    num_lately = sum(now - at < RESTARTS_WITHIN_S for at in restarted_at)
    what = remedy(ailment, restarted_at, now=now, has_peers=has_peers)
    if num_lately < MAX_RESTARTS:
        assert what is Remedy.RESTART
    else:
        assert (what is Remedy.LEAVE_OUT) == has_peers
        if not has_peers:
            assert (what is Remedy.RESTART) == (ailment in ("probe", "memory"))


def samples(*sizes_mib: float, served: int = 0, is_idle: bool = True, free: float | None = 0.5) -> list[MemorySample]:
    return [
        MemorySample(
            at_s=30.0 * index,
            used_bytes=int(size * MIB),
            num_served=served * index,
            is_idle=is_idle,
            free_ratio=free,
        )
        for index, size in enumerate(sizes_mib)
    ]


GROWING = tuple(1000.0 + 50 * step for step in range(NUM_SAMPLES))


def test_memory_that_only_grows_while_idle_is_a_leak() -> None:
    assert growth_of(samples(*GROWING)) == "0.98 → 1.32 GiB in 4 min while idle"
    assert not growth_of(samples(*GROWING[:-1]))
    assert not growth_of(samples(*GROWING[:-1], GROWING[-2]))  # it stands still
    assert not growth_of(samples(*(10_000 + 50 * step for step in range(NUM_SAMPLES))))  # less than a tenth
    assert not growth_of(samples(*(100 + 5 * step for step in range(NUM_SAMPLES))))  # less than 64 MiB


def test_growth_under_load_counts_once_memory_is_scarce() -> None:
    assert not growth_of(samples(*GROWING, served=3))
    steady = samples(*(10_000 + 50 * step for step in range(30)))
    assert growth_of(steady) == "9.77 → 11.18 GiB in 14 min while idle"  # slow, and without a pause
    assert not growth_of(samples(*GROWING, is_idle=False))
    assert not growth_of(samples(*GROWING, is_idle=False, free=None))
    assert growth_of(samples(*GROWING, served=3, free=0.05)) == "0.98 → 1.32 GiB in 4 min, and 5 % is free"


@given(st.lists(st.floats(1, 100_000), min_size=NUM_SAMPLES, max_size=30), st.booleans())
def test_memory_that_was_given_back_once_does_not_only_grow(sizes: list[float], is_idle: bool) -> None:
    last = sizes[-NUM_SAMPLES:]
    if any(after <= before for before, after in pairwise(last)):
        assert not growth_of(samples(*sizes, is_idle=is_idle, free=0.0))
