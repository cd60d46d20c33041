"""What a worker reads of its jobs' logs: how much before a claim, how much at a time, and what a hole does."""

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import BrokerUnavailableError
from headrace.schemas import events
from headrace.schemas.events import AcceptedBody, Event, Owner
from headrace.worker import reading
from headrace.worker.reading import LogReader

FIRST, SECOND = (Owner(worker=name, epoch="e", queue_sequence=7) for name in "ab")
WITHIN_S = 10.0


def job(name: str) -> Any:
    return SimpleNamespace(tenant="t", job=name, model="m", body_hash="h")


def stored(*written: Event) -> list[Event]:
    """As a log has them."""
    return [
        msgspec.structs.replace(event, sequence=10 * number, last_sequence=10 * (number - 1))
        for number, event in enumerate(written, start=1)
    ]


def accepted(name: str) -> Event:
    return events.accepted(name, AcceptedBody(job=name, sequence=7, model="m"), body_hash="h")


def lost_once(name: str, num_tokens: int) -> list[Event]:
    """The log of a job whose first worker died after so many tokens."""
    return stored(
        accepted(name),
        events.started(name, FIRST, attempt=1, offset=0, body_hash="h"),
        *(
            events.delta(name, FIRST, attempt=1, offset=offset, count=1, data=b"{}")
            for offset in range(num_tokens)
        ),
        events.requeued(
            name, attempt=2, offset=num_tokens, reason="worker_lost", lost=FIRST, model="m", queue_sequence=7
        ),
    )  # fmt: skip


class Logs:
    """Job logs that note how they are read; a whole one takes a turn of the loop, or lasts until `gate` is set."""

    def __init__(self, logs: dict[str, list[Event]]) -> None:
        self.logs = logs
        self.looks: list[list[str]] = []
        self.whole: list[str] = []
        self.under_way: list[str] = []
        self.most_under_way: list[list[str]] = []
        self.gate: asyncio.Event | None = None
        self.failure: Exception | None = None

    async def last(self, _tenant: str, name: str) -> Event | None:
        self.looks.append([name])
        return self._last(name)

    async def last_of(self, jobs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Event]:
        names = [name for _, name in jobs]
        self.looks.append(names)
        return {("t", name): last for name in names if (last := self._last(name)) is not None}

    def stream_of(self, _name: str) -> str:
        return "log"

    async def read(self, _tenant: str, name: str) -> list[Event]:
        self.whole.append(name)
        self.under_way.append(name)
        self.most_under_way.append(list(self.under_way))
        try:
            await (self.gate.wait() if self.gate is not None else asyncio.sleep(0))
            return list(self.logs[name])
        finally:
            self.under_way.remove(name)

    def _last(self, name: str) -> Event | None:
        if self.failure is not None:
            raise self.failure
        return self.logs[name][-1] if self.logs[name] else None


def reader_of(logs: Logs) -> LogReader:
    return LogReader(logs, retry_for_s=WITHIN_S)  # type: ignore[arg-type]


def claim(log: list[Event]) -> Event:
    """Our `started` after it."""
    last = log[-1]
    started = events.started(last.job, SECOND, attempt=last.attempt, offset=last.offset, body_hash="h")
    return msgspec.structs.replace(started, sequence=last.sequence + 10, last_sequence=last.sequence)


async def test_jobs_that_come_together_are_looked_at_by_one_request_and_no_more_is_read() -> None:
    names = [f"j{number}" for number in range(20)]
    logs = Logs({name: lost_once(name, 30) if number % 2 else [] for number, name in enumerate(names)})
    reader = reader_of(logs)
    reads = await asyncio.gather(*(reader.before_claim(job(name), 7) for name in names))
    assert logs.looks == [names]
    assert logs.whole == []
    assert [read.state.attempt for read in reads] == [1, 2] * 10
    assert [read.state.num_tokens for read in reads] == [0, 30] * 10
    assert [read.state.body_hash for read in reads] == ["", "h"] * 10
    assert [read.state.model for read in reads] == ["", "m"] * 10


async def test_more_jobs_than_one_request_may_ask_for_are_looked_at_by_several() -> None:
    names = [f"j{number}" for number in range(600)]
    logs = Logs({name: stored(accepted(name)) for name in names})
    reader = reader_of(logs)
    await asyncio.gather(*(reader.before_claim(job(name), 7) for name in names))
    assert [len(look) for look in logs.looks] == [256, 256, 88]


async def test_a_log_whose_last_event_leaves_something_open_is_read_whole() -> None:
    log = lost_once("j", 3)
    logs = Logs({"j": stored(*log, events.started("j", SECOND, attempt=2, offset=3, body_hash="h"))})
    read = await reader_of(logs).before_claim(job("j"), 7)
    assert logs.whole == ["j"]
    assert read.state.is_whole
    assert read.state.faults == {FIRST.fault_id}


@pytest.mark.parametrize(
    "named",
    [
        {},
        {"model": "m"},
        {"queue_sequence": 7},
        {"model": "m", "queue_sequence": 8},
        {"model": "n", "queue_sequence": 7},
    ],
)
async def test_a_loss_that_names_no_message_or_another_one_is_read_whole(named: dict[str, Any]) -> None:
    """Another message may have another body, and belong to another model; only the whole log tells whose the job is."""
    *before, _ = lost_once("j", 3)
    log = stored(*before, events.requeued("j", attempt=2, offset=3, reason="lost", lost=FIRST, **named))
    logs = Logs({"j": log})
    read = await reader_of(logs).before_claim(job("j"), 7)
    assert logs.whole == ["j"]
    assert read.state.is_whole


