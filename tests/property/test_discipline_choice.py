"""Which queue is next: lanes are strict, aged ones get a share and no more, queues of a lane share by weight."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.discipline.choice import STRICT_WEIGHT, QueueView, charge, order
from headrace.discipline.shares import Shares
from headrace.schemas.subjects import LANES, Lane, QueueName

AGEING_S = 10.0
NEVER_S = 1e9

names = st.builds(QueueName, lane=st.sampled_from(LANES), queue=st.sampled_from(["a", "b", "c"]))
views = st.lists(
    st.builds(
        QueueView,
        name=names,
        num_waiting=st.integers(0, 3),
        oldest_wait_s=st.none() | st.floats(0, 20),
        weight=st.sampled_from([0.5, 1.0, 3.0]),
        num_interrupted=st.integers(0, 1),
    ),
    unique_by=lambda view: view.name,
)


def view(lane: Lane, queue: str = "default", *, waited_s: float | None = None, weight: float = 1.0) -> QueueView:
    return QueueView(
        name=QueueName(lane=lane, queue=queue), num_waiting=9, oldest_wait_s=waited_s, weight=weight, num_interrupted=0
    )


def serve(shares: Shares, snapshot: list[QueueView], tokens: int, *, ageing_s: float = AGEING_S) -> QueueName:
    """Take from the first and pay."""
    turn = order(snapshot, shares, ageing_s=ageing_s)[0]
    charge(snapshot, shares, turn, tokens, ageing_s=ageing_s)
    return turn


@given(views, st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4000)), max_size=10))
def test_order_has_each_waiting_queue_once_and_changes_nothing(
    snapshot: list[QueueView], served: list[tuple[int, int]]
) -> None:
    shares = Shares()
    for index, tokens in served:
        if ordered := order(snapshot, shares, ageing_s=AGEING_S):
            charge(snapshot, shares, ordered[index % len(ordered)], tokens, ageing_s=AGEING_S)
    ordered = order(snapshot, shares, ageing_s=AGEING_S)
    assert sorted(ordered) == sorted(each.name for each in snapshot if each.num_waiting)
    assert order(snapshot, shares, ageing_s=AGEING_S) == ordered


@given(views)
def test_interrupted_requests_go_before_all_others(snapshot: list[QueueView]) -> None:
    waiting = {each.name: each for each in snapshot if each.num_waiting}
    first = [waiting[name].num_interrupted > 0 for name in order(snapshot, Shares(), ageing_s=AGEING_S)]
    assert first == sorted(first, reverse=True)


@given(views, st.lists(st.integers(1, 4000), max_size=10))
def test_lanes_are_strict_where_nothing_is_aged_or_interrupted(snapshot: list[QueueView], sizes: list[int]) -> None:
    plain = [view(each.name.lane, each.name.queue, weight=each.weight) for each in snapshot]
    shares = Shares()
    for tokens in sizes:
        ranks = [LANES.index(name.lane) for name in order(plain, shares, ageing_s=AGEING_S)]
        assert ranks == sorted(ranks)
        if plain:
            serve(shares, plain, tokens)


def test_a_high_one_is_next_whatever_low_ones_wait() -> None:
    """Case QUE-1: a slot busy, 100 low queued, one high arrives."""
    shares = Shares()
    low = view("low", waited_s=0.5)
    for _ in range(20):
        assert serve(shares, [low], 500).lane == "low"
    assert serve(shares, [low, view("high", waited_s=0.0)], 500).lane == "high"


@pytest.mark.parametrize("tokens", [1, 16, 700, 5000])
@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("num_served_before", [0, 1, 7])
def test_a_late_tenant_is_not_behind_the_queue_of_another(tokens: int, lane: Lane, num_served_before: int) -> None:
    """Case QUE-3: A queues 50, then B queues 5 of equal size; B's last starts by position 11."""
    shares = Shares()
    for _ in range(num_served_before):
        serve(shares, [view(lane, "a", waited_s=50.0)], tokens)
    both = [view(lane, "a", waited_s=50.0), view(lane, "b", waited_s=0.0)]
    starts = [serve(shares, both, tokens).queue for _ in range(11)]
    assert starts.count("b") >= 5


