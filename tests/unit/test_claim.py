"""Table W1: what a worker does with a fetched message, row by row, and what no situation may ever lead to."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import Event, EventKind, Owner
from headrace.schemas.states import JobState, fold
from headrace.schemas.workers import Heartbeat, HeldRequest, SeenBeat, is_owner_alive
from headrace.worker.claim import Action, Decision, Situation, decide

Q = 7
"""Queue sequence of the fetched message."""
ME = Owner(worker="me", epoch="e", queue_sequence=Q, beat=100)
OTHER = Owner(worker="other", epoch="o", queue_sequence=Q, beat=50)
DEADLINE, QUEUE_UNTIL, RETENTION = 1000.0, 500.0, 3600.0


def event(kind: EventKind, **fields: Any) -> Event:
    return Event(kind=kind, job="j", **fields)


def log(*events: Event) -> JobState:
    return fold(
        msgspec.structs.replace(entry, sequence=number, last_sequence=number - 1)
        for number, entry in enumerate(events, start=1)
    )


def started(owner: Owner) -> Event:
    return event("started", owner=owner, queue_sequence=owner.queue_sequence)


def delta(owner: Owner) -> Event:
    return event("delta", owner=Owner(worker=owner.worker, epoch=owner.epoch), count=1)


def lost(number: int) -> Event:
    return event("requeued", attempt=number + 1, lost=f"w{number}/e/0")


def beat(*held: int, epoch: str = "o", revision: int = 60, is_tombstone: bool = False) -> SeenBeat:
    lines = tuple(HeldRequest(consumer="c", sequence=q, tenant="t", job="j", attempt=1) for q in held)
    said = Heartbeat(worker="other", epoch=epoch, state="Ready", model="m", held=lines, is_tombstone=is_tombstone)
    return SeenBeat(revision=revision, beat=said)


EXPIRED = SeenBeat(revision=61, beat=None)


def situation(state: JobState, **fields: Any) -> Situation:
    base: dict[str, Any] = {
        "me": ME,
        "now": 100.0,
        "deadline_at": DEADLINE,
        "queue_until": QUEUE_UNTIL,
        "log_retention_s": RETENTION,
        "max_faults": 3,
        "fits": True,
    }
    return Situation(state=state, **(base | fields))


ACCEPTED = log(event("accepted"))
EMPTY = log()
REQUEUED = log(event("accepted"), started(OTHER), event("requeued", attempt=2))
RUNNING_HERE = log(event("accepted"), started(ME))
RUNNING_THERE = log(event("accepted"), started(OTHER))
WRITING_THERE = log(event("accepted"), started(OTHER), delta(OTHER))


class TestTerminal:
    @pytest.mark.parametrize("kind", ["done", "failed", "cancelled", "expired"])
    @pytest.mark.parametrize("now", [100.0, 999_999.0])
    def test_is_acked(self, kind: EventKind, now: float) -> None:
        ended = log(event("accepted"), started(OTHER), event(kind))
        assert decide(situation(ended, now=now)) == Decision(Action.ACK)

    def test_dead_letter_is_acked_too_once_it_exists(self) -> None:
        ended = log(event("accepted"), lost(1), event("failed", is_dead=True))
        assert decide(situation(ended)).action is Action.ACK
        assert ended.last is not None
        assert ended.last.is_dead  # which tells the caller to make sure of the dead letter first


class TestEmptyPastDeadlineAndRetention:
    def test_is_acked_and_never_run(self) -> None:
        assert decide(situation(EMPTY, now=DEADLINE + RETENTION + 1)) == Decision(Action.ACK)

    def test_not_while_a_log_could_still_be_there(self) -> None:
        assert decide(situation(EMPTY, now=DEADLINE + RETENTION - 1)).action is Action.FAIL_DEADLINE

    def test_not_where_a_log_is_there(self) -> None:
        assert decide(situation(ACCEPTED, now=DEADLINE + RETENTION + 1)).action is Action.FAIL_DEADLINE


class TestPastTheDeadline:
    @pytest.mark.parametrize("state", [EMPTY, ACCEPTED, REQUEUED, RUNNING_HERE, RUNNING_THERE, WRITING_THERE])
    def test_fails_whoever_has_it(self, state: JobState) -> None:
        assert decide(situation(state, now=DEADLINE + 0.1, owner_seen=beat(Q))) == Decision(Action.FAIL_DEADLINE)

    def test_comes_before_dead_letter_and_queue_timeout(self) -> None:
        poison = log(lost(1), lost(2), lost(3))
        assert decide(situation(poison, now=DEADLINE + 1)).action is Action.FAIL_DEADLINE

    def test_not_at_the_deadline_itself(self) -> None:
        assert decide(situation(REQUEUED, now=DEADLINE)).action is Action.CLAIM


class TestNeverStartedPastItsQueueTimeout:
    @pytest.mark.parametrize("state", [EMPTY, ACCEPTED])
    def test_expires(self, state: JobState) -> None:
        assert decide(situation(state, now=QUEUE_UNTIL + 1)) == Decision(Action.EXPIRE_QUEUED)

    @pytest.mark.parametrize("state", [EMPTY, ACCEPTED])
    def test_not_within_it(self, state: JobState) -> None:
        assert decide(situation(state, now=QUEUE_UNTIL)).action is Action.CLAIM

    def test_not_once_it_was_started(self) -> None:
        assert decide(situation(REQUEUED, now=QUEUE_UNTIL + 1)).action is Action.CLAIM
        assert decide(situation(RUNNING_HERE, now=QUEUE_UNTIL + 1)).action is Action.RUN


class TestMyOwnStarted:
    def test_not_running_here_is_a_lost_ack_and_runs(self) -> None:
        assert decide(situation(RUNNING_HERE)) == Decision(Action.RUN)

    def test_running_here_is_ignored(self) -> None:
        assert decide(situation(RUNNING_HERE, is_running_here=True)) == Decision(Action.IGNORE)
        writing = log(event("accepted"), started(ME), delta(ME))
        assert decide(situation(writing, is_running_here=True)) == Decision(Action.IGNORE)

    def test_for_another_message_of_the_job_is_not_run_with_this_one(self) -> None:
        other_message = msgspec.structs.replace(ME, queue_sequence=Q + 1)
        state = log(event("accepted"), started(other_message))
        assert decide(situation(state)) == Decision(Action.REQUEUE)
        assert decide(situation(state, is_running_here=True)) == Decision(Action.IGNORE)

    def test_of_an_earlier_epoch_is_another_owner(self) -> None:
        before = msgspec.structs.replace(ME, epoch="before")
        state = log(event("accepted"), started(before))
        assert decide(situation(state, owner_seen=beat(epoch="e", revision=160))) == Decision(
            Action.REQUEUE, lost=before
        )


class TestMeButNotRunning:
    def test_after_a_delta_goes_back_without_a_fault(self) -> None:
        state = log(event("accepted"), started(ME), delta(ME))
        assert decide(situation(state)) == Decision(Action.REQUEUE)


class TestOwnerAlive:
    @pytest.mark.parametrize("state", [RUNNING_THERE, WRITING_THERE])
    def test_listing_it_is_left_alone(self, state: JobState) -> None:
        assert decide(situation(state, owner_seen=beat(3, Q))) == Decision(Action.DROP)

    def test_that_has_not_beaten_since_its_claim_is_left_alone(self) -> None:
        assert decide(situation(RUNNING_THERE, owner_seen=beat(revision=OTHER.beat))) == Decision(Action.DROP)

    def test_is_judged_by_the_message_it_claimed_with_and_not_by_mine(self) -> None:
        theirs = msgspec.structs.replace(OTHER, queue_sequence=3)
        state = log(event("accepted"), started(theirs))
        assert decide(situation(state, owner_seen=beat(3))) == Decision(Action.DROP)
        assert decide(situation(state, owner_seen=beat(Q))).action is Action.REQUEUE

    def test_is_left_alone_even_with_faults_exhausted_or_no_room_here(self) -> None:
        state = log(lost(1), lost(2), lost(3), started(OTHER))
        assert decide(situation(state, owner_seen=beat(Q), fits=False)) == Decision(Action.DROP)


class TestOwnerGone:
    @pytest.mark.parametrize("state", [RUNNING_THERE, WRITING_THERE])
    @pytest.mark.parametrize(
        "seen",
        [None, EXPIRED, beat(Q, is_tombstone=True), beat(Q, epoch="later")],
        ids=["gone", "expired", "dead", "new"],
    )
    def test_by_death_is_a_fault(self, state: JobState, seen: SeenBeat | None) -> None:
        decision = decide(situation(state, owner_seen=seen))
        assert decision.action is Action.REQUEUE
        assert decision.lost is not None
        assert decision.lost.fault_id == OTHER.fault_id

    @pytest.mark.parametrize("held", [(), (3,)])
    def test_by_not_listing_it_is_a_lost_lease_and_no_fault(self, held: tuple[int, ...]) -> None:
        assert decide(situation(WRITING_THERE, owner_seen=beat(*held))) == Decision(Action.REQUEUE)


class TestFaultsExhausted:
    @pytest.mark.parametrize("fits", [True, False])
    def test_is_given_up(self, fits: bool) -> None:
        assert decide(situation(log(lost(1), lost(2), lost(3)), fits=fits)) == Decision(Action.DEAD_LETTER)

    def test_not_one_before(self) -> None:
        assert decide(situation(log(lost(1), lost(2)))).action is Action.CLAIM

    def test_not_by_attempts_alone(self) -> None:
        handed_back = log(*(event("requeued", attempt=number) for number in range(2, 20)))
        assert decide(situation(handed_back)).action is Action.CLAIM

    def test_one_loss_told_three_times_is_one(self) -> None:
        assert decide(situation(log(lost(1), lost(1), lost(1)))).action is Action.CLAIM


class TestFree:
    @pytest.mark.parametrize("state", [EMPTY, ACCEPTED, REQUEUED])
    def test_is_claimed(self, state: JobState) -> None:
        assert decide(situation(state)) == Decision(Action.CLAIM)

    @pytest.mark.parametrize("state", [EMPTY, ACCEPTED, REQUEUED])
    def test_is_held_where_it_does_not_fit(self, state: JobState) -> None:
        assert decide(situation(state, fits=False)) == Decision(Action.HOLD)


owners = st.builds(
    Owner,
    worker=st.sampled_from(["me", "other"]),
    epoch=st.sampled_from(["e", "o"]),
    queue_sequence=st.sampled_from([Q, 8]),
    beat=st.integers(40, 120),
)
seen_beats = st.one_of(
    st.none(),
    st.just(EXPIRED),
    st.builds(
        beat,
        st.sampled_from([Q, 8, 9]),
        epoch=st.sampled_from(["e", "o"]),
        revision=st.integers(40, 130),
        is_tombstone=st.booleans(),
    ),
)


@st.composite
def states(draw: st.DrawFn) -> JobState:
    entries = [event("accepted")] if draw(st.booleans()) else []
    entries += [lost(draw(st.integers(1, 4))) for _ in range(draw(st.integers(0, 5)))]
    owner = draw(st.none() | owners)
    if owner is not None:
        entries.append(started(owner))
        entries += [delta(owner)] if draw(st.booleans()) else []
    ends: list[EventKind | None] = [None, None, "requeued", "done", "failed", "cancelled", "expired"]
    end = draw(st.sampled_from(ends))
    if end is not None:
        entries.append(event(end, attempt=9))
    return log(*entries)


situations = st.builds(
    situation,
    states(),
    now=st.sampled_from([0.0, QUEUE_UNTIL, 600.0, DEADLINE, 1001.0, DEADLINE + RETENTION, 9999.0]),
    fits=st.booleans(),
    is_running_here=st.booleans(),
    standing=st.sampled_from(["own", "own", "pending", "void"]),
    has_fallback=st.booleans(),
    owner_seen=seen_beats,
)


@given(situations)
def test_invariants(s: Situation) -> None:
    state, action, owner = s.state, decide(s).action, s.state.owner
    is_past, has_expired = s.now > s.deadline_at, state.last is None and s.now > s.deadline_at + s.log_retention_s
    exhausted = len(state.faults) >= s.max_faults

    # The universal rule: no message of a job that has not ended is ever acked.
    # Only one that another message of the job has replaced.
    assert (action is Action.LEAVE) == (not state.is_terminal and s.standing == "void")
    assert (action is Action.ACK) == (state.is_terminal or (has_expired and action is not Action.LEAVE))
    if state.is_terminal or s.standing == "void":
        return
    if action in (Action.CLAIM, Action.RUN, Action.HOLD, Action.REQUEUE):
        assert not is_past
    if action in (Action.CLAIM, Action.HOLD):
        assert owner is None
        assert not exhausted
        assert s.fits == (action is Action.CLAIM)
        assert state.was_started or s.now <= s.queue_until
    if action is Action.RUN:
        assert owner is not None
        assert owner.is_same(s.me)
        assert owner.queue_sequence == s.me.queue_sequence
        assert state.last is not None
        assert state.last.kind == "started"
        assert not s.is_running_here
    if action is Action.REQUEUE:
        assert owner is not None
        assert owner.is_same(s.me) or not is_owner_alive(owner, s.owner_seen)
        assert not (owner.is_same(s.me) and s.is_running_here)
    if action is Action.DROP:
        assert owner is not None
        assert is_owner_alive(owner, s.owner_seen)
    if action is Action.IGNORE:
        assert s.is_running_here
    if action in (Action.EXPIRE_QUEUED, Action.FALL_BACK):
        assert not state.was_started
        assert owner is None
        assert s.has_fallback == (action is Action.FALL_BACK)
    assert s.standing == "own" or action not in (Action.CLAIM, Action.HOLD)
    if action is Action.DEAD_LETTER:
        assert exhausted
        assert owner is None
    if action is Action.FAIL_DEADLINE:
        assert is_past


@given(situations)
def test_a_fault_is_named_only_for_an_owner_proven_gone(s: Situation) -> None:
    decision = decide(s)
    if decision.lost is None:
        return
    seen, owner = s.owner_seen, s.state.owner
    assert decision.action is Action.REQUEUE
    assert decision.lost == owner
    assert owner is not None
    assert not owner.is_same(s.me)
    assert seen is None or seen.beat is None or seen.beat.is_tombstone or seen.beat.epoch != owner.epoch


@given(situations, situations)
def test_what_a_worker_sees_of_others_never_ends_a_job(one: Situation, other: Situation) -> None:
    """Only the log and the clock end jobs: ends do not depend on heartbeats, room or what runs here."""
    ends = {Action.ACK, Action.FAIL_DEADLINE, Action.EXPIRE_QUEUED}
    mixed = msgspec.structs.replace(
        one, owner_seen=other.owner_seen, fits=other.fits, is_running_here=other.is_running_here
    )
    first, second = decide(one).action, decide(mixed).action
    assert (first in ends or second in ends) <= (first is second)


class TestStaleReadOfTheOwnersKey:
    """A follower may answer with what the key held before the owner claimed; that says nothing about the owner."""

    def test_of_an_older_epoch(self) -> None:
        state = log(event("accepted"), started(OTHER))
        older = beat(epoch="long-ago", revision=OTHER.beat - 1)
        assert decide(situation(state, owner_seen=older)) == Decision(Action.DROP)

    def test_of_an_expiry_marker(self) -> None:
        state = log(event("accepted"), started(OTHER))
        marker = SeenBeat(revision=OTHER.beat - 1, beat=None)
        assert decide(situation(state, owner_seen=marker)) == Decision(Action.DROP)
