"""The autoscaler's decisions: bounds, order, cooldowns, agreement, and rest under a constant load."""

import itertools
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.discipline.scaling import GroupLoad, decide, expected_wait_s, needed_replicas
from headrace.schemas.instances import Scale
from headrace.schemas.replicas import Autoscale

NOW = 1_800_000_000.0

spans = st.floats(0.5, 600, allow_nan=False)


@st.composite
def all_bounds(draw: st.DrawFn) -> Autoscale:
    low = draw(st.integers(0, 6))
    return Autoscale(
        min_replicas=low,
        max_replicas=draw(st.integers(max(1, low), 40)),
        target_wait_s=draw(spans),
        idle_s=draw(spans),
        up_cooldown_s=draw(spans),
        down_cooldown_s=draw(spans),
    )


@st.composite
def loads(draw: st.DrawFn) -> GroupLoad:
    num_ahead = draw(st.integers(0, 500))
    return GroupLoad(
        wanted=draw(st.integers(0, 50)),
        num_ready=draw(st.integers(0, 50)),
        num_queued=num_ahead + draw(st.integers(0, 50)),
        num_ahead=num_ahead,
        num_running=draw(st.integers(0, 500)),
        seconds_per_job=draw(st.none() | st.floats(0.01, 300)),
        slots=draw(st.none() | st.floats(1, 64)),
        worked_at=draw(st.none() | st.floats(NOW - 1000, NOW + 1)),
    )


@st.composite
def scales(draw: st.DrawFn) -> Scale:
    moments = st.floats(NOW - 1000, NOW + 5)
    up_at, down_at = draw(moments), draw(moments)
    return Scale(
        replicas=draw(st.integers(0, 50)),
        decided_at=max(up_at, down_at),
        up_at=up_at,
        down_at=down_at,
        idle_since=draw(st.none() | moments),
    )


def replicas_after(bounds: Autoscale, scale: Scale, load: GroupLoad, now: float = NOW) -> int:
    decided = decide(bounds, scale, load, now)
    held = min(max(scale.replicas, bounds.min_replicas), bounds.max_replicas)
    return decided.replicas if decided is not None else held


def with_wanted(load: GroupLoad, scale: Scale) -> GroupLoad:
    return msgspec.structs.replace(load, wanted=scale.replicas)


@given(all_bounds(), st.none() | scales(), loads())
def test_a_decision_is_within_the_bounds_and_the_same_for_all_who_see_the_same(
    bounds: Autoscale, scale: Scale | None, load: GroupLoad
) -> None:
    decided = decide(bounds, scale, load, NOW)
    assert decided == decide(bounds, scale, load, NOW)
    if decided is not None:
        assert bounds.min_replicas <= decided.replicas <= bounds.max_replicas
        assert decided != scale


