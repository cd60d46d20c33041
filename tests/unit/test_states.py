"""The table of a job's life, and what a log says of its job."""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas import states
from headrace.schemas.events import EVENT_KINDS, Event, EventKind, Owner, handed_over, requeued
from headrace.schemas.states import TERMINAL, TRANSITIONS, JobState, Loss, State, fold, next_state, tells_all

STATES: tuple[State, ...] = get_args(State)
ENDS = {"done", "failed", "cancelled", "expired"}


def owner(worker: str = "w", epoch: str = "e", sequence: int = 7, engine_run: int = 0) -> Owner:
    return Owner(worker=worker, epoch=epoch, queue_sequence=sequence, engine_run=engine_run)


def chain(*events: Event) -> list[Event]:
    """The events as a log would number them: sequences rise, each names the one before."""
    return [
        msgspec.structs.replace(event, sequence=10 * number, last_sequence=10 * (number - 1))
        for number, event in enumerate(events, start=1)
    ]


def event(kind: EventKind, **fields: Any) -> Event:
    return Event(kind=kind, job="j", **fields)


def test_an_end_has_no_way_out() -> None:
    assert ENDS == TERMINAL
    assert not [state for state, _ in TRANSITIONS if state in TERMINAL]
    for state in TERMINAL:
        for kind in EVENT_KINDS:
            assert next_state(state, kind) is None  # type: ignore[arg-type]


def test_states_and_events_of_the_table_are_known_and_all_used() -> None:
    assert {state for state, _ in TRANSITIONS} | set(TRANSITIONS.values()) == set(STATES)
    assert {kind for _, kind in TRANSITIONS} == EVENT_KINDS


def test_every_state_can_be_reached_and_left_for_every_end() -> None:
    for start in ("queued", "running"):
        reached: set[str] = {start}
        while True:
            more = {after for (before, _), after in TRANSITIONS.items() if before in reached} - reached
            if not more:
                break
            reached |= more
        assert reached == set(STATES)


def test_each_event_leads_to_one_state_only() -> None:
    landings: dict[EventKind, set[State]] = {}
    for (_, kind), after in TRANSITIONS.items():
        landings.setdefault(kind, set()).add(after)
    assert all(len(states_) == 1 for states_ in landings.values())
    assert {kind: {state} for kind, state in states._LANDING.items()} == landings


def test_a_terminal_event_is_terminal_everywhere() -> None:
    for kind in EVENT_KINDS:
        is_terminal = Event(kind=kind, job="j").is_terminal  # type: ignore[arg-type]
        assert is_terminal == (kind in TERMINAL) == fold([Event(kind=kind, job="j")]).is_terminal  # type: ignore[arg-type]


@st.composite
def legal_logs(draw: st.DrawFn) -> list[Event]:
    """Any walk through the table, with the offsets, attempts and owners its writers would give it."""
    state: State = "queued"
    attempt, num_tokens, events = 1, 0, list[Event]()
    runner: Owner | None = None
    for _ in range(draw(st.integers(0, 14))):
        kinds = sorted(kind for before, kind in TRANSITIONS if before == state)
        if events:
            kinds = [kind for kind in kinds if kind != "accepted"]
        if not kinds:
            break
        kind = draw(st.sampled_from(kinds))
        fields: dict[str, Any] = {"attempt": attempt, "offset": num_tokens}
        if kind == "started":
            runner = owner(draw(st.sampled_from(["a", "b"])), str(draw(st.integers(0, 2))), draw(st.integers(1, 3)))
            fields["owner"] = runner
        elif kind == "delta":
            fields |= {"count": draw(st.integers(0, 3)), "owner": runner}
            num_tokens += fields["count"]
        elif kind == "requeued":
            attempt += 1
            fields["attempt"] = attempt
            if runner is not None and draw(st.booleans()):
                fields["lost"] = runner.fault_id
            runner = None
        elif kind == "accepted":
            fields["queue_sequence"] = 7
        events.append(event(kind, **fields))
        after = next_state(state, kind)
        assert after is not None
        state = after
    return chain(*events)


@given(legal_logs())
def test_fold_of_a_legal_log(log: list[Event]) -> None:
    told = fold(log)
    state: State = "queued"
    for entry in log:
        after = next_state(state, entry.kind)
        assert after is not None
        state = after
    assert told.state == state
    assert told.is_whole
    assert (told.owner is not None) == (state == "running")
    assert told.num_tokens == sum(entry.count for entry in log)
    assert told.sequence == (log[-1].sequence if log else 0)
    assert told.last == (log[-1] if log else None)
    assert told.attempt == 1 + sum(entry.kind == "requeued" for entry in log)
    assert told.faults == {entry.lost for entry in log if entry.lost is not None}
    assert told.is_terminal == (state in TERMINAL)
    if told.owner is not None:
        assert told.owner == [entry.owner for entry in log if entry.kind == "started"][-1]
        assert told.queue_sequence == told.owner.queue_sequence


