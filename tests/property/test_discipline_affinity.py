"""Prefix affinity: chains of hashes, and a hint that prefers the warm without making a hot spot."""

import re

from hypothesis import given
from hypothesis import strategies as st

from headrace.discipline.affinity import (
    BLOCK_CHARS,
    MAX_BLOCKS,
    MAX_LOAD_GAP,
    RecentPrefixes,
    num_matching,
    preferred,
    prefix_hashes,
)
from headrace.discipline.placement import WorkerView
from headrace.discipline.room import Room

HASHES = tuple(f"hash-{number}" for number in range(6))

texts = st.lists(
    st.builds(lambda letter, size: letter * size, st.sampled_from("ab\x00"), st.integers(0, 1500)), max_size=5
)
views = st.builds(
    WorkerView,
    worker=st.sampled_from("abcdefgh"),
    room=st.builds(
        Room,
        capacity_tokens=st.just(1000),
        reserved_tokens=st.integers(0, 1000),
        max_concurrency=st.just(8),
        num_running=st.integers(0, 8),
    ),
    num_waiting=st.integers(0, 1),
    state=st.sampled_from(["Ready", "Ready", "Busy", "Draining"]),
    prefixes=st.frozensets(st.sampled_from(HASHES)),
)
pools = st.lists(views, max_size=8, unique_by=lambda each: each.worker)


def worker(name: str, *prefixes: str, num_running: int = 0, reserved: int = 0) -> WorkerView:
    room = Room(capacity_tokens=1000, reserved_tokens=reserved, max_concurrency=8, num_running=num_running)
    return WorkerView(worker=name, room=room, prefixes=frozenset(prefixes))


@given(texts, texts, texts)
def test_equal_beginnings_have_equal_leading_hashes(start: list[str], one: list[str], other: list[str]) -> None:
    shared = prefix_hashes(start)
    assert prefix_hashes([*start, *one])[: len(shared)] == shared
    assert prefix_hashes([*start, *other])[: len(shared)] == shared


@given(texts, texts)
def test_hashes_are_a_chain(one: list[str], other: list[str]) -> None:
    """Equal up to the first block that differs, and never again after it."""
    equal = [mine == theirs for mine, theirs in zip(prefix_hashes(one), prefix_hashes(other), strict=False)]
    assert equal == sorted(equal, reverse=True)


@given(texts)
def test_hashes_are_short_and_few(parts: list[str]) -> None:
    hashes = prefix_hashes(parts)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{11}", each) for each in hashes)
    assert len(set(hashes)) == len(hashes) <= MAX_BLOCKS
    assert sum(map(len, parts)) // BLOCK_CHARS <= len(hashes) or len(hashes) == MAX_BLOCKS


def test_order_roles_and_bounds_of_the_parts_count() -> None:
    long, longer = "x" * 2000, "y" * 2000
    different = [
        ["system", long, "user", longer],
        ["user", long, "system", longer],
        ["system", longer, "user", long],
        ["systemx", long[1:], "user", longer],
        ["system", "", long, "user", longer],
        ["system\x00\x00", long, "user", longer],
    ]
    assert len({prefix_hashes(parts)[0] for parts in different}) == len(different)
    assert prefix_hashes([]) == prefix_hashes(["user", "short"]) == ()
    assert len(prefix_hashes(["\ud800" * 3000])) == 2


def test_only_the_beginning_is_read() -> None:
    endless = ["a" * 10_000_000, "b"]
    assert prefix_hashes(endless) == prefix_hashes(["a" * 16_384, "c"])
    assert len(prefix_hashes(endless)) == MAX_BLOCKS


@given(pools, st.integers(1, 1000))
def test_the_longest_match_with_room_and_little_load_wins(workers: list[WorkerView], need: int) -> None:
    chosen = preferred(HASHES, workers, need)
    least = min((each.load_ratio for each in workers if each.state == "Ready"), default=0.0)
    allowed = {
        each.worker: num_matching(HASHES, each.prefixes)
        for each in workers
        if each.would_start(need) and each.load_ratio <= least + MAX_LOAD_GAP and num_matching(HASHES, each.prefixes)
    }
    assert (chosen is None) == (not allowed)
    if chosen is not None:
        assert allowed[chosen] == max(allowed.values())
        (view,) = [each for each in workers if each.worker == chosen]
        assert view.room.fits(need)
        assert view.load_ratio <= least + MAX_LOAD_GAP


@given(pools, st.integers(1, 1000))
def test_the_order_of_the_workers_does_not_matter(workers: list[WorkerView], need: int) -> None:
    assert preferred(HASHES, workers, need) == preferred(HASHES, workers[::-1], need)


def test_no_match_no_preference() -> None:
    assert preferred(HASHES, [worker("a"), worker("b", "other")], 1) is None
    assert preferred((), [worker("a", *HASHES)], 1) is None
    assert preferred(HASHES, [], 1) is None


def test_a_hot_prefix_spreads_before_its_worker_is_far_above_the_others() -> None:
    """All ask for one prefix that one of two workers has: it is named until it is half a worker above the other."""
    num_running = 0
    while preferred(HASHES, [worker("cold"), worker("warm", *HASHES, num_running=num_running)], 1) == "warm":
        num_running += 1
    assert num_running == 8 * MAX_LOAD_GAP + 1
    warm, warmer = worker("a", *HASHES[:2]), worker("b", *HASHES[:3], num_running=3)
    assert preferred(HASHES, [warm, warmer], 1) == "b"
    assert preferred(HASHES, [worker("a", HASHES[2], num_running=2), worker("b", HASHES[2])], 1) == "b"
    assert preferred(HASHES, [worker("a", *HASHES, reserved=800), worker("b")], 100) is None


@given(st.lists(st.lists(st.sampled_from([f"h{number}" for number in range(40)]), max_size=16), max_size=20))
def test_recent_prefixes_are_bounded_and_keep_the_last(served: list[list[str]]) -> None:
    recent = RecentPrefixes(size=20)
    for hashes in served:
        recent.note(hashes)
        assert len(recent) <= 20
        assert set(hashes) <= set(recent)
        assert list(recent)[-1:] == hashes[:1] or not hashes


def test_later_blocks_are_forgotten_before_the_earlier_ones() -> None:
    recent = RecentPrefixes(size=3)
    recent.note(["a1", "a2", "a3"])
    recent.note(["b1"])
    assert list(recent) == ["a2", "a1", "b1"]
