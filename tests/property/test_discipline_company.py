"""Who may run beside whom: one that may be what engines fail of harms no faulted neighbour, and everyone finishes."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.discipline.company import (
    CLEARED_PATIENCE_S,
    GRACE_S,
    LOST_ENGINE_PATIENCE_S,
    LOST_WORKER_PATIENCE_S,
    NOBODY,
    TURN_S,
    Asking,
    Guest,
    Standing,
    admissible,
    guest_of,
    is_welcome,
)
from headrace.schemas.states import JobState, Loss

MAX_FAULTS = 3
LONG_S = 3600.0


def of(num_tokens: int, *, was_engine: bool = True, num_faults: int = 1) -> Guest:
    faults = frozenset(f"w/e/{number}" for number in range(num_faults))
    loss = Loss(num_tokens=num_tokens, was_engine=was_engine)
    return guest_of(JobState(faults=faults, last_loss=loss), max_faults=MAX_FAULTS)


guests = st.one_of(
    st.just(NOBODY),
    st.builds(of, st.integers(0, 3), was_engine=st.booleans(), num_faults=st.integers(1, 2)),
)
askings = st.lists(
    st.builds(
        Asking,
        guest=guests,
        waited_s=st.sampled_from((0.0, GRACE_S, 1.0, 3.0, 8.0, LONG_S)),
        sequence=st.integers(1, 9),
    ),
    max_size=8,
)
companies = st.lists(st.tuples(guests, st.integers(0, 3)).map(lambda drawn: drawn[0].after(drawn[1])), max_size=6)


@given(companies, askings)
def test_never_two_suspects_and_nobody_beside_one_that_takes_turns_whatever_the_patience(
    inside: list[Guest], asking: list[Asking]
) -> None:
    company = list(inside)
    for index in admissible(inside, asking):
        guest = asking[index].guest
        assert not (guest.is_suspect and any(other.is_suspect for other in company))
        if guest.is_unproven and any(other.is_unproven for other in company):
            assert asking[index].waited_s >= TURN_S
            assert not any(other.takes_turns for other in (guest, *company))
        company.append(guest)


@given(companies, askings)
def test_who_has_patience_starts_in_fit_company_only(inside: list[Guest], asking: list[Asking]) -> None:
    """Whether beside those inside or those that start with it."""
    indexes = admissible(inside, asking)
    assert len(set(indexes)) == len(indexes)
    company = list(inside)
    for index in indexes:
        guest, has_patience = asking[index].guest, asking[index].waited_s < asking[index].guest.patience_s
        if guest.is_unproven:
            assert asking[index].waited_s >= GRACE_S
        if has_patience and guest.has_fault and not (guest.is_unproven and asking[index].waited_s >= TURN_S):
            assert not any(other.is_unproven for other in company)
        if has_patience and guest.is_unproven:
            assert not any(other.standing is Standing.CLEARED or other.is_suspect for other in company)
        if has_patience and guest.is_unproven and guest.is_suspect:
            assert not any(other.has_fault for other in company)
        company.append(guest)


@given(companies, askings)
def test_nobody_waits_without_need(inside: list[Guest], asking: list[Asking]) -> None:
    indexes = admissible(inside, asking)
    company = [*inside, *(asking[index].guest for index in indexes)]
    for index, each in enumerate(asking):
        if index in indexes:
            continue
        assert each.guest.has_fault
        reasons = [
            each.guest.is_unproven and each.waited_s < GRACE_S,
            each.guest.is_suspect and any(other.is_suspect for other in company),
            any(other.is_unproven for other in company),
            each.guest.is_unproven and any(other.has_fault for other in company),
        ]
        assert any(reasons)


@given(askings)
def test_an_engine_that_runs_nobody_takes_somebody(asking: list[Asking]) -> None:
    ready = [each for each in asking if each.waited_s >= GRACE_S]
    assert not ready or admissible([], ready)


@given(st.integers(1, 30), st.integers(0, 30))
def test_those_that_had_made_tokens_go_on_together_at_once(num_cleared: int, num_fresh: int) -> None:
    asking = [Asking(guest=of(2))] * num_cleared + [Asking(guest=NOBODY)] * num_fresh
    assert admissible([NOBODY] * 3, asking) == list(range(len(asking)))


def test_those_that_lost_their_worker_before_a_token_pass_together_after_a_while() -> None:
    asking = [Asking(guest=of(0, was_engine=False), waited_s=TURN_S, sequence=sequence) for sequence in range(9)]
    assert len(admissible([], asking)) == 9
    for hard in (of(0), of(0, was_engine=False, num_faults=2)):
        assert admissible([hard], asking) == []
        assert admissible([asking[0].guest], [Asking(guest=hard, waited_s=LONG_S)]) == []
    early = [msgspec.structs.replace(each, waited_s=TURN_S - 0.01) for each in asking]
    assert len(admissible([], early)) == 1


def test_those_without_a_token_pass_one_after_another_the_youngest_first() -> None:
    asking = [Asking(guest=of(0), waited_s=GRACE_S, sequence=sequence) for sequence in (1, 2, 3)]
    inside: list[Guest] = []
    for expected in (2, 1, 0):
        (index,) = admissible(inside, asking)
        assert index == expected
        assert admissible([*inside, asking[index].guest], asking[:index]) == []
        inside.append(asking[index].guest.after(1))
        del asking[index]


@pytest.mark.parametrize(
    ("num_tokens", "was_engine", "proof_tokens"),
    [(0, True, 1), (1, True, 2), (2, True, 0), (0, False, 1), (1, False, 0), (900, True, 0)],
)
def test_probation_ends_where_it_came_further_than_before(num_tokens: int, was_engine: bool, proof_tokens: int) -> None:
    guest = of(num_tokens, was_engine=was_engine)
    assert guest.proof_tokens == proof_tokens
    assert guest.is_unproven == (proof_tokens > 0)
    if guest.is_unproven:
        assert guest.after(proof_tokens - 1) == guest
        assert guest.after(proof_tokens).standing is Standing.PROVEN
    else:
        assert guest.after(10_000) == guest


def test_nothing_is_held_against_one_that_lost_nobody() -> None:
    assert guest_of(JobState(attempt=4, was_started=True), max_faults=MAX_FAULTS) == NOBODY


def test_how_long_each_waits_for_better_company() -> None:
    cleared, unproven = of(5), of(0)
    for guest, other, patience_s in (
        (cleared, unproven, CLEARED_PATIENCE_S),
        (unproven, cleared, LOST_ENGINE_PATIENCE_S),
        (of(0, was_engine=False), cleared, LOST_WORKER_PATIENCE_S),
        (of(0, num_faults=2), cleared, LOST_ENGINE_PATIENCE_S),
    ):
        assert admissible([other], [Asking(guest=guest, waited_s=patience_s - 0.01)]) == []
        assert admissible([other], [Asking(guest=guest, waited_s=patience_s)]) == [0]
    for never in (unproven, of(0, num_faults=2)):
        assert admissible([unproven], [Asking(guest=never, waited_s=LONG_S)]) == []
    assert admissible([of(9, num_faults=2)], [Asking(guest=of(9, num_faults=2), waited_s=LONG_S)]) == []


@given(guests, companies)
def test_a_worker_that_says_it_is_fit_company_is(guest: Guest, inside: list[Guest]) -> None:
    num_faulted = sum(other.has_fault for other in inside)
    num_unproven = sum(other.is_unproven for other in inside)
    if is_welcome(guest, num_faulted=num_faulted, num_unproven=num_unproven):
        assert admissible(inside, [Asking(guest=guest, waited_s=GRACE_S)]) == [0]


class Request(msgspec.Struct):
    """A request in virtual time: `fails_at` tokens of an attempt its engine fails; it needs `num_tokens`."""

    number: int
    num_tokens: int
    prefill_s: float
    fails_at: int | None = None
    made: int = 0
    num_starts: int = 0
    faults: frozenset[str] = frozenset()
    last_loss: Loss | None = None
    is_over: bool = False


class Seat(msgspec.Struct):
    """A request in an engine: since when, and how many tokens it has made there."""

    request: Request
    guest: Guest
    since_s: float
    num_made: int = 0


class Plant:
    """Engines with room for everybody, all requests at the door of any of them; one token a tick after the prefill.

    A lost request is back at once with a failed engine that is up again at once, which is the hardest for the rule.
    """

    def __init__(self, requests: list[Request], num_engines: int) -> None:
        self.tick_s = 0.05
        self.now_s = 0.0
        self.requests = requests
        self.door: list[tuple[Request, float]] = [(request, 0.0) for request in requests]
        self.engines: list[list[Seat]] = [[] for _ in range(num_engines)]
        self.num_deaths = 0

    def run(self, *, for_s: float) -> None:
        while not all(request.is_over for request in self.requests):
            assert self.now_s < for_s, "somebody waits for ever"
            for number in range(len(self.engines)):
                self.start(number)
            for number in range(len(self.engines)):
                self.advance(number)
            self.now_s += self.tick_s

    def start(self, number: int) -> None:
        engine = self.engines[number]
        asking = [
            Asking(guest=self.guest(request), waited_s=self.now_s - since_s, sequence=request.number)
            for request, since_s in self.door
        ]
        started = [self.door[index][0] for index in admissible((seat.guest for seat in engine), asking)]
        for request in started:
            request.num_starts += 1
            engine.append(Seat(request, self.guest(request), self.now_s))
        self.door = [each for each in self.door if each[0] not in started]

    def advance(self, number: int) -> None:
        for seat in self.engines[number]:
            if self.now_s - seat.since_s < seat.request.prefill_s:
                continue
            if seat.request.fails_at is not None and seat.num_made >= seat.request.fails_at:
                self.fail(number)
                return
            seat.num_made += 1
            seat.guest = seat.guest.after(seat.num_made)
            if seat.request.made + seat.num_made >= seat.request.num_tokens:
                seat.request.is_over = True
        self.engines[number] = [seat for seat in self.engines[number] if not seat.request.is_over]

    def fail(self, number: int) -> None:
        self.num_deaths += 1
        for seat in self.engines[number]:
            request = seat.request
            request.made += seat.num_made
            request.faults |= {f"death {self.num_deaths}"}
            request.last_loss = Loss(num_tokens=seat.num_made, was_engine=True)
            if len(request.faults) >= MAX_FAULTS:
                request.is_over = True
            else:
                self.door.append((request, self.now_s))
        self.engines[number] = []

    @staticmethod
    def guest(request: Request) -> Guest:
        return guest_of(JobState(faults=request.faults, last_loss=request.last_loss), max_faults=MAX_FAULTS)


neighbours_of = st.lists(st.tuples(st.integers(20, 300), st.sampled_from((0.0, 0.05, 0.3))), min_size=1, max_size=8)


@given(neighbours_of, st.integers(1, 3), st.integers(0, 1), st.sampled_from((0.0, 0.2, 1.0)))
def test_a_poison_request_takes_nobody_that_had_made_tokens_to_a_third_start(
    neighbours: list[tuple[int, float]], num_engines: int, fails_at: int, prefill_s: float
) -> None:
    """It comes last, as each of its neighbours has made two tokens. Each lasts 15 s at most, half the patience."""
    plant = Plant([Request(number, *each) for number, each in enumerate(neighbours)], num_engines)
    for request in plant.requests:
        plant.engines[0].append(Seat(request, NOBODY, -request.prefill_s, 2))
        request.num_starts = 1
    poison = Request(99, 50, prefill_s, fails_at)
    plant.requests.append(poison)
    plant.engines[0].append(Seat(poison, NOBODY, 0.0))
    poison.num_starts = 1
    plant.door = []
    plant.run(for_s=200.0)
    assert (poison.num_starts, len(poison.faults)) == (3, MAX_FAULTS)
    for request in plant.requests[:-1]:
        assert request.num_starts <= 2
        assert len(request.faults) <= 1


@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.sampled_from((0.0, 0.05, 0.3)), st.none() | st.integers(0, 4)), max_size=9
    ),
    st.integers(1, 3),
)
def test_everybody_finishes_or_is_given_up_after_three_starts(
    drawn: list[tuple[int, float, int | None]], num_engines: int
) -> None:
    """Whatever engines fail of, and however many such requests there are."""
    plant = Plant([Request(number, *each) for number, each in enumerate(drawn)], num_engines)
    plant.run(for_s=2000.0)
    for request in plant.requests:
        assert request.num_starts <= MAX_FAULTS


@given(st.lists(st.sampled_from((0.0, 0.05, 0.3)), min_size=1, max_size=9), st.integers(1, 3), st.data())
def test_of_many_in_prefill_only_the_poison_is_given_up(
    prefills: list[float], num_engines: int, data: st.DataObject
) -> None:
    """The worst case: nobody has a token when the engine fails. Those that pass before the poison may start again."""
    plant = Plant([Request(number, 40, prefill_s) for number, prefill_s in enumerate(prefills)], num_engines)
    poison = data.draw(st.sampled_from(plant.requests))
    poison.fails_at = 0
    plant.run(for_s=2000.0)
    assert poison.num_starts == MAX_FAULTS
    for request in plant.requests:
        assert request.num_starts <= MAX_FAULTS
        assert request is poison or len(request.faults) < MAX_FAULTS
        if poison is plant.requests[-1]:  # the last to come passes first
            assert request is poison or request.num_starts < MAX_FAULTS
