"""Limits a minute over many routers: no 60 seconds have more than the limit, and no refusal is without a reason."""

import math

from hypothesis import given
from hypothesis import strategies as st

from headrace.router.purse import Purse, plan_bite
from headrace.schemas.usage import SLOT_S, WINDOW_S, Rates, Usage, Used, slot_of

NOTHING = Used()
STEPS = st.lists(
    st.tuples(
        st.integers(0, 3),  # router
        st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.3, 0.5, 5.0, 31.0, 60.0]),  # seconds since the step before
        st.integers(1, 40),  # tokens
        st.integers(0, 3),  # others that wait in the router
        st.booleans(),  # refused for another reason after it was paid for
    ),
    max_size=120,
)


class Routers:
    """Routers and the record they share, without a broker: each write finds what it expects."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.usage = Usage()
        self.purses = [Purse() for _ in range(4)]
        self.now = 1_000_000.0
        self.passed: list[tuple[float, Used]] = []

    def ask(self, router: int, wanted: Used, *, num_waiting: int, is_refunded: bool) -> float:
        """Seconds to wait; 0 if it passed."""
        at = slot_of(self.now)
        purse = self.purses[router].moved_to(at)
        spent = purse.spent(wanted, self.rates)
        if spent is None:
            waiting = Used(num_waiting, num_waiting * wanted.tokens)
            bite = plan_bite(self.usage, purse, self.rates, wanted, waiting=waiting, now=self.now)
            if isinstance(bite, float):
                self.purses[router] = purse
                return bite
            self.usage = bite.usage
            spent = bite.purse.spent(wanted, self.rates)
            assert spent is not None
            assert not spent.owed
        self.purses[router] = spent.refunded(at, wanted) if is_refunded else spent
        if not is_refunded:
            self.passed.append((self.now, wanted))
        return 0.0

    def passed_since(self, start: float) -> Used:
        kept = [amount for at, amount in self.passed if at >= start]
        return sum(kept, NOTHING)

    def held_elsewhere(self, router: int) -> Used:
        """What other routers took and have not given back."""
        held = NOTHING
        for other, purse in enumerate(self.purses):
            if other != router:
                held = sum((amount for _, amount in purse.owed), held + purse.left)
        return held


@given(st.integers(1, 30), st.integers(40, 400), STEPS)
def test_no_minute_has_more_than_the_limit_and_a_refusal_has_a_reason(
    requests: int, tokens: int, steps: list[tuple[int, float, int, int, bool]]
) -> None:
    rates = Rates(requests, tokens)
    routers = Routers(rates)
    for router, seconds, num_tokens, num_waiting, is_refunded in steps:
        routers.now += seconds
        wanted = Used(1, num_tokens)
        wait_s = routers.ask(router, wanted, num_waiting=num_waiting, is_refunded=is_refunded)
        if wait_s == 0:
            assert routers.passed_since(routers.now - WINDOW_S).fits(rates)
            continue
        assert 0 < wait_s <= WINDOW_S + SLOT_S
        # Whatever still counts passed within a window, or is held by a router that may yet spend it.
        taken = routers.passed_since(routers.now - WINDOW_S - SLOT_S) + routers.held_elsewhere(router)
        own = routers.purses[router]
        taken = sum((amount for _, amount in own.owed), taken + own.left)
        assert not (taken + wanted).fits(rates)


@given(st.lists(st.integers(0, 3), min_size=100, max_size=300))
def test_a_hundred_a_minute_pass_however_they_are_spread(spread: list[int]) -> None:
    routers = Routers(Rates(requests=100))
    for index, router in enumerate(spread):
        routers.now += 0.1 if index % 7 == 0 else 0.0
        routers.ask(router, Used(1, 50), num_waiting=0, is_refunded=False)
    assert len(routers.passed) == 100


@given(st.integers(600, 100_000), st.integers(1, 50))
def test_a_high_limit_is_taken_in_bites_and_all_of_it_passes(limit: int, step: int) -> None:
    routers = Routers(Rates(tokens=limit))
    num_writes, before = 0, routers.usage
    while routers.ask(0, Used(1, step), num_waiting=0, is_refunded=False) == 0:
        num_writes += routers.usage is not before
        before = routers.usage
    assert limit - step < sum(amount.tokens for _, amount in routers.passed) <= limit
    assert num_writes <= math.ceil(limit / max(step, limit // 600)) + 1


@given(st.integers(1, 50), st.floats(0, 59))
def test_what_is_told_to_wait_for_is_enough_and_no_more(limit: int, later: float) -> None:
    rates = Rates(requests=limit)
    usage, start = Usage(), 1_000_000.0
    for number in range(limit):
        usage = usage.changed(slot_of(start + number * later / limit), 1, 0, now=start)
    now = start + later
    wait_s = usage.wait_s(Used(1), rates, now=now)
    assert not (usage.used(now + wait_s - 0.001) + Used(1)).fits(rates)
    assert (usage.used(now + wait_s + 0.001) + Used(1)).fits(rates)
    assert usage.wait_s(Used(limit + 1), rates, now=now) == math.inf
