"""Table W2: what a refused or unanswered append means, row by row, and the loop that follows the table.

The log is scripted, and time passes only where the loop pauses or the log takes its time.
"""

from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bus.connection import (
    ERR_STREAM_FULL,
    ERR_TOO_LARGE,
    ERR_WRONG_LAST_SEQUENCE,
    Refused,
    Stored,
    StoreResult,
    Unknown,
)
from headrace.bus.joblog import JobLog
from headrace.errors import BrokerUnavailableError, NotProvisionedError
from headrace.schemas import events
from headrace.schemas.events import Event, Owner
from headrace.worker import appending
from headrace.worker.appending import Appended, Ended, Fenced, LogWriter, TooLarge, Verdict, judge

ME = Owner(worker="me", epoch="e", queue_sequence=7)
ZOMBIE = Owner(worker="me", epoch="earlier", queue_sequence=7)
OTHER = Owner(worker="other", epoch="o", queue_sequence=7)
LOST_RACE = Refused(ERR_WRONG_LAST_SEQUENCE, "wrong last sequence")
NO_ANSWER = Unknown("no answer")
RETRY_FOR_S = 15.0


def delta(offset: int, *, owner: Owner = ME, count: int = 1, attempt: int = 1, sequence: int = 0) -> Event:
    event = events.delta("j", owner, attempt=attempt, offset=offset, count=count, data=b"{}")
    return msgspec.structs.replace(event, sequence=sequence)


def at(event: Event, sequence: int) -> Event:
    return msgspec.structs.replace(event, sequence=sequence)


STARTED = at(events.started("j", ME, attempt=1, offset=0, body_hash=""), 20)
CANCELLED = at(events.ended("cancelled", "j", attempt=1, offset=0, error=None), 30)
REQUEUED = at(events.requeued("j", attempt=2, offset=0, reason="lost", lost=ME), 30)


class TestJudge:
    """`expected` is 20 throughout: the sequence of my last acknowledged event."""

    @pytest.mark.parametrize("last", [None, delta(0, sequence=19), at(CANCELLED, 19)])
    def test_older_than_my_last_acknowledged_is_a_stale_read(self, last: Event | None) -> None:
        assert judge(delta(5), expected=20, last=last) is Verdict.READ_AGAIN

    def test_my_last_acknowledged_means_not_stored(self) -> None:
        assert judge(delta(5), expected=20, last=delta(4, sequence=20)) is Verdict.REPEAT

    def test_nothing_where_nothing_was_means_not_stored(self) -> None:
        assert judge(delta(0), expected=0, last=None) is Verdict.REPEAT

    def test_mine_means_stored(self) -> None:
        assert judge(delta(5, count=2), expected=20, last=delta(5, count=2, sequence=21)) is Verdict.STORED

    def test_my_own_end_means_stored(self) -> None:
        done = events.done("j", ME, attempt=1, offset=5, data=b"{}", body_hash="")
        assert judge(done, expected=20, last=at(done, 21)) is Verdict.STORED

    @pytest.mark.parametrize("kind", ["failed", "cancelled", "expired"])
    def test_an_end_of_somebody_else_ends_it(self, kind: Any) -> None:
        last = at(events.ended(kind, "j", attempt=1, offset=5, error=None), 21)
        assert judge(delta(5), expected=20, last=last) is Verdict.ENDED

    @pytest.mark.parametrize(
        "last",
        [
            delta(5, owner=OTHER, sequence=21),
            delta(5, owner=ZOMBIE, sequence=21),
            delta(5, attempt=2, sequence=21),
            delta(4, sequence=21),
            delta(5, count=2, sequence=21),
            at(REQUEUED, 21),
            at(STARTED, 21),
        ],
        ids=["worker", "epoch", "attempt", "offset", "count", "requeued", "started"],
    )
    def test_anything_else_is_a_fence(self, last: Event) -> None:
        assert judge(delta(5), expected=20, last=last) is Verdict.FENCED

    def test_my_claim_for_another_message_is_a_fence(self) -> None:
        """One worker may hold two messages of a job; only the claim that won may run."""
        other = events.started("j", msgspec.structs.replace(ME, queue_sequence=8), attempt=1, offset=0, body_hash="")
        assert judge(other, expected=0, last=STARTED) is Verdict.FENCED

    @given(st.integers(0, 30), st.integers(1, 30), st.sampled_from([delta(5), CANCELLED, REQUEUED, STARTED]))
    def test_never_stored_by_what_was_there_before(self, expected: int, sequence: int, last: Event) -> None:
        verdict = judge(delta(5), expected=expected, last=at(last, sequence))
        if verdict in (Verdict.STORED, Verdict.ENDED, Verdict.FENCED):
            assert sequence > expected


class Clock:
    """Time that passes only by `advance`."""

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, seconds: float) -> None:
        self.now += seconds


