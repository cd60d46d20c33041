"""The job log against the real server: compare-and-set, reads, republish, delivery, expiry."""

import asyncio
from typing import Any

import msgspec
import pytest
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from headrace.bus import connection
from headrace.bus.batchget import batch_get
from headrace.bus.connection import Bus, Refused, Stored, connect
from headrace.bus.joblog import JobLog, event_of_delivery, event_of_republish, stream_sequence
from headrace.errors import BrokerUnavailableError
from headrace.schemas import events
from headrace.schemas.events import AcceptedBody, Event, Owner
from headrace.schemas.states import JobState, fold
from headrace.settings import Settings
from headrace.worker.appending import Appended, LogWriter
from tests.deployment import until
from tests.faults.link import Link

OWNER = Owner(worker="w", epoch="e", queue_sequence=1)
TTL_S = 600.0
WITHIN_S = 30.0


def accepted(job: str = "j") -> Event:
    return events.accepted(job, AcceptedBody(job=job, sequence=1), body_hash="h")


def started(job: str = "j") -> Event:
    return events.started(job, OWNER, attempt=1, offset=0, body_hash="h")


def delta(offset: int, job: str = "j") -> Event:
    return events.delta(job, OWNER, attempt=1, offset=offset, count=1, data=b'{"n":%d}' % offset)


def done(offset: int, job: str = "j") -> Event:
    return events.done(job, OWNER, attempt=1, offset=offset, data=b'{"object":"x"}', body_hash="h")


async def write(log: JobLog, *what: Event) -> list[int]:
    """Append in order to the empty log of a job; returns the sequences."""
    sequences = [0]
    for event in what:
        result = await log.append("default", event, expected=sequences[-1], ttl_s=TTL_S)
        assert isinstance(result, Stored)
        sequences.append(result.sequence)
    return sequences[1:]


async def next_events(subscription: Subscription, number: int, *, of: Any) -> list[Event]:
    found: list[Event] = []
    while len(found) < number:
        event = of(await subscription.next_msg(WITHIN_S))
        if event is not None:
            found.append(event)
    return found


async def raw(bus: Bus, job: str = "j") -> list[dict[str, str]]:
    """Headers of a job's stored messages."""
    messages = await batch_get(bus, bus.names.log_stream(0), bus.names.log("default", job), from_sequence=1)
    return [dict(message.headers or {}) for message in messages]


async def test_appends_form_one_chain(bus: Bus) -> None:
    log = JobLog(bus)
    sequences = await write(log, accepted(), started(), delta(0), delta(1), done(2))
    read = await log.read("default", "j")
    assert [event.sequence for event in read] == sequences
    assert [event.last_sequence for event in read] == [0, *sequences[:-1]]
    assert [event.kind for event in read] == ["accepted", "started", "delta", "delta", "done"]
    assert read[1].owner == OWNER
    told = await log.state("default", "j")
    assert (told.state, told.num_tokens, told.is_whole, told.sequence) == ("done", 2, True, sequences[-1])


async def test_many_messages_are_read_within_bounds(bus: Bus) -> None:
    log = JobLog(bus)
    sequences = await write(log, accepted(), started(), *(delta(offset) for offset in range(8)))

    async def read(from_sequence: int, **bounds: int) -> list[int]:
        messages = await batch_get(
            bus, bus.names.log_stream(0), bus.names.log("default", "j"), from_sequence=from_sequence, **bounds
        )
        return [int((message.headers or {})["Nats-Sequence"]) for message in messages]

    assert await read(1) == sequences
    assert await read(1, limit=3) == sequences[:3]
    assert await read(sequences[2], up_to=sequences[5]) == sequences[2:6]
    assert await read(sequences[2], up_to=sequences[5], limit=2) == sequences[2:4]
    assert await read(sequences[5], up_to=sequences[2]) == []
    assert await read(1, limit=0) == []
    assert await read(sequences[-1] + 1) == []


