"""Many claimers of one job against the real server: exactly one wins, whatever order the appends arrive in."""

import asyncio
import secrets

import msgspec
import pytest

from headrace.bus.connection import Bus, Stored, StoreResult, Unknown, connect
from headrace.bus.joblog import JobLog
from headrace.schemas import events
from headrace.schemas.events import AcceptedBody, Event, Owner
from headrace.schemas.states import fold
from headrace.worker.appending import Appended, Ended, Fenced, LogWriter, TooLarge

NUM_CLAIMERS = 8
TTL_S = 600.0


def claim(number: int, *, attempt: int = 1, worker: str | None = None, offset: int = 0) -> Event:
    owner = Owner(worker=worker or f"w{number}", epoch="e", queue_sequence=number)
    return events.started("j", owner, attempt=attempt, offset=offset, body_hash="h")


def delta(event: Event, offset: int) -> Event:
    assert event.owner is not None
    return events.delta("j", event.owner, attempt=event.attempt, offset=offset, count=1, data=b"{}")


def writer(log: JobLog, sequence: int) -> LogWriter:
    return LogWriter(log, "default", sequence=sequence, ttl_s=TTL_S, retry_for_s=15)


async def accept(log: JobLog) -> int:
    body = AcceptedBody(job="j", sequence=1)
    result = await log.append("default", events.accepted("j", body, body_hash="h"), expected=0, ttl_s=TTL_S)
    assert isinstance(result, Stored)
    return result.sequence


async def race(writers: list[LogWriter], claims: list[Event]) -> list[Appended | Ended | Fenced | TooLarge]:
    return await asyncio.gather(*(one.append(event) for one, event in zip(writers, claims, strict=True)))


@pytest.mark.parametrize("is_accepted", [True, False], ids=["accepted", "empty"])
async def test_one_of_many_claims_wins(bus: Bus, is_accepted: bool) -> None:
    log = JobLog(bus)
    expected = await accept(log) if is_accepted else 0
    writers = [writer(log, expected) for _ in range(NUM_CLAIMERS)]
    claims = [claim(number) for number in range(NUM_CLAIMERS)]
    results = await race(writers, claims)
    (won,) = [number for number, result in enumerate(results) if isinstance(result, Appended)]
    assert all(isinstance(result, Fenced) for number, result in enumerate(results) if number != won)
    told = await log.state("default", "j")
    assert told.owner == claims[won].owner
    # The winner goes on; the others stay out.
    assert isinstance(await writers[won].append(delta(claims[won], 0)), Appended)
    for number in range(NUM_CLAIMERS):
        if number != won:
            assert isinstance(await writers[number].append(delta(claims[number], 0)), Fenced)
    assert (await log.state("default", "j")).num_tokens == 1


async def test_one_worker_with_several_messages_of_a_job_claims_once(bus: Bus) -> None:
    """Same worker, epoch, attempt and offset: only the message tells the claims apart."""
    log = JobLog(bus)
    expected = await accept(log)
    claims = [claim(number, worker="w") for number in range(NUM_CLAIMERS)]
    results = await race([writer(log, expected) for _ in claims], claims)
    assert sum(isinstance(result, Appended) for result in results) == 1


async def test_claimers_on_connections_of_their_own(broker_url: str, bus: Bus) -> None:
    log = JobLog(bus)
    async with (
        connect(broker_url, bus.settings, name="one") as one,
        connect(broker_url, bus.settings, name="other") as other,
    ):
        for _ in range(10):
            job = secrets.token_hex(4)
            claims = [msgspec.structs.replace(claim(number), job=job) for number in range(2)]
            writers = [writer(JobLog(connection), 0) for connection in (one, other)]
            results = await race(writers, claims)
            assert sorted(type(result).__name__ for result in results) == ["Appended", "Fenced"]
            assert len(await log.read("default", job)) == 1


class LosesAcks(JobLog):
    """A log whose appends are stored, or not, and never answered the first time."""

    def __init__(self, bus: Bus, *, is_stored: bool) -> None:
        super().__init__(bus)
        self._is_stored = is_stored
        self._is_first = True

    async def append(self, tenant: str, event: Event, *, expected: int, ttl_s: float) -> StoreResult:
        is_first, self._is_first = self._is_first, False
        if is_first and not self._is_stored:
            return Unknown("not sent")
        result = await super().append(tenant, event, expected=expected, ttl_s=ttl_s)
        return Unknown("its answer was lost") if is_first else result


@pytest.mark.parametrize("is_stored", [True, False])
async def test_one_wins_though_acks_are_lost(bus: Bus, is_stored: bool) -> None:
    expected = await accept(JobLog(bus))
    claims = [claim(number) for number in range(NUM_CLAIMERS)]
    writers = [writer(LosesAcks(bus, is_stored=is_stored), expected) for _ in claims]
    results = await race(writers, claims)
    (won,) = [number for number, result in enumerate(results) if isinstance(result, Appended)]
    (_, stored) = await JobLog(bus).read("default", "j")
    assert stored.owner == claims[won].owner
    assert writers[won].sequence == stored.sequence


async def test_a_zombie_is_refused_at_its_first_write_after_it_was_requeued(bus: Bus) -> None:
    log = JobLog(bus)
    first, second = claim(1), claim(2, attempt=2, offset=1)
    zombie = writer(log, await accept(log))
    assert isinstance(await zombie.append(first), Appended)
    assert isinstance(await zombie.append(delta(first, 0)), Appended)
    heir = writer(log, zombie.sequence)
    back = events.requeued("j", attempt=2, offset=1, reason="lost", lost=first.owner)
    assert isinstance(await heir.append(back), Appended)
    assert isinstance(await zombie.append(delta(first, 1)), Fenced)
    assert isinstance(await heir.append(second), Appended)
    assert isinstance(await zombie.append(delta(first, 1)), Fenced)
    results = await asyncio.gather(zombie.append(delta(first, 1)), heir.append(delta(second, 1)))
    assert [type(result) for result in results] == [Fenced, Appended]
    told = fold(await log.read("default", "j"))
    assert (told.num_tokens, told.is_whole, told.attempt, told.faults) == (2, True, 2, frozenset({"w1/e/0"}))


async def test_one_end_of_many_is_the_end(bus: Bus) -> None:
    log = JobLog(bus)
    runner = writer(log, await accept(log))
    started = claim(1)
    assert isinstance(await runner.append(started), Appended)
    assert started.owner is not None
    ends = [
        events.done("j", started.owner, attempt=1, offset=0, data=b"{}", body_hash="h"),
        *(
            events.ended(kind, "j", attempt=1, offset=0, error=None, owner=Owner(worker=kind, epoch="x"))
            for kind in ("failed", "cancelled", "expired")
        ),
    ]
    results = await race([writer(log, runner.sequence) for _ in ends], list(ends))
    (won,) = [number for number, result in enumerate(results) if isinstance(result, Appended)]
    last = await log.last_from_leader("default", "j")
    assert last is not None
    assert last.kind == ends[won].kind
    losers = [result for number, result in enumerate(results) if number != won]
    assert losers == [Ended(last)] * 3