class FakeBackoff:
    """`lifecycle.Backoff` on a `Clock`."""

    clock = Clock()

    def __init__(self, *, first_s: float, max_s: float, for_s: float) -> None:
        self._next_s, self._max_s, self._until = first_s, max_s, self.clock.now + for_s

    @property
    def is_over(self) -> bool:
        return self.clock.now >= self._until

    async def pause(self) -> None:
        self.clock.advance(self._next_s)
        self._next_s = min(self._next_s * 2, self._max_s)


Answer = StoreResult | Event | Exception | None


class ScriptedLog:
    """Answers appends and reads as told; the last answer of a script repeats."""

    def __init__(self, *, appends: list[StoreResult], reads: list[Event | Exception | None]) -> None:
        self._appends, self._reads = appends, reads
        self.sent: list[tuple[Event, int]] = []
        self.num_reads = 0
        self.takes_s = 0.0

    async def append(self, tenant: str, event: Event, *, expected: int, ttl_s: float) -> StoreResult:
        assert (tenant, ttl_s) == ("default", 60.0)
        FakeBackoff.clock.advance(self.takes_s)
        self.sent.append((event, expected))
        return self._appends.pop(0) if len(self._appends) > 1 else self._appends[0]

    async def last(self, tenant: str, job: str) -> Event | None:
        assert (tenant, job) == ("default", "j")
        self.num_reads += 1
        answer = self._reads.pop(0) if len(self._reads) > 1 else self._reads[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fresh = Clock()
    monkeypatch.setattr(FakeBackoff, "clock", fresh)
    monkeypatch.setattr(appending, "Backoff", FakeBackoff)
    return fresh


def writer(log: ScriptedLog, *, sequence: int = 20) -> LogWriter:
    return LogWriter(cast(JobLog, log), "default", sequence=sequence, ttl_s=60.0, retry_for_s=RETRY_FOR_S)


pytestmark = pytest.mark.usefixtures("clock")
UNREAD: list[Event | Exception | None] = [AssertionError("no read is due")]


async def test_each_append_expects_the_one_before() -> None:
    log = ScriptedLog(appends=[Stored(21), Stored(25)], reads=UNREAD)
    writing = writer(log)
    assert await writing.append(delta(0)) == Appended(21)
    assert await writing.append(delta(1)) == Appended(25)
    assert [expected for _, expected in log.sent] == [20, 21]
    assert writing.sequence == 25


@pytest.mark.parametrize("result", [NO_ANSWER, LOST_RACE, Unknown("nobody listens", is_unserved=True)])
async def test_stored_although_its_ack_was_lost(result: StoreResult) -> None:
    log = ScriptedLog(appends=[result, Stored(23)], reads=[delta(0, sequence=22)])
    writing = writer(log)
    assert await writing.append(delta(0)) == Appended(22)
    assert await writing.append(delta(1)) == Appended(23)
    assert [expected for _, expected in log.sent] == [20, 22]


@pytest.mark.parametrize("result", [NO_ANSWER, LOST_RACE])
async def test_not_stored_is_repeated_identically(result: StoreResult, clock: Clock) -> None:
    log = ScriptedLog(appends=[result, result, Stored(21)], reads=[at(STARTED, 20)])
    event = delta(0)
    assert await writer(log).append(event) == Appended(21)
    assert log.sent == [(event, 20)] * 3
    assert 0 < clock.now < 0.1


async def test_repeated_and_the_first_try_was_stored_after_all() -> None:
    """The append that got no answer arrives at the broker behind the read that did not show it."""
    log = ScriptedLog(appends=[NO_ANSWER, LOST_RACE], reads=[STARTED, delta(0, sequence=21)])
    assert await writer(log).append(delta(0)) == Appended(21)
    assert len(log.sent) == 2


async def test_a_stale_read_is_read_again_and_nothing_is_written_meanwhile() -> None:
    stale: list[Event | Exception | None] = [None, at(STARTED, 18), delta(0, sequence=21)]
    log = ScriptedLog(appends=[NO_ANSWER], reads=stale)
    assert await writer(log).append(delta(0)) == Appended(21)
    assert (len(log.sent), log.num_reads) == (1, 3)


@pytest.mark.parametrize("old", [None, at(STARTED, 18)])
async def test_a_read_that_stays_stale_is_a_fence_after_two_seconds(old: Event | None, clock: Clock) -> None:
    log = ScriptedLog(appends=[LOST_RACE], reads=[old])
    writing = writer(log)
    result = await writing.append(delta(0))
    assert result == Fenced("the log is older than what was acknowledged")
    assert 2 <= clock.now < 3
    assert (len(log.sent), writing.sequence) == (1, 20)


async def test_the_end_by_somebody_else_is_reported_with_its_event() -> None:
    log = ScriptedLog(appends=[LOST_RACE], reads=[CANCELLED])
    assert await writer(log).append(delta(0)) == Ended(CANCELLED)


@pytest.mark.parametrize("last", [REQUEUED, delta(0, owner=OTHER, attempt=2, sequence=31)])
async def test_another_attempt_fences(last: Event, clock: Clock) -> None:
    log = ScriptedLog(appends=[LOST_RACE], reads=[last])
    assert await writer(log).append(delta(0)) == Fenced("another attempt owns the job")
    assert (len(log.sent), log.num_reads, clock.now) == (1, 1, 0.0)


@pytest.mark.parametrize("error", [BrokerUnavailableError("status 503"), NotProvisionedError("nobody answers")])
async def test_a_leader_that_is_away_is_waited_for(error: Exception, clock: Clock) -> None:
    away: list[Event | Exception | None] = [error] * 12
    log = ScriptedLog(appends=[Unknown("nobody", is_unserved=True), Stored(21)], reads=[*away, STARTED])
    assert await writer(log).append(delta(0)) == Appended(21)
    assert 2 < clock.now < RETRY_FOR_S


async def test_a_leader_that_stays_away_is_given_up_in_time(clock: Clock) -> None:
    log = ScriptedLog(appends=[NO_ANSWER], reads=[BrokerUnavailableError("nobody answers")])
    assert isinstance(await writer(log).append(delta(0)), Fenced)
    assert RETRY_FOR_S <= clock.now < RETRY_FOR_S + 1


async def test_no_clear_answer_is_given_up_in_time(clock: Clock) -> None:
    log = ScriptedLog(appends=[NO_ANSWER], reads=[STARTED])
    log.takes_s = 2.0
    assert await writer(log).append(delta(0)) == Fenced("the broker gave no clear answer in time")
    assert RETRY_FOR_S <= clock.now < RETRY_FOR_S + 3
    assert 2 <= len(log.sent) <= 8


async def test_an_event_the_broker_can_never_take_is_given_up_at_once() -> None:
    log = ScriptedLog(appends=[Refused(ERR_TOO_LARGE, "message too large")], reads=UNREAD)
    assert await writer(log).append(delta(0)) == TooLarge("message too large")


async def test_a_refusal_that_may_pass_is_repeated() -> None:
    last = at(delta(0), 7)
    log = ScriptedLog(appends=[Refused(ERR_STREAM_FULL, "maximum bytes exceeded"), Stored(8)], reads=[last])
    assert await writer(log, sequence=7).append(delta(1)) == Appended(8)


async def test_a_claim_on_an_empty_log_that_somebody_won() -> None:
    claim = events.started("j", ME, attempt=1, offset=0, body_hash="")
    winner = at(events.started("j", OTHER, attempt=1, offset=0, body_hash=""), 4)
    log = ScriptedLog(appends=[LOST_RACE], reads=[None, winner])
    assert await writer(log, sequence=0).append(claim) == Fenced("another attempt owns the job")


class TrueLog:
    """One job's log as the broker keeps it, with faults drawn from a script: acks lost, reads a little old."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw
        self.events: list[Event] = [STARTED]

    def put(self, event: Event, expected: int) -> bool:
        if self.events[-1].sequence != expected:
            return False
        self.events.append(at(event, self.events[-1].sequence + 1))
        return True

    async def append(self, tenant: str, event: Event, *, expected: int, ttl_s: float) -> StoreResult:
        fault = self._draw(st.sampled_from(["none", "none", "not sent", "ack lost"]))
        if fault == "not sent" or not self.put(event, expected):
            return NO_ANSWER if fault != "none" else LOST_RACE
        return NO_ANSWER if fault == "ack lost" else Stored(self.events[-1].sequence)

    async def last(self, tenant: str, job: str) -> Event | None:
        age = self._draw(st.sampled_from([0, 0, 0, 1, 2]))
        return self.events[-1 - age] if age < len(self.events) else None


@given(st.data())
async def test_whatever_is_lost_no_delta_is_doubled_or_missing(data: st.DataObject) -> None:
    """Appended means stored once, in order; anything else only after somebody else wrote or time ran out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeBackoff, "clock", Clock())
        patch.setattr(appending, "Backoff", FakeBackoff)
        log = TrueLog(data.draw)
        writing = LogWriter(cast(JobLog, log), "default", sequence=20, ttl_s=60.0, retry_for_s=RETRY_FOR_S)
        intruder: Event | None = data.draw(st.sampled_from([None, CANCELLED, REQUEUED]))
        comes_before = data.draw(st.integers(0, 5))
        written = 0
        result: Appended | Ended | Fenced | TooLarge = Appended(20)
        for offset in range(6):
            if intruder is not None and offset == comes_before:
                log.put(intruder, log.events[-1].sequence)
            result = await writing.append(delta(offset))
            if not isinstance(result, Appended):
                break
            written += 1
        deltas = [event.offset for event in log.events if event.kind == "delta"]
        assert deltas == list(range(len(deltas)))
        assert len(deltas) - written in (0, 1)
        if intruder is None:
            assert written == 6 or isinstance(result, Fenced)
        else:
            assert written == comes_before
            assert isinstance(result, Ended if intruder is CANCELLED else Fenced)