async def test_a_lost_race_is_a_value_and_changes_nothing(bus: Bus) -> None:
    log = JobLog(bus)
    first, second = await write(log, accepted(), started())
    for expected in (0, first, second + 1):
        result = await log.append("default", delta(0), expected=expected, ttl_s=TTL_S)
        assert isinstance(result, Refused)
        assert result.is_lost_race
        assert not result.is_full
    assert (await log.state("default", "j")).sequence == second


async def test_other_jobs_do_not_disturb_a_chain(bus: Bus) -> None:
    log = JobLog(bus)
    first, *_ = await write(log, started())
    await write(log, started("k"), delta(0, "k"))
    result = await log.append("default", delta(0), expected=first, ttl_s=TTL_S)
    assert isinstance(result, Stored)
    assert fold(await log.read("default", "j")).is_whole
    result = await log.append("other", started(), expected=0, ttl_s=TTL_S)  # the same id of another tenant
    assert isinstance(result, Stored)


async def test_a_missing_stream_is_an_unknown_outcome(bus: Bus) -> None:
    nowhere = msgspec.structs.replace(bus.settings, prefix="nowhere.v1")
    result = await JobLog(Bus(bus.nc, nowhere)).append("default", started(), expected=0, ttl_s=TTL_S)
    assert result == msgspec.structs.replace(result, is_unserved=True)


async def test_last_by_either_way(bus: Bus) -> None:
    log = JobLog(bus)
    assert await log.last("default", "j") is None
    assert await log.last_from_leader("default", "j") is None
    assert await log.read("default", "j") == []
    assert await log.state("default", "j") == JobState()
    sequences = await write(log, accepted(), started(), delta(0))
    last = await log.last("default", "j")
    assert last is not None
    assert last == await log.last_from_leader("default", "j")
    assert (last.kind, last.sequence, last.last_sequence) == ("delta", sequences[2], sequences[1])
    assert last.data == b'{"n":0}'


async def test_read_from_a_place(bus: Bus) -> None:
    log = JobLog(bus)
    sequences = await write(log, started(), *(delta(offset) for offset in range(5)))
    read = await log.read("default", "j", from_sequence=sequences[3])
    assert [event.offset for event in read] == [2, 3, 4]
    assert read[0].last_sequence == sequences[2]
    assert not fold(read).is_whole


async def test_a_log_longer_than_one_answer_of_the_broker_is_whole(bus: Bus) -> None:
    log, sequence = JobLog(bus), (await write(JobLog(bus), started()))[0]
    writer = LogWriter(log, "default", sequence=sequence, ttl_s=TTL_S, retry_for_s=15)
    for offset in range(2100):
        assert isinstance(await writer.append(delta(offset)), Appended)
    told = await log.state("default", "j")
    assert (told.num_tokens, told.is_whole, told.sequence) == (2100, True, writer.sequence)


async def test_republish_says_place_and_predecessor(bus: Bus) -> None:
    log = JobLog(bus)
    inbox = await bus.subscribe(bus.names.job_inbox("default", "j"))
    await bus.nc.flush()
    sequences = await write(log, started(), delta(0))
    await write(log, started("k"))
    sequences += [await put(log, delta(1), sequences[-1])]
    refused = await log.append("default", delta(9), expected=0, ttl_s=TTL_S)
    assert isinstance(refused, Refused)
    sequences += [await put(log, done(2), sequences[-1])]
    messages = [await inbox.next_msg(WITHIN_S) for _ in range(4)]
    headers = [message.headers or {} for message in messages]
    assert [int(one["Nats-Sequence"]) for one in headers] == sequences
    assert [int(one["Nats-Last-Sequence"]) for one in headers] == [0, *sequences[:-1]]
    heard = [event_of_republish(message) for message in messages]
    assert heard == await log.read("default", "j")  # and nothing of the refused append


async def put(log: JobLog, event: Event, expected: int) -> int:
    result = await log.append("default", event, expected=expected, ttl_s=TTL_S)
    assert isinstance(result, Stored)
    return result.sequence