_LACKING = {"body_hash": "", "model": "", "queue_sequence": None, "is_whole": True}
"""What a last event need not say of a job."""


@given(legal_logs())
def test_a_last_event_that_tells_all_says_what_the_whole_log_says(log: list[Event]) -> None:
    for size, last in enumerate(log, start=1):
        if tells_all(last):
            told, whole = (msgspec.structs.replace(fold(read), **_LACKING) for read in ([last], log[:size]))
            assert told == whole


@given(legal_logs())
def test_only_a_job_that_never_started_or_lost_its_first_attempt_is_told_by_its_last_event(log: list[Event]) -> None:
    for size, last in enumerate(log, start=1):
        kinds = [entry.kind for entry in log[:size]]
        is_first_loss = last.kind == "requeued" and kinds.count("requeued") == 1
        assert tells_all(last) == (kinds == ["accepted"] or is_first_loss)


def test_what_a_fallback_took_over_is_not_told_by_its_last_event() -> None:
    over = handed_over("j", attempt=2, model="other", queue_sequence=3, body_hash="h")
    assert not tells_all(over)


@given(legal_logs().filter(lambda log: len(log) > 1), st.data())
def test_fold_sees_any_event_that_is_missing(log: list[Event], data: st.DataObject) -> None:
    gone = data.draw(st.integers(0, len(log) - 2))
    assert not fold(log[:gone] + log[gone + 1 :]).is_whole


@given(legal_logs(), st.integers(0, 14))
def test_fold_of_a_beginning_is_whole(log: list[Event], size: int) -> None:
    assert fold(log[:size]).is_whole


def test_fold_of_nothing() -> None:
    assert fold([]) == JobState()
    assert not JobState().is_terminal


RUN = event("started", owner=owner())


@pytest.mark.parametrize(
    ("log", "is_whole"),
    [
        ([RUN, event("delta", offset=0, count=2), event("delta", offset=2, count=1)], True),
        ([RUN, event("delta", offset=0, count=2), event("delta", offset=3, count=1)], False),
        ([RUN, event("delta", offset=0, count=2), event("delta", offset=1, count=1)], False),
        ([RUN, event("delta", offset=1, count=2)], False),
        ([event("started", offset=5, owner=owner()), event("delta", offset=5, count=1)], False),
        ([event("requeued", offset=5, attempt=2)], False),
        ([event("done", offset=5)], False),
        ([RUN, event("done", offset=0)], True),
    ],
)
def test_tokens_without_a_hole_from_the_first(log: list[Event], is_whole: bool) -> None:
    assert fold(log).is_whole is is_whole


@pytest.mark.parametrize("last_sequences", [(0, 10, 30), (0, 0, 20), (5, 10, 20), (0, 10, None)])
def test_chain_without_a_gap(last_sequences: tuple[int | None, ...]) -> None:
    log = chain(RUN, event("delta", count=1), event("delta", offset=1, count=1))
    linked = [
        msgspec.structs.replace(entry, last_sequence=last) for entry, last in zip(log, last_sequences, strict=True)
    ]
    assert fold(linked).is_whole is (last_sequences == (0, 10, None))


def test_a_gap_is_never_forgotten() -> None:
    log = chain(event("accepted"), RUN, event("delta", count=1), event("requeued", offset=1, attempt=2), RUN)
    assert not fold(log[1:]).is_whole


def test_faults_are_distinct_losses() -> None:
    first, again, restarted = owner(), owner(sequence=9), owner(engine_run=1)
    other_epoch, other_worker = owner(epoch="e2"), owner(worker="v")
    lost = [one.fault_id for one in (first, again, restarted, other_epoch, other_worker, first)]
    told = fold(event("requeued", attempt=number, lost=name) for number, name in enumerate(lost, start=2))
    assert told.faults == {"w/e/0", "w/e/1", "w/e2/0", "v/e/0"}
    assert told.attempt == 7


def lost(attempt: int, *, offset: int = 0, by: Owner | None = None, num_made: int = 0) -> Event:
    """A `requeued` that counts `owner()` as lost, or its engine, where it says so itself."""
    return requeued("j", attempt=attempt, offset=offset, reason="r", lost=owner(), by=by, num_made=num_made)


