"""Memory and backfill: never over capacity, nothing that fits waits, and what does not fit is not starved."""

import heapq
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.discipline.room import UNLIMITED_TOKENS, Room, Waiter, fetchable_tokens, num_fetchable, startable

AGEING_S = 10.0
MAX_WAITERS = 4

rooms = st.builds(
    Room,
    capacity_tokens=st.none() | st.integers(0, 1000),
    reserved_tokens=st.integers(0, 1000),
    max_concurrency=st.integers(1, 6),
    num_running=st.integers(0, 6),
    is_above_high_water=st.booleans(),
)
waiters_of = st.lists(
    st.builds(
        Waiter,
        need_tokens=st.integers(1, 1200),
        waited_s=st.sampled_from([0.0, 9.9, 10.0, 30.0]),
        is_interrupted=st.booleans(),
    ),
    max_size=8,
)


def after(room: Room, waiters: Sequence[Waiter], started: Sequence[int]) -> Room:
    for index in started:
        room = room.with_one_more(waiters[index].need_tokens)
    return room


def blocks(room: Room, waiter: Waiter) -> bool:
    """Whether room is kept for it, if it did not start."""
    return room.could_ever_fit(waiter.need_tokens) and (waiter.is_interrupted or waiter.waited_s >= AGEING_S)


@given(rooms, waiters_of)
def test_what_starts_fits_together(room: Room, waiters: list[Waiter]) -> None:
    started = startable(room, waiters, ageing_s=AGEING_S)
    assert len(set(started)) == len(started)
    if started:
        left = after(room, waiters, started)
        assert not room.is_above_high_water
        assert left.num_running <= left.max_concurrency
        assert left.capacity_tokens is None or left.reserved_tokens <= left.capacity_tokens


@given(rooms, waiters_of)
def test_nothing_that_fits_is_left_unless_room_is_kept(room: Room, waiters: list[Waiter]) -> None:
    """Whoever is left and would fit stands behind one that room is kept for."""
    started = startable(room, waiters, ageing_s=AGEING_S)
    left = after(room, waiters, started)
    in_order = sorted(range(len(waiters)), key=lambda index: (not waiters[index].is_interrupted, index))
    waiting = [index for index in in_order if index not in started]
    kept = next((place for place, index in enumerate(waiting) if blocks(room, waiters[index])), None)
    before = waiting if kept is None else waiting[: kept + 1]
    assert not any(left.fits(waiters[index].need_tokens) for index in before)
    if kept is not None:  # nothing behind it started
        assert all(in_order.index(index) < in_order.index(waiting[kept]) for index in started)


@given(rooms, waiters_of)
def test_interrupted_ones_start_first_and_the_rest_as_they_came(room: Room, waiters: list[Waiter]) -> None:
    started = startable(room, waiters, ageing_s=AGEING_S)
    assert started == sorted(started, key=lambda index: (not waiters[index].is_interrupted, index))
    if any(waiter.is_interrupted and room.could_ever_fit(waiter.need_tokens) for waiter in waiters):
        left = {index for index, waiter in enumerate(waiters) if waiter.is_interrupted} - set(started)
        if any(room.could_ever_fit(waiters[index].need_tokens) for index in left):
            assert all(waiters[index].is_interrupted for index in started)


@given(rooms, waiters_of, st.integers(1, 1200))
def test_what_was_fetched_as_told_starts_at_once(room: Room, waiters: list[Waiter], need: int) -> None:
    """A fetched request of at most the tokens told starts beside all that were to start already; else none would."""
    tokens = fetchable_tokens(room, waiters, ageing_s=AGEING_S, max_waiters=MAX_WAITERS)
    started = startable(room, waiters, ageing_s=AGEING_S)
    fetched = [*waiters, Waiter(need_tokens=need)]
    assert (len(waiters) in startable(room, fetched, ageing_s=AGEING_S)) <= (need <= tokens or tokens == 0)
    if 0 < need <= tokens:
        assert startable(room, fetched, ageing_s=AGEING_S) == [*started, len(waiters)]
    if tokens:
        assert len(waiters) - len(started) < MAX_WAITERS


def test_an_unknown_capacity_counts_slots_alone() -> None:
    room = Room(capacity_tokens=None, max_concurrency=2, num_running=1)
    assert fetchable_tokens(room, [], ageing_s=AGEING_S, max_waiters=1) == UNLIMITED_TOKENS
    waiters = [Waiter(need_tokens=10**9), Waiter(need_tokens=1)]
    assert startable(room, waiters, ageing_s=AGEING_S) == [0]
    assert fetchable_tokens(room, waiters, ageing_s=AGEING_S, max_waiters=9) == 0