@given(st.lists(st.integers(16, 2000), min_size=5, max_size=10), st.sampled_from(LANES))
def test_waiting_long_does_not_bend_the_shares_within_a_lane(pattern: list[int], lane: Lane) -> None:
    """Under load everything waits beyond the ageing limit; weights of 3 to 1 still give 3 to 1 within 10 %."""
    shares = Shares()
    both = [view(lane, "a", waited_s=0.0, weight=3.0), view(lane, "b", waited_s=99.0)]
    served: Counter[str] = Counter()
    sizes = pattern * 12
    for tokens in sizes:
        served[serve(shares, both, tokens).queue] += tokens
    largest = max(sizes)
    assert abs(served["a"] / 3 - served["b"]) <= 1 + largest / 3 + largest
    if sum(sizes) >= 60 * largest:
        assert served["a"] / served["b"] == pytest.approx(3, rel=0.1)


@given(
    st.lists(st.integers(3, 4000), min_size=1, max_size=30),
    st.integers(1, 3000),
    st.sampled_from(["normal", "low"]),
    st.lists(st.integers(3, 4000), max_size=5),
)
def test_an_aged_one_starts_within_the_limit_and_one_job(
    sizes: list[int], num_tokens: int, lane: Lane, before: list[int]
) -> None:
    """One slot, a saturated high lane, 0.01 s for a token: the low one starts by `ageing_s` plus one job."""
    shares = Shares()
    for tokens in before:
        serve(shares, [view("high")], tokens)
    now_s = 0.0
    for tokens in sizes * (1 + int(1000 * AGEING_S) // sum(sizes)):
        turn = serve(shares, [view("high", waited_s=5.0), view(lane, waited_s=now_s)], tokens)
        if turn.lane == lane:
            break
        now_s += tokens * 0.01
    else:
        pytest.fail("it never started")
    assert AGEING_S <= now_s <= AGEING_S + max(sizes) * 0.01 + 1e-6


@given(
    st.lists(st.tuples(st.integers(3, 4000), st.integers(3, 4000)), min_size=1, max_size=60),
    st.lists(st.sampled_from(["normal", "low"]), min_size=1, max_size=2, unique=True),
)
def test_floods_of_aged_ones_take_their_share_and_no_more(sizes: list[tuple[int, int]], lanes: list[Lane]) -> None:
    """High against aged lanes, 3 to 1 each: |S_high/3 - S_aged| <= 1 + M_high/3 + M_aged over any interval.

    So aged requests of a lane get at most a quarter of the tokens and one request more, and at least that, less one.
    """
    shares = Shares()
    snapshot = [view("high", waited_s=99.0), *(view(lane, waited_s=99.0) for lane in lanes)]
    served: Counter[str] = Counter()
    history = [Counter(served)]
    for high, aged in sizes:
        turn = order(snapshot, shares, ageing_s=AGEING_S)[0]
        tokens = high if turn.lane == "high" else aged
        charge(snapshot, shares, turn, tokens, ageing_s=AGEING_S)
        served[turn.lane] += tokens
        history.append(Counter(served))
    bound = 1 + max(high for high, _ in sizes) / STRICT_WEIGHT + max(aged for _, aged in sizes) + 1e-6
    for lane in lanes:
        ahead = [now["high"] / STRICT_WEIGHT - now[lane] for now in history]
        assert max(ahead) - min(ahead) <= bound


def test_an_aged_turn_is_for_the_aged_queues_of_the_lane() -> None:
    shares = Shares()
    snapshot = [view("high"), view("low", "a", waited_s=1.0), view("low", "b", waited_s=11.0)]
    assert serve(shares, snapshot, 100).lane == "high"
    assert [name.queue for name in order(snapshot, shares, ageing_s=AGEING_S)] == ["b", "default", "a"]


def test_age_is_nothing_to_the_highest_lane_that_waits() -> None:
    snapshot = [view("normal", waited_s=0.0), view("low", waited_s=9.0)]
    shares = Shares()
    assert [serve(shares, snapshot, 100).lane for _ in range(4)] == ["normal"] * 4
    alone = [view("low", "a", waited_s=0.0), view("low", "b", waited_s=99.0)]
    assert [serve(Shares(), alone, 100).queue, serve(shares, alone, 100).queue] == ["a", "a"]


def test_a_hand_back_is_refunded_to_the_queue() -> None:
    shares = Shares()
    both = [view("normal", "a"), view("normal", "b")]
    first = serve(shares, both, 900)
    charge(both, shares, first, -900, ageing_s=AGEING_S)
    assert order(both, shares, ageing_s=AGEING_S)[0] == first


@given(views, st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4000)), max_size=10), st.integers(1, 4000))
def test_a_choice_that_is_undone_leaves_the_turns_as_they_were(
    snapshot: list[QueueView], served: list[tuple[int, int]], tokens: int
) -> None:
    """Its queue is next again, whatever was served before."""
    backlogged = [view for view in snapshot if view.num_waiting]
    shares = Shares()
    for index, number in served:
        if ordered := order(backlogged, shares, ageing_s=AGEING_S):
            charge(backlogged, shares, ordered[index % len(ordered)], number, ageing_s=AGEING_S)
    before = order(backlogged, shares, ageing_s=AGEING_S)
    if before:
        charge(backlogged, shares, before[0], tokens, ageing_s=AGEING_S)
        charge(backlogged, shares, before[0], -tokens, ageing_s=AGEING_S, is_undone=True)
        assert order(backlogged, shares, ageing_s=AGEING_S)[0] == before[0]


