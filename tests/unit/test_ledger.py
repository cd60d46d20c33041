"""What a worker promises its engine's memory to."""

import pytest

from headrace.worker.ledger import Ledger


def test_exactly_what_memory_carries_runs() -> None:
    """1,000 tokens and three requests of 400: two run, the third on release (case MEM-4)."""
    ledger = Ledger(capacity_tokens=1000, max_concurrency=8)
    ledger.reserve(1, 400)
    ledger.reserve(2, 400)
    assert not ledger.room().fits(400)
    assert ledger.room().fits(200)
    assert (ledger.reserved_tokens, ledger.num_running) == (800, 2)
    ledger.release(1)
    assert ledger.room().fits(400)


def test_concurrency_and_memory_are_checked_together() -> None:
    ledger = Ledger(capacity_tokens=1000, max_concurrency=2)
    ledger.reserve(1, 10)
    assert ledger.room().fits(1)
    ledger.reserve(2, 10)
    assert not ledger.room().fits(1)
    assert not ledger.room().fits(1)
    with pytest.raises(ValueError, match="cannot reserve 1 tokens for 3"):
        ledger.reserve(3, 1)


def test_no_slot_where_memory_is_full() -> None:
    ledger = Ledger(capacity_tokens=100, max_concurrency=4)
    ledger.reserve(1, 100)
    assert not ledger.room().fits(1)


def test_an_engine_that_does_not_tell_is_bounded_by_concurrency_alone() -> None:
    ledger = Ledger(capacity_tokens=None, max_concurrency=1)
    assert ledger.room().could_ever_fit(10**9)
    ledger.reserve(1, 10**9)
    assert not ledger.room().fits(1)


def test_what_could_never_fit() -> None:
    ledger = Ledger(capacity_tokens=100, max_concurrency=4)
    ledger.reserve(1, 60)
    assert ledger.room().could_ever_fit(100)
    assert not ledger.room().could_ever_fit(101)


def test_a_message_is_reserved_once() -> None:
    ledger = Ledger(capacity_tokens=100, max_concurrency=4)
    ledger.reserve(1, 10)
    with pytest.raises(ValueError, match="for 1"):
        ledger.reserve(1, 10)
    assert ledger.reserved_tokens == 10


def test_release_may_come_twice_or_for_nothing() -> None:
    ledger = Ledger(capacity_tokens=100, max_concurrency=4)
    ledger.reserve(1, 10)
    for _ in range(2):
        ledger.release(1)
    ledger.release(99)
    assert (ledger.reserved_tokens, ledger.num_running) == (0, 0)


def test_a_capacity_that_shrinks_lets_nothing_more_in() -> None:
    """An engine that came back smaller: what runs is not broken off, nothing is added until it fits again."""
    ledger = Ledger(capacity_tokens=100, max_concurrency=4)
    ledger.reserve(1, 80)
    ledger.capacity_tokens = 50
    assert not ledger.room().fits(1)
    assert not ledger.room().fits(0)
    ledger.release(1)
    assert ledger.room().fits(50)