async def test_delivery_sends_what_was_and_what_comes(bus: Bus) -> None:
    log = JobLog(bus)
    inbox = bus.new_inbox()
    subscription = await bus.subscribe(inbox)
    sequences = await write(log, accepted(), started(), delta(0))
    delivery = await log.deliver("default", "j", inbox)
    assert (delivery.num_stored, delivery.is_bound) == (3, True)
    await put(log, done(1), sequences[-1])
    await write(log, started("k"))
    got = await next_events(subscription, 4, of=event_of_delivery)
    assert got == await log.read("default", "j")
    await log.stop_delivery("j", delivery.name)
    await log.stop_delivery("j", delivery.name)  # gone already: fine
    assert subscription.pending_msgs == 0


async def test_delivery_from_a_place(bus: Bus) -> None:
    log = JobLog(bus)
    inbox = bus.new_inbox()
    subscription = await bus.subscribe(inbox)
    sequences = await write(log, started(), delta(0), delta(1))
    delivery = await log.deliver("default", "j", inbox, from_sequence=sequences[2])
    assert (delivery.num_stored, delivery.is_bound) == (1, True)
    (only,) = await next_events(subscription, 1, of=event_of_delivery)
    assert only.offset == 1


@pytest.mark.parametrize(
    "reply",
    ["", "_INBOX.x", "$JS.ACK.s.c.1.2.3.4", "$JS.ACK.s.c.1.x.3.4.5", "$JS.ACK.s.c.1.².3.4.5", "$JS.NAK.s.c.1.2.3.4.5"],
)
def test_messages_of_no_consumer_have_no_sequence(reply: str) -> None:
    message = Msg(_client=None, subject="s", reply=reply, data=b"", headers={"Headrace-Event": "done"})  # type: ignore[arg-type]
    assert stream_sequence(message) is None
    assert event_of_delivery(message) is None
    assert event_of_republish(message) is None


async def test_a_terminal_append_is_announced(bus: Bus) -> None:
    notices = await bus.subscribe(bus.names.ended("default", "*"))
    await bus.nc.flush()
    await write(JobLog(bus), started(), done(0))
    assert (await notices.next_msg(WITHIN_S)).subject == bus.names.ended("default", "j")


async def test_purge_keeps_the_last_event_and_the_fence(bus: Bus) -> None:
    log = JobLog(bus)
    sequences = await write(log, started(), delta(0), delta(1), done(2))
    await write(log, started("k"))
    await log.purge_to_last("default", "j")
    (only,) = await log.read("default", "j")
    assert (only.kind, only.sequence, only.last_sequence) == ("done", sequences[-1], sequences[-2])
    assert not fold([only]).is_whole
    for expected in (0, sequences[0], sequences[-2]):
        result = await log.append("default", delta(2), expected=expected, ttl_s=TTL_S)
        assert isinstance(result, Refused)
    assert len(await log.read("default", "k")) == 1


async def test_every_event_carries_the_same_time_to_live_in_whole_seconds(bus: Bus) -> None:
    log = JobLog(bus)
    sequence = 0
    for event in (accepted(), started(), delta(0), done(1)):
        result = await log.append("default", event, expected=sequence, ttl_s=99.2)
        assert isinstance(result, Stored)
        sequence = result.sequence
    assert [headers["Nats-TTL"] for headers in await raw(bus)] == ["100"] * 4


async def test_no_event_expires_before_an_earlier_one(bus: Bus) -> None:
    """Else the earlier sequence would be the expected one again, and a zombie's append accepted."""
    log = JobLog(bus)
    sequences: list[int] = []
    for event in (started(), delta(0), delta(1), delta(2)):
        result = await log.append("default", event, expected=sequences[-1] if sequences else 0, ttl_s=1)
        assert isinstance(result, Stored)
        sequences.append(result.sequence)
        await asyncio.sleep(0.35)  # so that they expire one after another
    seen: set[int] = set()
    async with asyncio.timeout(WITHIN_S):
        while left := [event.sequence for event in await log.read("default", "j")]:
            assert left == sequences[-len(left) :]
            for expected in sequences[: -len(left)]:
                assert isinstance(await log.append("default", delta(3), expected=expected, ttl_s=1), Refused)
            seen.add(len(left))
    assert len(seen) > 1
    assert await log.state("default", "j") == JobState()


