"""What is set aside for a warmer worker: for a bounded time, a bounded number of times, and only where there is one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.discipline.affinity import MAX_BLOCKS, landmarks, num_matching
from headrace.discipline.aside import MAX_ASIDE, MAX_ASIDE_DELIVERIES, aside_s
from headrace.discipline.placement import WorkerView
from headrace.discipline.room import Room

HASHES = tuple(f"hash-{number}" for number in range(MAX_BLOCKS))
MOST_AT_ONCE_S = 0.048
MOST_IN_ALL_S = 0.27
SLACK = 1e-9

prefixes = st.frozensets(st.sampled_from([*HASHES, "other"]))
views = st.builds(
    WorkerView,
    worker=st.sampled_from("abcdefgh"),
    room=st.builds(
        Room,
        capacity_tokens=st.sampled_from([None, 50, 1000]),
        reserved_tokens=st.integers(0, 1000),
        max_concurrency=st.just(8),
        num_running=st.integers(0, 8),
    ),
    state=st.sampled_from(["Ready", "Busy", "Busy", "Draining", "Starting", "Failed"]),
    prefixes=prefixes,
)
pools = st.lists(views, max_size=8, unique_by=lambda each: each.worker)


def busy(name: str, num_blocks: int) -> WorkerView:
    return WorkerView(
        worker=name,
        room=Room(capacity_tokens=1000, reserved_tokens=1000),
        state="Busy",
        prefixes=frozenset(HASHES[:num_blocks]),
    )


def asked(
    others: list[WorkerView], *, here: int = 0, need_tokens: int = 100, num_delivered: int = 1, num_aside: int = 0
) -> float:
    return aside_s(
        HASHES,
        frozenset(HASHES[:here]),
        others,
        need_tokens,
        num_delivered=num_delivered,
        num_aside=num_aside,
    )


@given(pools, prefixes, st.integers(1, 2000), st.integers(1, 20), st.integers(0, 10))
def test_only_what_is_warmer_at_a_worker_that_can_run_it_is_set_aside(
    others: list[WorkerView], here: frozenset[str], need: int, num_delivered: int, num_aside: int
) -> None:
    patience_s = aside_s(HASHES, here, others, need, num_delivered=num_delivered, num_aside=num_aside)
    assert 0 <= patience_s <= MOST_AT_ONCE_S + SLACK
    able = [each for each in others if each.state in ("Ready", "Busy") and each.could_ever_run(need)]
    is_warmer = any(num_matching(HASHES, each.prefixes) > num_matching(HASHES, here) for each in able)
    may_be = num_aside < MAX_ASIDE and num_delivered < MAX_ASIDE_DELIVERIES and num_delivered <= 2 * len(able)
    assert (patience_s > 0) == (is_warmer and may_be)


@given(pools, st.integers(1, 2000))
def test_over_all_deliveries_it_is_set_aside_for_less_than_a_request_may_wait_beside_room(
    others: list[WorkerView], need: int
) -> None:
    """However often it comes, and by whatever is known each time."""
    times_s = [asked(others, need_tokens=need, num_delivered=number) for number in range(1, 100)]
    assert sum(times_s) <= MOST_IN_ALL_S
    assert sum(each > 0 for each in times_s) < MAX_ASIDE_DELIVERIES
    assert times_s == sorted(times_s, reverse=True)


@given(pools, prefixes, st.integers(1, 2000), st.integers(1, 20))
def test_the_order_of_the_workers_does_not_matter(
    others: list[WorkerView], here: frozenset[str], need: int, num_delivered: int
) -> None:
    one, other = (
        aside_s(HASHES, here, workers, need, num_delivered=num_delivered, num_aside=0)
        for workers in (others, others[::-1])
    )
    assert one == other


def test_the_more_there_is_to_win_the_longer_it_is_set_aside() -> None:
    warm = [busy("a", 16)]
    assert asked(warm, here=16) == 0
    assert 0 < asked(warm, here=15) < asked(warm, here=8) < asked(warm, here=0) == pytest.approx(MOST_AT_ONCE_S)
    assert asked([busy("a", 4)]) < asked(warm)


def test_without_a_prefix_or_another_worker_nothing_waits() -> None:
    assert asked([]) == 0
    assert asked([busy("a", 0)]) == 0
    assert aside_s((), frozenset(), [busy("a", 16)], 1, num_delivered=1, num_aside=0) == 0


def test_a_worker_that_remembers_landmarks_counts_as_far_as_those_go() -> None:
    served = frozenset(landmarks(HASHES[:15]))
    other = WorkerView(worker="a", room=Room(capacity_tokens=1000), state="Busy", prefixes=served)
    assert asked([other]) == asked([busy("a", 8)])