def drained(attempt: int, *, offset: int = 0, num_made: int = 0) -> Event:
    return requeued("j", attempt=attempt, offset=offset, reason="drained", lost=None, num_made=num_made)


@pytest.mark.parametrize(
    ("log", "loss"),
    [
        ([RUN], None),
        ([RUN, drained(2)], None),
        ([RUN, lost(2)], Loss(num_tokens=0, was_engine=False)),
        ([RUN, lost(2, by=owner("monitor"))], Loss(num_tokens=0, was_engine=False)),
        ([RUN, lost(2, by=owner(epoch="e2"))], Loss(num_tokens=0, was_engine=False)),
        ([RUN, lost(2, by=owner())], Loss(num_tokens=0, was_engine=True)),
        ([RUN, event("delta", count=3), lost(2, offset=3)], Loss(num_tokens=3, was_engine=False)),
        ([RUN, lost(2, by=owner(), num_made=4)], Loss(num_tokens=4, was_engine=True)),
        # The last attempt counts, and only its own tokens.
        (
            [RUN, event("delta", count=3), lost(2, offset=3), event("started", attempt=2, offset=3), lost(3, offset=3)],
            Loss(num_tokens=0, was_engine=False),
        ),
        # One that was handed back without a fault is judged by the better of the two.
        ([RUN, lost(2), event("started", attempt=2), drained(3)], Loss(num_tokens=0, was_engine=False)),
        (
            [RUN, lost(2), event("started", attempt=2), event("delta", attempt=2, count=5), drained(3, offset=5)],
            Loss(num_tokens=5, was_engine=False),
        ),
        (
            [
                RUN,
                event("delta", count=5),
                lost(2, offset=5),
                event("started", attempt=2, offset=5),
                drained(3, offset=5),
            ],
            Loss(num_tokens=5, was_engine=False),
        ),
    ],
)
def test_what_the_last_attempt_that_was_lost_had_made(log: list[Event], loss: Loss | None) -> None:
    assert fold(log).last_loss == loss


def test_what_costs_no_fault() -> None:
    told = fold([RUN, event("requeued", attempt=2, reason="drained")])
    assert (told.faults, told.attempt, told.state, told.owner) == (frozenset(), 2, "queued", None)


def test_a_delta_read_without_its_start_names_the_runner() -> None:
    told = fold([event("delta", offset=4, count=1, owner=Owner(worker="w", epoch="e"))])
    assert (told.state, told.was_started, told.is_whole) == ("running", True, False)
    assert told.owner is not None
    assert told.owner.is_same(owner())


def test_the_attempt_is_known_from_a_delta_alone() -> None:
    """A monitor that hands a job over reads no more than its last event."""
    assert fold([event("delta", attempt=2, offset=5, count=1, owner=owner())]).attempt == 2


def test_a_start_says_which_queue_message_counts() -> None:
    log = [event("accepted", queue_sequence=3), event("started", owner=owner(sequence=8))]
    assert fold(log[:1]).queue_sequence == 3
    assert fold(log).queue_sequence == 8


def test_hash_is_the_last_one_said() -> None:
    log = [event("accepted", body_hash="h1"), event("started", owner=owner())]
    assert fold(log).body_hash == "h1"


def test_was_started() -> None:
    assert not fold([event("accepted")]).was_started
    assert not fold([event("accepted"), event("cancelled")]).was_started
    assert fold([RUN]).was_started
    assert fold([event("requeued", attempt=2)]).was_started


def test_same_append_is_recognised_by_owner_attempt_offset_and_count() -> None:
    sent = event("delta", attempt=2, offset=5, count=3, owner=owner())
    stored = event("delta", attempt=2, offset=5, count=3, owner=Owner(worker="w", epoch="e"), sequence=9)
    assert sent.is_same_append(stored)
    for other in (
        {"attempt": 3},
        {"offset": 4},
        {"count": 2},
        {"kind": "done"},
        {"owner": owner(epoch="f")},
        {"owner": owner(worker="v")},
        {"owner": None},
    ):
        assert not sent.is_same_append(msgspec.structs.replace(stored, **other))
    nobody = msgspec.structs.replace(sent, owner=None)
    assert not nobody.is_same_append(nobody)


def test_two_claims_of_one_worker_for_two_messages_are_not_the_same() -> None:
    one = event("started", owner=owner(sequence=1), queue_sequence=1)
    other = event("started", owner=owner(sequence=2), queue_sequence=2)
    assert one.is_same_append(one)
    assert not one.is_same_append(other)
