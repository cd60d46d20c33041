"""Deficit round robin's bounds, over any sizes, weights, quanta, and comings and goings."""

import math
from collections import Counter
from collections.abc import Mapping
from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.discipline.rounds import Rounds

weights_of = st.dictionaries(
    st.sampled_from("abcde"), st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 8.0]), min_size=2
)
quanta = st.sampled_from([1.0, 16.0, 500.0, 5000.0])
sizes = st.lists(st.integers(1, 4000), min_size=1, max_size=80)
ROUNDING = 1e-6


def slack(quantum: float, largest: Mapping[str, float], weights: Mapping[str, float], one: str, other: str) -> float:
    """The bound: quantum + M_i/w_i + M_j/w_j. With weights of 1 it is 2·Max + Q (Shreedhar, Varghese 1995)."""
    return quantum + largest[one] / weights[one] + largest[other] / weights[other] + ROUNDING


@given(weights_of, quanta, sizes)
def test_those_always_backlogged_have_what_their_weights_say(
    weights: dict[str, float], quantum: float, sizes: list[int]
) -> None:
    """For any i, j and interval: |S_i/w_i - S_j/w_j| <= quantum + M_i/w_i + M_j/w_j."""
    rounds: Rounds[str] = Rounds(quantum_tokens=quantum)
    served = dict.fromkeys(weights, 0.0)
    largest = dict.fromkeys(weights, 0.0)
    history = [dict(served)]
    for size in sizes:
        turn = rounds.order(weights, weights)[0]
        rounds.charge(turn, size, weights, weights)
        served[turn] += size
        largest[turn] = max(largest[turn], size)
        history.append(dict(served))
    for one, other in combinations(weights, 2):
        ahead = [now[one] / weights[one] - now[other] / weights[other] for now in history]
        assert max(ahead) - min(ahead) <= slack(quantum, largest, weights, one, other)


@given(weights_of, quanta, st.lists(st.tuples(st.integers(1, 4000), st.sets(st.sampled_from("abcde"))), max_size=80))
def test_comings_and_goings_gain_nothing(
    weights: dict[str, float], quantum: float, steps: list[tuple[int, set[str]]]
) -> None:
    """Over any interval in which i is backlogged, whatever j does: S_j/w_j - S_i/w_i <= the same bound."""
    rounds: Rounds[str] = Rounds(quantum_tokens=quantum)
    served = dict.fromkeys(weights, 0.0)
    history: list[tuple[set[str], dict[str, float]]] = []
    largest = dict.fromkeys(weights, 0.0)
    for size, idle in steps:
        backlogged = sorted(weights.keys() - idle)
        history.append((set(backlogged), dict(served)))
        if backlogged:
            turn = rounds.order(backlogged, weights)[0]
            rounds.charge(turn, size, backlogged, weights)
            served[turn] += size
            largest[turn] = max(largest[turn], size)
    for stays, comes in permutations(weights, 2):
        least = math.inf
        for backlogged_then, now in [*history, (set(weights), served)]:
            ahead = now[comes] / weights[comes] - now[stays] / weights[stays]
            assert ahead - least <= slack(quantum, largest, weights, comes, stays)
            least = min(least, ahead) if stays in backlogged_then else math.inf


@given(st.lists(st.integers(16, 2000), min_size=5, max_size=10))
def test_weights_of_three_to_one_share_tokens_three_to_one(pattern: list[int]) -> None:
    sizes = pattern * 30
    rounds: Rounds[str] = Rounds()
    weights = {"a": 3.0, "b": 1.0}
    served: Counter[str] = Counter()
    for size in sizes:
        turn = rounds.order("ab", weights)[0]
        rounds.charge(turn, size, "ab", weights)
        served[turn] += size
    largest = max(sizes)
    assert abs(served["a"] / 3 - served["b"]) <= 1 + largest / 3 + largest
    if sum(sizes) >= 60 * largest:
        assert served["a"] / served["b"] == pytest.approx(3, rel=0.1)


@given(weights_of, quanta, st.lists(st.integers(1, 4000), max_size=20), st.integers(1, 4000))
def test_a_refund_gives_the_turn_back(weights: dict[str, float], quantum: float, sizes: list[int], last: int) -> None:
    rounds: Rounds[str] = Rounds(quantum_tokens=quantum)
    for size in sizes:
        rounds.charge(rounds.order(weights, weights)[0], size, weights, weights)
    turn = rounds.order(weights, weights)[0]
    rounds.charge(turn, last, weights, weights)
    rounds.charge(turn, -last, weights, weights)
    assert rounds.order(weights, weights)[0] == turn


@given(weights_of, st.lists(st.integers(1, 4000), max_size=20))
def test_order_changes_nothing_and_has_each_once(weights: dict[str, float], sizes: list[int]) -> None:
    rounds: Rounds[str] = Rounds()
    for size in sizes:
        ordered = rounds.order(weights, weights)
        assert sorted(ordered) == sorted(weights)
        assert rounds.order(weights, weights) == ordered
        rounds.charge(ordered[size % len(ordered)], size, weights, weights)


def test_idleness_saves_nothing_up_and_the_one_who_was_alone_owes_nothing() -> None:
    rounds: Rounds[str] = Rounds()
    for _ in range(100):
        rounds.charge("a", 500, ["a"], {})
    turns = []
    for _ in range(6):
        turns.append(rounds.order("ab", {})[0])
        rounds.charge(turns[-1], 500, "ab", {})
    assert turns == ["b", "a", "b", "a", "b", "a"]


def test_what_was_large_is_paid_though_the_queue_is_empty_after_it() -> None:
    """B has one request of 10,000 at a time, A always some of 100: both get about the same."""
    rounds: Rounds[str] = Rounds()
    served = {"a": 0, "b": 0}
    was_b = False
    for _ in range(3000):
        backlogged = "a" if was_b else "ab"
        turn = rounds.order(backlogged, {})[0]
        was_b = turn == "b"
        size = 10_000 if was_b else 100
        rounds.charge(turn, size, backlogged, {})
        served[turn] += size
    assert served["b"] == pytest.approx(served["a"], rel=0.1)


def test_one_passed_over_forfeits_its_turn() -> None:
    """A queue that seemed to have something is first in `order`; served instead, another pays as ever."""
    rounds: Rounds[str] = Rounds()
    for _ in range(50):
        rounds.charge("b", 100, "ab", {})
    turns = []
    for _ in range(10):
        turns.append(rounds.order("ab", {})[0])
        rounds.charge(turns[-1], 100, "ab", {})
    assert turns[0] == "a"
    assert turns.count("a") <= 6


def test_a_quantum_is_above_zero() -> None:
    with pytest.raises(ValueError, match="above 0"):
        Rounds(quantum_tokens=0)