@given(all_bounds(), scales(), loads(), st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_more_to_do_never_means_fewer_replicas(
    bounds: Autoscale, scale: Scale, load: GroupLoad, ahead: int, behind: int, running: int
) -> None:
    load = with_wanted(load, scale)
    more = msgspec.structs.replace(
        load,
        num_queued=load.num_queued + ahead + behind,
        num_ahead=load.num_ahead + ahead,
        num_running=load.num_running + running,
    )
    assert replicas_after(bounds, scale, more) >= replicas_after(bounds, scale, load)


@given(all_bounds(), scales(), loads())
def test_steps_keep_their_cooldowns_and_go_down_one_by_one(bounds: Autoscale, scale: Scale, load: GroupLoad) -> None:
    held = min(max(scale.replicas, bounds.min_replicas), bounds.max_replicas)
    after = replicas_after(bounds, scale, with_wanted(load, scale))
    if after > held > 0:
        assert abs(NOW - scale.up_at) >= bounds.up_cooldown_s - 1e-3
        assert after <= (needed_replicas(bounds, load) or 0)
    if after < held:
        assert after == held - 1
        assert abs(NOW - scale.decided_at) >= bounds.down_cooldown_s - 1e-3
        assert scale.idle_since is not None
        assert abs(NOW - scale.idle_since) >= bounds.idle_s - 1e-3
        assert not load.num_queued
    if after == 0 < held:
        assert not load.num_running
        assert load.worked_at is None or abs(NOW - min(load.worked_at, NOW)) >= bounds.idle_s - 1e-3


@given(all_bounds(), scales(), loads())
def test_what_is_up_or_coming_is_enough_unless_the_bounds_or_a_cooldown_forbid_it(
    bounds: Autoscale, scale: Scale, load: GroupLoad
) -> None:
    after = replicas_after(bounds, scale, with_wanted(load, scale))
    is_cooling = abs(NOW - scale.up_at) < bounds.up_cooldown_s
    if load.slots and after < bounds.max_replicas and not is_cooling and after > 0:
        assert expected_wait_s(bounds, load, after) <= bounds.target_wait_s * (1 + 1e-3)


@given(all_bounds(), loads())
def test_the_number_needed_is_the_least_that_meets_the_target(bounds: Autoscale, load: GroupLoad) -> None:
    needed = needed_replicas(bounds, load)
    if needed is None:
        assert load.slots is None
        return
    slack = 1 + 1e-3
    assert expected_wait_s(bounds, load, needed) <= bounds.target_wait_s * slack
    if needed > 1:
        assert expected_wait_s(bounds, load, needed - 1) >= bounds.target_wait_s / slack


@given(all_bounds(), scales(), loads())
def test_one_that_waits_before_nobody_is_never_left_to_wait(bounds: Autoscale, scale: Scale, load: GroupLoad) -> None:
    queued = msgspec.structs.replace(with_wanted(load, scale), num_queued=load.num_queued + 1)
    assert replicas_after(bounds, scale, queued) >= 1


@pytest.mark.parametrize(
    ("load", "wait_s", "needed"),
    [
        (GroupLoad(wanted=1, num_running=1, seconds_per_job=60, slots=1), 0.0, 1),  # busy, but nobody waits
        (GroupLoad(wanted=1, num_ahead=1, num_running=1, seconds_per_job=60, slots=1), 60.0, 2),
        (GroupLoad(wanted=1, num_ahead=100, num_running=64, seconds_per_job=10, slots=64), 15.625, 2),
        (GroupLoad(wanted=2, num_ahead=20, num_running=1, seconds_per_job=1, slots=1), 9.5, 4),  # one is still coming
        (GroupLoad(wanted=1, num_ahead=9, num_running=4, slots=4), 11.25, 2),  # nothing measured: by depth
        (GroupLoad(wanted=0, num_ahead=9), math.inf, None),
    ],
)
def test_the_wait_is_that_of_jobs_without_a_slot(load: GroupLoad, wait_s: float, needed: int | None) -> None:
    bounds = Autoscale(max_replicas=9, target_wait_s=5)
    assert expected_wait_s(bounds, load, load.wanted) == pytest.approx(wait_s)
    assert needed_replicas(bounds, load) == needed


def test_from_none_the_first_comes_at_once_and_begins_no_cooldown() -> None:
    bounds = Autoscale(min_replicas=0, max_replicas=8, target_wait_s=5, up_cooldown_s=60)
    gone = Scale(replicas=0, up_at=NOW - 1, down_at=NOW, decided_at=NOW)
    low = decide(bounds, gone, GroupLoad(wanted=0, num_queued=1), NOW)
    assert low is not None
    assert (low.replicas, low.up_at) == (1, gone.up_at)
    first = decide(bounds, Scale(replicas=0), GroupLoad(wanted=0, num_queued=1, num_ahead=1), NOW)
    assert first is not None
    flood = GroupLoad(wanted=1, num_queued=100, num_ahead=100, seconds_per_job=5, slots=2)
    second = decide(bounds, first, flood, NOW + 1)
    assert second is not None
    assert second.replicas == 8
    known = decide(bounds, Scale(replicas=0), msgspec.structs.replace(flood, wanted=0), NOW)
    assert known is not None
    assert known.replicas == 8
    assert known.reason == "100 wait and no replica is wanted"


def test_it_goes_down_to_none_step_by_step_and_says_why() -> None:
    bounds = Autoscale(min_replicas=0, max_replicas=3, idle_s=10, down_cooldown_s=4)
    scale = Scale(replicas=3, decided_at=NOW, up_at=NOW)
    steps = []
    for second in range(60):
        load = GroupLoad(wanted=scale.replicas, num_ready=scale.replicas, slots=2, seconds_per_job=1)
        decided = decide(bounds, scale, load, NOW + second)
        if decided is not None:
            if decided.replicas != scale.replicas:
                steps.append((second, decided.replicas, decided.reason))
            scale = decided
    assert steps == [
        (10, 2, "one fewer was enough for 10 s"),
        (14, 1, "one fewer was enough for 14 s"),
        (24, 0, "one fewer was enough for 10 s"),
    ]
    assert (scale.seconds_per_job, scale.slots, scale.idle_since) == (1, 2, None)


def test_work_that_nobody_saw_keeps_the_last_one() -> None:
    bounds = Autoscale(min_replicas=0, idle_s=10, down_cooldown_s=1)
    scale = Scale(replicas=1, idle_since=NOW - 20)
    assert replicas_after(bounds, scale, GroupLoad(wanted=1)) == 0
    kept = decide(bounds, scale, GroupLoad(wanted=1, worked_at=NOW - 3), NOW)
    assert kept is not None
    assert (kept.replicas, kept.idle_since) == (1, NOW - 3)


def test_other_bounds_are_followed_at_once() -> None:
    scale = Scale(replicas=9, decided_at=NOW, up_at=NOW, down_at=NOW)
    decided = decide(Autoscale(max_replicas=4), scale, GroupLoad(wanted=4, num_queued=50, num_ahead=50), NOW)
    assert decided is not None
    assert (decided.replicas, decided.decided_at) == (4, NOW)


@st.composite
def plants(draw: st.DrawFn) -> tuple[Autoscale, float, float, int, float, int, float]:
    """Bounds, jobs a second, seconds of a job, slots, seconds of a start, replicas at first, jobs at first."""
    slots = draw(st.integers(1, 8))
    service_s = draw(st.floats(0.5, 20))
    utilised = draw(st.floats(0.1, 9))  # replicas' worth of work
    bounds = Autoscale(
        min_replicas=1,
        max_replicas=20,
        target_wait_s=draw(st.floats(1, 20)),
        idle_s=service_s * draw(st.floats(2, 5)) + 2,
        up_cooldown_s=draw(st.floats(1, 30)),
        down_cooldown_s=draw(st.floats(1, 30)),
    )
    start_s = draw(st.floats(0, 60))
    rate = utilised * slots / service_s
    return bounds, rate, service_s, slots, start_s, draw(st.integers(1, 20)), draw(st.floats(0, 300))


@settings(max_examples=50, deadline=None)
@given(plants())
def test_under_a_constant_load_it_turns_once_at_most_and_comes_to_rest(
    plant: tuple[Autoscale, float, float, int, float, int, float],
) -> None:
    bounds, rate, service_s, slots, start_s, replicas, num_jobs = plant
    scale = Scale(replicas=replicas)
    coming: list[float] = []  # when those that start are up
    num_ready, now = replicas, 0.0
    running = min(num_jobs, float(num_ready * slots))
    changes: list[tuple[float, int]] = []
    while now < 2500:
        now += 1.0
        num_ready += sum(at <= now for at in coming)
        coming = [at for at in coming if at > now]
        running += (min(num_jobs, num_ready * slots) - running) * min(1.0, 1.0 / service_s)
        num_jobs = max(0.0, num_jobs + rate - running / service_s)
        num_waiting = max(0, math.floor(num_jobs - running))
        load = GroupLoad(
            wanted=scale.replicas,
            num_ready=num_ready,
            num_queued=num_waiting if num_jobs > num_ready * slots else 0,
            num_ahead=num_waiting if num_jobs > num_ready * slots else 0,
            num_running=round(running),
            seconds_per_job=service_s,
            slots=slots,
        )
        decided = decide(bounds, scale, load, NOW + now)
        if decided is None:
            continue
        if decided.replicas > scale.replicas:
            coming += [now + start_s] * (decided.replicas - scale.replicas)
        for _ in range(scale.replicas - decided.replicas):
            if coming:
                coming.pop()
            else:
                num_ready -= 1
        if decided.replicas != scale.replicas:
            changes.append((now, decided.replicas - scale.replicas))
        scale = decided
    signs = [change > 0 for _, change in changes]
    assert sum(one != other for one, other in itertools.pairwise(signs)) <= 1, changes
    assert all(at < 2000 for at, _ in changes), changes