def test_what_is_undone_again_and_again_costs_a_lane_no_turn() -> None:
    shares = Shares()
    both = [view("high"), view("low", waited_s=99.0)]
    turns = []
    for number in range(400):
        turn = serve(shares, both, 100)
        if turn.lane == "high" and number % 4:
            charge(both, shares, turn, -100, ageing_s=AGEING_S, is_undone=True)
        else:
            turns.append(turn.lane)
    assert turns.count("low") == pytest.approx(len(turns) / 4, abs=1)


@given(st.lists(st.tuples(st.integers(1, 12), st.sampled_from([1.0, 2.0, 4.0])), min_size=2, max_size=4))
def test_within_a_queue_nothing_overtakes(queues: list[tuple[int, float]]) -> None:
    """The choice names queues, and a queue gives its head: requests of one queue start in their order."""
    waiting = {QueueName(queue=f"q{number}"): list(range(length)) for number, (length, _) in enumerate(queues)}
    shares = Shares()
    starts: dict[QueueName, list[int]] = {name: [] for name in waiting}
    while any(waiting.values()):
        snapshot = [
            QueueView(name=name, num_waiting=len(jobs), weight=weight)
            for (name, jobs), (_, weight) in zip(waiting.items(), queues, strict=True)
        ]
        turn = serve(shares, snapshot, 100)
        starts[turn].append(waiting[turn].pop(0))
    assert all(before < after for jobs in starts.values() for before, after in pairwise(jobs))


def test_an_aged_flood_of_equal_requests_gets_every_fourth() -> None:
    shares = Shares()
    snapshot = [view("high", waited_s=99.0), view("low", waited_s=99.0)]
    turns = [serve(shares, snapshot, 100).lane for _ in range(40)]
    assert turns.count("low") == 10


def test_lanes_pay_neither_for_interrupted_requests_nor_back() -> None:
    """An interrupted low one, or a low one handed back, leaves the turn of an aged one where it was."""
    both = [view("high"), view("low", waited_s=99.0)]
    low = both[1].name
    shares = Shares()
    assert serve(shares, both, 100).lane == "high"
    interrupted = [both[0], QueueView(name=low, num_waiting=1, oldest_wait_s=99.0, num_interrupted=1)]
    charge(interrupted, shares, low, 5000, ageing_s=AGEING_S)
    assert serve(shares, both, 100) == low
    charge(both, shares, low, -100, ageing_s=AGEING_S)
    assert order(both, shares, ageing_s=AGEING_S)[0].lane == "high"