def test_what_never_fits_here_keeps_no_room() -> None:
    room = Room(capacity_tokens=1000, reserved_tokens=800, max_concurrency=9, num_running=1)
    waiters = [Waiter(need_tokens=1001, waited_s=99.0, is_interrupted=True), Waiter(need_tokens=200)]
    assert startable(room, waiters, ageing_s=AGEING_S) == [1]


def test_a_hundred_starts_beside_nine_hundred_until_that_is_aged() -> None:
    """Case MEM-5: 200 KV tokens free and queued [900, 100]."""
    room = Room(capacity_tokens=1000, reserved_tokens=800, max_concurrency=8, num_running=2)
    assert fetchable_tokens(room, [], ageing_s=AGEING_S, max_waiters=MAX_WAITERS) == 200
    large = Waiter(need_tokens=900)
    assert startable(room, [large], ageing_s=AGEING_S) == []
    assert fetchable_tokens(room, [large], ageing_s=AGEING_S, max_waiters=MAX_WAITERS) == 200
    small = Waiter(need_tokens=100)
    assert startable(room, [large, small], ageing_s=AGEING_S) == [1]
    aged = msgspec.structs.replace(large, waited_s=AGEING_S)
    assert startable(room, [aged, small], ageing_s=AGEING_S) == []
    assert fetchable_tokens(room, [aged], ageing_s=AGEING_S, max_waiters=MAX_WAITERS) == 0
    empty = Room(capacity_tokens=1000, max_concurrency=8)
    assert startable(empty, [aged, small], ageing_s=AGEING_S) == [0, 1]


@pytest.mark.parametrize(
    ("room", "num_start"),
    [
        (Room(capacity_tokens=1000, max_concurrency=9), 2),
        (Room(capacity_tokens=1000, max_concurrency=1), 1),
        (Room(capacity_tokens=1000, max_concurrency=9, is_above_high_water=True), 0),
        (Room(capacity_tokens=None, max_concurrency=9, is_above_high_water=True), 0),
    ],
)
def test_three_of_four_hundred_in_a_thousand(room: Room, num_start: int) -> None:
    """Case MEM-4: exactly two run; above the high-water mark none starts, whatever is free."""
    waiters = [Waiter(need_tokens=400)] * 3
    assert len(startable(room, waiters, ageing_s=AGEING_S)) == num_start


class Running(msgspec.Struct, order=True):
    """Until when a request runs, and what it holds."""

    ends_s: float
    need_tokens: int


class Held(msgspec.Struct):
    """A fetched request: when it came, and how long it will run."""

    need_tokens: int
    run_s: float
    fetched_s: float


class Machine:
    """One worker and a queue with the functions above, in virtual time. Keeps how long each fetched one waited.

    The oldest one held starts at most the longest run after it is both the oldest and aged: by then all that ran has
    ended, and nothing began that could be in its way.
    """

    def __init__(self, capacity: int, max_concurrency: int, queue: list[tuple[int, float]]) -> None:
        self.capacity, self.max_concurrency = capacity, max_concurrency
        self.queue = queue
        self.now_s = 0.0
        self.running: list[Running] = []
        self.held: list[Held] = []
        self.waits: list[tuple[int, float]] = []
        self.longest_s = max(run_s for _, run_s in queue)
        self.oldest: Held | None = None
        self.due_s = 0.0

    @property
    def room(self) -> Room:
        reserved = sum(each.need_tokens for each in self.running)
        assert reserved <= self.capacity
        assert len(self.running) <= self.max_concurrency
        return Room(
            capacity_tokens=self.capacity,
            reserved_tokens=reserved,
            max_concurrency=self.max_concurrency,
            num_running=len(self.running),
        )

    def run(self) -> None:
        while self.queue or self.held or self.running:
            self.fetch_and_start()
            ends = [each.ends_s for each in self.running]
            ages = [each.fetched_s + AGEING_S for each in self.held if each.fetched_s + AGEING_S > self.now_s]
            assert ends, "requests wait and nothing runs"
            self.now_s = min(ends + ages)
            while self.running and self.running[0].ends_s <= self.now_s:
                heapq.heappop(self.running)

    def fetch_and_start(self) -> None:
        self.start()
        while self.queue and fetchable_tokens(self.room, self.waiters, ageing_s=AGEING_S, max_waiters=MAX_WAITERS):
            need, run_s = self.queue.pop(0)
            self.held.append(Held(need, run_s, self.now_s))
            assert len(self.held) <= MAX_WAITERS
            self.start()

    @property
    def waiters(self) -> list[Waiter]:
        return [Waiter(need_tokens=each.need_tokens, waited_s=self.now_s - each.fetched_s) for each in self.held]

    def start(self) -> None:
        started = startable(self.room, self.waiters, ageing_s=AGEING_S)
        for index in started:
            held = self.held[index]
            heapq.heappush(self.running, Running(self.now_s + held.run_s, held.need_tokens))
            self.waits.append((held.need_tokens, self.now_s - held.fetched_s))
            assert held is not self.oldest or self.now_s <= self.due_s + 1e-6
        self.held = [held for index, held in enumerate(self.held) if index not in started]
        if self.held and self.held[0] is not self.oldest:
            self.oldest = self.held[0]
            self.due_s = max(self.now_s, self.oldest.fetched_s + AGEING_S) + self.longest_s


