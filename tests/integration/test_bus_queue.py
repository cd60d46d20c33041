"""The job queue against the real server: publish, dedupe, refuse when full, fetch, hand back, late messages."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from headrace.bus.connection import Bus, Refused, Stored
from headrace.bus.jobqueue import Delivery, JobQueue
from headrace.bus.provision import provision
from headrace.errors import BrokerUnavailableError, NotProvisionedError
from headrace.schemas.jobs import Job, decode_job
from headrace.schemas.subjects import JobId, QueueName, Tenant

QUEUE = QueueName()
HIGH = QueueName(lane="high")
WITHIN_S = 30.0


def job(name: str, *, tenant: str = "default") -> Job:
    return Job(
        tenant=Tenant(tenant),
        job=JobId(name),
        op="chat",
        model="m",
        body=b'{"messages":[]}',
        body_hash="h",
        accepted_at=1_700_000_000.5,
        queue_timeout_s=60,
        deadline_s=600,
        need_tokens=10,
    )


class Late:
    """Takes what comes after its fetch gave up."""

    def __init__(self) -> None:
        self.deliveries: asyncio.Queue[Delivery] = asyncio.Queue()

    async def __call__(self, delivery: Delivery) -> None:
        await self.deliveries.put(delivery)

    async def next(self) -> Delivery:
        return await asyncio.wait_for(self.deliveries.get(), WITHIN_S)


@contextlib.asynccontextmanager
async def queue_of(bus: Bus, model: str = "m") -> AsyncIterator[tuple[JobQueue, Late]]:
    late = Late()
    async with JobQueue(bus, model, on_late=late) as queue:
        yield queue, late


async def publish(queue: JobQueue, *names: str, to: QueueName = QUEUE) -> list[int]:
    sequences = []
    for name in names:
        result = await queue.publish(job(name), to, {"traceparent": "00-aa"})
        assert isinstance(result, Stored)
        assert not result.is_duplicate
        sequences.append(result.sequence)
    return sequences


async def fetch(queue: JobQueue, of: QueueName = QUEUE) -> Delivery:
    delivery = await queue.fetch(of)
    assert delivery is not None
    return delivery


async def settled(queue: JobQueue, number: int = 0) -> None:
    """Wait until the stream holds that many messages; acks are published, not answered."""
    async with asyncio.timeout(WITHIN_S):
        while sum((await queue.counts()).values()) != number:
            await asyncio.sleep(0.01)


async def test_fetch_nothing_and_one(bus: Bus) -> None:
    async with queue_of(bus) as (queue, _):
        assert await queue.fetch(QUEUE) is None
        (sequence,) = await publish(queue, "a")
        delivery = await fetch(queue)
        assert delivery.job == job("a")
        assert (delivery.queue, delivery.sequence, delivery.num_delivered) == (QUEUE, sequence, 1)
        assert delivery.headers["traceparent"] == "00-aa"
        assert await queue.fetch(QUEUE) is None
        await queue.ack(delivery)
        await settled(queue)


async def test_jobs_of_a_queue_come_in_order_and_queues_do_not_mix(bus: Bus) -> None:
    async with queue_of(bus) as (queue, _):
        await publish(queue, "a", "b")
        await publish(queue, "h", to=HIGH)
        names = [(await fetch(queue, of)).job for of in (HIGH, QUEUE, QUEUE)]
        assert [one.job for one in names if one is not None] == ["h", "a", "b"]
        assert await queue.fetch(HIGH) is None


async def test_two_fetchers_never_get_the_same_message(bus: Bus) -> None:
    async with queue_of(bus) as (one, _), queue_of(bus) as (other, _):
        await publish(one, *(f"j{number}" for number in range(20)))
        got = await asyncio.gather(*(fetch(queue) for queue in (one, other) * 10))
        assert len({delivery.sequence for delivery in got}) == 20


async def test_the_same_job_is_stored_once(bus: Bus) -> None:
    async with queue_of(bus) as (queue, _):
        (sequence,) = await publish(queue, "a")
        again = await queue.publish(job("a"), QUEUE, {})
        assert again == Stored(sequence, is_duplicate=True)
        await queue.ack(await fetch(queue))
        await settled(queue)
        assert await queue.publish(job("a"), QUEUE, {}) == Stored(sequence, is_duplicate=True)
        other_tenant = await queue.publish(job("a", tenant="acme"), QUEUE, {})
        assert isinstance(other_tenant, Stored)
        assert not other_tenant.is_duplicate


async def test_a_full_queue_refuses_and_keeps_what_it_has(bus: Bus) -> None:
    small = Bus(bus.nc, msgspec.structs.replace(bus.settings, queue_limit=3))
    await provision(small, models=("m",))
    async with queue_of(small) as (queue, _):
        await publish(queue, "a", "b", "c")
        refused = await queue.publish(job("d"), QUEUE, {})
        assert isinstance(refused, Refused)
        assert refused.is_full
        assert not refused.is_lost_race
        delivery = await fetch(queue)
        assert isinstance(await queue.publish(job("d"), QUEUE, {}), Refused)  # running jobs count too
        await queue.ack(delivery)
        await settled(queue, 2)
        await publish(queue, "d")
        rest = [(await fetch(queue)).job for _ in range(3)]
        assert [one.job for one in rest if one is not None] == ["b", "c", "d"]


async def test_handed_back_is_first_again(bus: Bus) -> None:
    async with queue_of(bus) as (queue, _):
        await publish(queue, "a", "b", "c")
        first = await fetch(queue)
        taken = await bus.subscribe(f"$JS.EVENT.ADVISORY.CONSUMER.MSG_NAKED.{queue.stream}.{QUEUE.consumer}")
        await queue.nak(first)
        await taken.next_msg(WITHIN_S)  # the broker takes acks one by one, beside fetches
        again = await fetch(queue)
        assert (again.sequence, again.num_delivered) == (first.sequence, 2)
        assert (await fetch(queue)).sequence > first.sequence


async def test_handed_back_with_a_delay_comes_after_it(bus: Bus) -> None:
    async with queue_of(bus) as (queue, _):
        await publish(queue, "a")
        delivery = await fetch(queue)
        since = asyncio.get_running_loop().time()
        await queue.nak(delivery, delay_s=0.3)
        async with asyncio.timeout(WITHIN_S):
            while (again := await queue.fetch(QUEUE)) is None:
                await asyncio.sleep(0.01)
        assert again.sequence == delivery.sequence
        assert asyncio.get_running_loop().time() - since >= 0.25


async def test_unrenewed_comes_again_and_renewed_does_not(bus: Bus) -> None:
    short = Bus(bus.nc, msgspec.structs.replace(bus.settings, ack_wait_s=0.5))
    async with queue_of(short) as (queue, _):
        await publish(queue, "kept", "dropped")
        kept, dropped = await fetch(queue), await fetch(queue)
        async with asyncio.timeout(WITHIN_S):
            while (again := await queue.fetch(QUEUE)) is None:
                await queue.in_progress(kept)
                await asyncio.sleep(0.05)
        assert (again.sequence, again.num_delivered) == (dropped.sequence, 2)


async def test_what_is_no_job_is_delivered_as_none_and_can_be_terminated(bus: Bus) -> None:
    async with queue_of(bus) as (queue, _):
        assert isinstance(await bus.store(bus.names.jobs("m", QUEUE), b"?", headers={"Headrace-Op": "x"}), Stored)
        delivery = await fetch(queue)
        assert delivery.job is None
        await queue.terminate(delivery)
        await settled(queue)


async def test_delete_takes_a_queued_and_a_running_message(bus: Bus) -> None:
    async with queue_of(bus) as (queue, _):
        first, second = await publish(queue, "a", "b")
        delivery = await fetch(queue)
        assert delivery.sequence == first
        assert [await queue.delete(sequence) for sequence in (first, second, second, 999)] == [True, True, False, False]
        await settled(queue)
        await queue.nak(delivery)
        assert await queue.fetch(QUEUE) is None


async def test_counts_and_headers(bus: Bus) -> None:
    async with queue_of(bus) as (queue, _):
        assert await queue.counts() == {}
        (sequence,) = await publish(queue, "a")
        await publish(queue, "b", "c", to=HIGH)
        await fetch(queue, HIGH)
        assert await queue.counts() == {QUEUE: 1, HIGH: 2}  # running ones too
        headers = await queue.headers_of(sequence)
        assert headers is not None
        assert decode_job(headers, b'{"messages":[]}') == job("a")
        assert await queue.headers_of(999) is None


async def test_num_ahead_is_exact(bus: Bus) -> None:
    async with queue_of(bus) as (queue, _):
        await publish(queue, "h", to=HIGH)
        sequences = await publish(queue, "a", "b", "c")
        await fetch(queue)
        assert [await queue.num_ahead(QUEUE, sequence) for sequence in sequences[1:]] == [0, 1]
        assert await queue.num_ahead(QUEUE, 999) is None


async def test_a_publish_wakes_with_headers_alone(bus: Bus) -> None:
    wakes = await bus.subscribe(bus.names.wake_filter("m"))
    await bus.nc.flush()
    async with queue_of(bus) as (queue, _):
        await publish(queue, "a", to=HIGH)
        wake = await wakes.next_msg(WITHIN_S)
        assert QueueName.from_subject(wake.subject) == HIGH
        assert decode_job(wake.headers, wake.data) == msgspec.structs.replace(job("a"), body=b"")
        await queue.wake(QUEUE, job("b").headers())
        wake = await wakes.next_msg(WITHIN_S)
        assert (wake.subject, (wake.headers or {})["Headrace-Job"]) == (bus.names.wake("m", QUEUE), "b")


async def test_a_model_without_a_stream(bus: Bus) -> None:
    async with queue_of(bus, "none") as (queue, _):
        assert not await queue.exists()
        with pytest.raises(NotProvisionedError, match="'none' has no stream"):
            await queue.counts()
        with pytest.raises(NotProvisionedError, match="'none' has no stream"):
            await queue.fetch(QUEUE)
    async with queue_of(bus) as (queue, _):
        assert await queue.exists()
        assert await queue.created()


async def test_a_consumer_that_was_removed_is_made_again(bus: Bus) -> None:
    async with queue_of(bus) as (queue, _):
        assert await queue.fetch(QUEUE) is None
        await bus.api(f"CONSUMER.DELETE.{queue.stream}.{QUEUE.consumer}")
        await publish(queue, "a")
        with pytest.raises(BrokerUnavailableError, match="not served"):
            await queue.fetch(QUEUE)
        assert (await fetch(queue)).job == job("a")


class HeldBack:
    """Keeps what the broker sends to a queue's inbox until it is let through."""

    def __init__(self, queue: JobQueue, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = asyncio.Event()
        self.num_held = 0
        receive = queue._on_message

        async def later(message: object) -> None:
            self.num_held += 1
            await self.gate.wait()
            await receive(message)  # type: ignore[arg-type]

        monkeypatch.setattr(queue, "_on_message", later)

    async def has_one(self) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not self.num_held:
                await asyncio.sleep(0)


async def test_a_message_after_its_fetch_gave_up_goes_to_on_late(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    hasty = Bus(bus.nc, msgspec.structs.replace(bus.settings, request_timeout_s=0.2))
    late = Late()
    queue = JobQueue(hasty, "m", on_late=late)
    held = HeldBack(queue, monkeypatch)
    async with queue:
        await publish(queue, "a")
        with pytest.raises(
            BrokerUnavailableError, match=r"no answer to a fetch from default_normal_default within 0\.2 s"
        ):
            await queue.fetch(QUEUE)
        held.gate.set()
        assert (await late.next()).job == job("a")
        assert await queue.fetch(QUEUE) is None
        assert late.deliveries.empty()


async def test_a_message_of_a_cancelled_fetch_is_not_lost_even_at_the_end(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case NAT-9: a job that arrives as its pull is cancelled is not left to the ack wait."""
    late = Late()
    queue = JobQueue(bus, "m", on_late=late)
    held = HeldBack(queue, monkeypatch)
    async with queue:
        await publish(queue, "a")
        fetching = asyncio.create_task(queue.fetch(QUEUE))
        await held.has_one()
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        asyncio.get_running_loop().call_later(0.05, held.gate.set)  # while the queue is being left
    assert late.deliveries.get_nowait().job == job("a")


@pytest.mark.parametrize("num_steps", range(6))
async def test_a_fetch_cancelled_at_any_step_loses_nothing(bus: Bus, num_steps: int) -> None:
    late = Late()
    got: Delivery | None = None
    async with JobQueue(bus, "m", on_late=late) as queue:
        assert await queue.fetch(QUEUE) is None
        await publish(queue, "a")
        fetching = asyncio.create_task(queue.fetch(QUEUE))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        await asyncio.sleep(0.0002 * num_steps)
        fetching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            got = await fetching
    async with queue_of(bus) as (queue, _):
        # One of three has it: the fetch, whoever takes the late ones, or, where no pull was sent, the queue.
        got = got or (late.deliveries.get_nowait() if not late.deliveries.empty() else await queue.fetch(QUEUE))
        assert got is not None
        assert got.num_delivered == 1


async def test_many_are_fetched_at_once_but_never_more_than_asked_for(bus: Bus) -> None:
    async with queue_of(bus) as (queue, late):
        await publish(queue, *"abcde")
        first = await queue.fetch_many(QUEUE, 3)
        assert [delivery.job for delivery in first] == [job(name) for name in "abc"]
        rest = await queue.fetch_many(QUEUE, 16)
        assert [delivery.job for delivery in rest] == [job(name) for name in "de"]
        assert await queue.fetch_many(QUEUE, 16) == []
        assert late.deliveries.empty()


async def test_of_many_what_comes_after_the_fetch_gave_up_goes_to_on_late(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has more than was asked for: what is late is given to whoever asks again whether there is room."""
    hasty = Bus(bus.nc, msgspec.structs.replace(bus.settings, request_timeout_s=0.2))
    late = Late()
    queue = JobQueue(hasty, "m", on_late=late)
    held = HeldBack(queue, monkeypatch)
    async with queue:
        await publish(queue, *"abc")
        with pytest.raises(BrokerUnavailableError, match="no answer to a fetch"):
            await queue.fetch_many(QUEUE, 5)
        held.gate.set()
        assert [(await late.next()).job for _ in range(3)] == [job(name) for name in "abc"]
        assert await queue.fetch_many(QUEUE, 5) == []
        assert late.deliveries.empty()


@pytest.mark.parametrize("num_steps", range(8))
async def test_a_fetch_of_many_cancelled_at_any_step_loses_nothing(bus: Bus, num_steps: int) -> None:
    late = Late()
    got: list[Delivery] = []
    async with JobQueue(bus, "m", on_late=late) as queue:
        assert await queue.fetch(QUEUE) is None
        await publish(queue, *"abcd")
        fetching = asyncio.create_task(queue.fetch_many(QUEUE, 3))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        await asyncio.sleep(0.0002 * num_steps)
        fetching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            got = await fetching
    while not late.deliveries.empty():
        got.append(late.deliveries.get_nowait())
    assert len(got) <= 3
    async with queue_of(bus) as (queue, _):
        got += await queue.fetch_many(QUEUE, 4)
    assert sorted(delivery.sequence for delivery in got) == [1, 2, 3, 4]
    assert {delivery.num_delivered for delivery in got} == {1}