async def test_an_event_larger_than_the_broker_takes_is_refused_and_the_connection_lives(bus: Bus) -> None:
    log = JobLog(bus)
    huge = events.delta("j", OWNER, attempt=1, offset=0, count=1, data=b"x" * bus.nc.max_payload)
    result = await log.append("default", huge, expected=0, ttl_s=TTL_S)
    assert isinstance(result, Refused)
    assert not result.is_lost_race
    largest = msgspec.structs.replace(huge, data=b"x" * bus.max_data_bytes)
    await put(log, largest, 0)
    assert bus.is_connected
    assert not bus.closed.is_set()


async def test_a_closed_connection_raises_our_errors_and_says_so(broker_url: str, prefix: str) -> None:
    async with connect(broker_url, Settings(prefix=prefix, state_dir="unused"), name="short") as bus:
        log = JobLog(bus)
    await asyncio.wait_for(bus.closed.wait(), WITHIN_S)
    for call in (log.last("default", "j"), log.read("default", "j"), bus.subscribe("x"), bus.publish("x")):
        with pytest.raises(BrokerUnavailableError):
            await call
    await log.announce_end("default", "j")  # a hint only


async def test_no_broker_is_said_with_its_address_and_without_its_password() -> None:
    settings = Settings(state_dir="unused", retry_for_s=0.5)
    with pytest.raises(
        BrokerUnavailableError, match=r"no NATS server answers at nats://127\.0\.0\.1:9: .*failed"
    ) as no:
        async with connect("nats://me:secret@127.0.0.1:9", settings, name="test"):
            pass
    assert "secret" not in str(no.value)
    assert "HEADRACE_NATS_URL" in str(no.value)


async def test_a_broker_that_does_not_answer_is_told_within_a_second(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(state_dir="unused", retry_for_s=60)
    assert connection._SILENT_S < 1

    async def wait_for_ever() -> None:
        async with connect("nats://me:secret@127.0.0.1:9", settings, name="test"):
            pass

    waiting = asyncio.create_task(wait_for_ever())
    try:
        await until(lambda: is_warned(caplog))
    finally:
        waiting.cancel()
        await asyncio.wait([waiting])
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    message = record.getMessage()
    assert message.startswith("no NATS server answers at nats://127.0.0.1:9 yet: ")
    assert "failed" in message
    assert message.endswith("; trying for 60 s")


async def is_warned(caplog: pytest.LogCaptureFixture) -> bool:
    return any(record.levelname == "WARNING" for record in caplog.records)


async def test_a_callback_that_fails_after_a_reconnect_hurts_no_other(bus: Bus) -> None:
    called = asyncio.Event()

    async def fails() -> None:
        raise RuntimeError("no")

    async def works() -> None:
        called.set()

    bus.on_reconnect += [fails, works]
    assert bus.nc._transport is not None
    bus.nc._transport.close()  # type: ignore[no-untyped-call]  # as if the network broke
    await asyncio.wait_for(called.wait(), WITHIN_S)
    assert (await JobLog(bus).state("default", "j")) == JobState()


async def test_a_flush_that_is_given_up_leaves_the_connection_hearing(bus: Bus) -> None:
    flushing = asyncio.create_task(bus.nc.flush())
    await asyncio.sleep(0)  # its ping is on the way
    flushing.cancel()
    await asyncio.wait([flushing])
    await bus.flush()
    assert bus.is_connected


async def test_a_connection_closed_while_it_reconnects_leaves_no_task_behind(broker_url: str, prefix: str) -> None:
    before = asyncio.all_tasks()
    async with Link(broker_url) as link:
        settings = Settings(prefix=prefix, state_dir="unused")
        for delay_s in (0.0, 0.001, 0.01, 0.2, 0.201):  # in the middle of a try, between two, as one is refused
            async with connect(link.url, settings, name="test") as bus:
                link.cut()
                while bus.is_connected:
                    await asyncio.sleep(0)
                await asyncio.sleep(delay_s)
            assert bus.closed.is_set()
            await link.mend()
    assert asyncio.all_tasks() == before