jobs = st.lists(st.tuples(st.integers(1, 1000), st.floats(0.1, 20.0)), min_size=1, max_size=40)


@given(st.integers(1000, 1500), st.integers(1, 8), jobs)
def test_any_workload_runs_within_its_memory_and_nothing_starves(
    capacity: int, max_concurrency: int, queue: list[tuple[int, float]]
) -> None:
    """All run, never beyond capacity or slots; the oldest held starts in time."""
    machine = Machine(capacity, max_concurrency, list(queue))
    machine.run()
    assert sorted(need for need, _ in machine.waits) == sorted(need for need, _ in queue)


@given(st.floats(1.0, 60.0), st.lists(st.floats(0.1, 8.0), min_size=60, max_size=60))
def test_nine_hundred_starts_within_its_limit_of_room_becoming_possible(busy_s: float, runs: list[float]) -> None:
    """Case MEM-5 to its end: 800 of 1,000 run for `busy_s`, then a 900 and an endless flow of 100s.

    Room is possible from `busy_s` on. Small ones that began before the limit end at most one of their runs after it.
    """
    machine = Machine(1000, 8, [(800, busy_s), (900, 1.0), *((100, run_s) for run_s in runs)])
    machine.run()
    (waited_s,) = [waited_s for need, waited_s in machine.waits if need == 900]
    hundreds = [waited_s for need, waited_s in machine.waits if need == 100]
    assert hundreds[:2] == [0.0, 0.0]
    assert waited_s <= max(busy_s, AGEING_S + max(runs)) + 1e-6
    if max(runs) <= AGEING_S:
        assert waited_s <= busy_s + 2 * AGEING_S


def test_what_starts_now_is_not_counted_as_held() -> None:
    room = Room(capacity_tokens=1000, max_concurrency=8)
    waiters = [Waiter(need_tokens=100)] * 2
    assert fetchable_tokens(room, waiters, ageing_s=AGEING_S, max_waiters=2) == 800
    held = [Waiter(need_tokens=900)] * 2
    full = Room(capacity_tokens=1000, reserved_tokens=500, max_concurrency=8, num_running=1)
    assert fetchable_tokens(full, held, ageing_s=AGEING_S, max_waiters=2) == 0
    assert fetchable_tokens(full, held, ageing_s=AGEING_S, max_waiters=3) == 500


@given(rooms, waiters_of, st.integers(0, 400), st.integers(1, 16))
@example(Room(capacity_tokens=104, max_concurrency=2), [Waiter(need_tokens=53)], 52, 2)
def test_what_is_fetched_together_starts_together(
    room: Room, waiters: list[Waiter], need_tokens: int, limit: int
) -> None:
    """One may be fetched blind; more only where all of them fit beside each other and what starts before them."""
    number = num_fetchable(
        room, waiters, need_tokens=need_tokens, limit=limit, ageing_s=AGEING_S, max_waiters=MAX_WAITERS
    )
    assert 0 <= number <= limit
    one = fetchable_tokens(room, waiters, ageing_s=AGEING_S, max_waiters=MAX_WAITERS)
    assert (number > 0) == (one > 0)
    left = after(room, waiters, startable(room, waiters, ageing_s=AGEING_S))
    for _ in range(number if number > 1 else 0):
        assert left.fits(need_tokens)
        left = left.with_one_more(need_tokens)