async def test_what_was_read_whole_before_the_claim_is_not_read_again() -> None:
    log = stored(*lost_once("j", 3), events.requeued("j", attempt=3, offset=3, reason="drained", lost=None))
    logs = Logs({"j": log})
    reader = reader_of(logs)
    read = await reader.before_claim(job("j"), 7)
    history = await reader.history(job("j"), read.with_claim(claim(log)))
    assert history is not None
    assert history.state.owner == SECOND
    assert logs.whole == ["j"]


async def test_the_history_ends_with_our_claim_whatever_came_after_it() -> None:
    """Were it what another wrote since, we would append behind that, and the broker would take it."""
    log = lost_once("j", 3)
    logs = Logs({"j": log})
    reader = reader_of(logs)
    read = await reader.before_claim(job("j"), 7)
    started = claim(log)
    logs.logs["j"] = stored(*log, started, events.requeued("j", attempt=3, offset=3, reason="lost", lost=SECOND))
    history = await reader.history(job("j"), read.with_claim(started))
    assert history is not None
    assert history.events[-1].kind == "started"
    assert history.state.sequence == started.sequence
    assert history.state.num_tokens == 3
    assert history.is_overtaken


async def test_a_read_that_lacks_only_our_claim_is_enough() -> None:
    """A replica may be behind; the claim itself is known."""
    log = lost_once("j", 3)
    logs = Logs({"j": log})
    reader = reader_of(logs)
    read = await reader.before_claim(job("j"), 7)
    history = await reader.history(job("j"), read.with_claim(claim(log)))
    assert history is not None
    assert history.state.owner == SECOND
    assert not history.is_overtaken


async def test_a_replica_that_stays_behind_is_no_hole_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_HOLE_PAUSE_S", 0.0)
    log = lost_once("j", 3)
    logs = Logs({"j": log})
    reader = reader_of(logs)
    read = await reader.before_claim(job("j"), 7)
    logs.logs["j"] = log[:-1]
    with pytest.raises(BrokerUnavailableError, match="older than our claim"):
        await reader.history(job("j"), read.with_claim(claim(log)))


async def test_a_log_that_cannot_be_read_after_the_claim_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    log = lost_once("j", 3)
    logs = Logs({"j": log})
    reader = reader_of(logs)
    read = await reader.before_claim(job("j"), 7)
    failures = iter([BrokerUnavailableError("a leader change")] * 2)
    read_well = logs.read

    async def read_badly(tenant: str, name: str) -> list[Event]:
        for failure in failures:
            raise failure
        return await read_well(tenant, name)

    monkeypatch.setattr(logs, "read", read_badly)
    history = await reader.history(job("j"), read.with_claim(claim(log)))
    assert history is not None


@pytest.mark.parametrize("num_holed", [0, 3, 50])
async def test_a_hole_is_read_again_for_a_while(num_holed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_HOLE_PAUSE_S", 0.0)
    log = lost_once("j", 5)
    started = claim(log)
    whole = stored(*log, started)
    logs = Logs({"j": log})
    reader = reader_of(logs)
    read = await reader.before_claim(job("j"), 7)
    answers = iter([whole[:3] + whole[4:]] * num_holed + [whole])

    async def read_some(_tenant: str, _name: str) -> list[Event]:
        return next(answers)

    monkeypatch.setattr(logs, "read", read_some)
    history = await reader.history(job("j"), read.with_claim(started))
    assert (history is None) == (num_holed == 50)


@pytest.mark.parametrize("failure", [BrokerUnavailableError("no answer"), ZeroDivisionError("a defect")])
async def test_whoever_waits_for_an_answer_is_told_why_there_is_none(failure: Exception) -> None:
    logs = Logs({"a": [], "b": []})
    logs.failure = failure
    reader = reader_of(logs)
    async with asyncio.timeout(WITHIN_S):
        told = await asyncio.gather(*(reader.before_claim(job(name), 7) for name in "aab"), return_exceptions=True)
    assert told == [failure] * 3


async def test_one_that_is_given_up_takes_nothing_from_the_others() -> None:
    logs = Logs({"a": stored(accepted("a")), "b": stored(accepted("b"))})
    reader = reader_of(logs)
    one, other = (asyncio.create_task(reader.before_claim(job(name), 7)) for name in "ab")
    await asyncio.sleep(0)
    one.cancel()
    async with asyncio.timeout(WITHIN_S):
        assert (await other).state.sequence == 10


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.sets(st.integers(0, 11)))
def test_long_logs_come_a_few_events_at_a_time_and_in_turn(sizes: list[int], given_up: set[int]) -> None:
    logs = Logs({str(number): lost_once(str(number), size) for number, size in enumerate(sizes)})

    async def play() -> list[Any]:
        logs.gate = asyncio.Event()
        reader = reader_of(logs)
        tasks = []
        for name, log in logs.logs.items():
            read = await reader.before_claim(job(name), 7)
            started = claim(log)
            logs.logs[name] = stored(*log, started)
            tasks.append(asyncio.create_task(reader.history(job(name), read.with_claim(started))))
        for _ in range(5):
            await asyncio.sleep(0)
        for number in given_up & set(range(len(sizes))):
            tasks[number].cancel()
        logs.gate.set()
        async with asyncio.timeout(WITHIN_S):
            return await asyncio.gather(*tasks, return_exceptions=True)

    histories = asyncio.run(play())
    for number, history in enumerate(histories):
        if number not in given_up:
            assert history.state.num_tokens == sizes[number]
    assert logs.whole == sorted(logs.whole, key=int)
    for together in logs.most_under_way:
        assert len(together) == 1 or sum(sizes[int(name)] for name in together) <= reading._MAX_EVENTS
