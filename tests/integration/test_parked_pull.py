"""A parked pull against the real server: the next job comes by itself, and a withdrawn request loses none."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from headrace.bus.connection import Bus, connect
from headrace.bus.jobqueue import Delivery, JobQueue
from headrace.bus.parking import EXPIRES_S, ParkedPull
from headrace.errors import BrokerUnavailableError
from headrace.schemas.subjects import QueueName
from tests.integration.test_bus_queue import HIGH, QUEUE, fetch, job, publish

WITHIN_S = 30.0


class Pulling:
    """A parked pull, and what it brought."""

    def __init__(self, bus: Bus, queue: JobQueue) -> None:
        self.came: asyncio.Queue[Delivery] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.pull = ParkedPull(bus, queue, take=self.came.put, ended=self.ended.set)

    async def next(self) -> Delivery:
        return await asyncio.wait_for(self.came.get(), WITHIN_S)


@contextlib.asynccontextmanager
async def pulling(bus: Bus) -> AsyncIterator[tuple[Pulling, JobQueue]]:
    async with JobQueue(bus, "m") as queue:
        parked = Pulling(bus, queue)
        yield parked, queue
        await parked.pull.close()


class _Waiting(msgspec.Struct):
    num_waiting: int = 0


async def num_parked(bus: Bus, queue: JobQueue, of: QueueName = QUEUE) -> int:
    """Requests that wait at the broker, as it says."""
    answer = await bus.api(f"CONSUMER.INFO.{queue.stream}.{of.consumer}")
    return msgspec.json.decode(answer, type=_Waiting).num_waiting


async def are_parked(bus: Bus, queue: JobQueue, number: int) -> None:
    """Wait until so many wait: the broker takes requests in beside answering others."""
    async with asyncio.timeout(WITHIN_S):
        while await num_parked(bus, queue) != number:
            await asyncio.sleep(0.005)


async def test_the_next_job_comes_by_itself_one_for_each_request(bus: Bus) -> None:
    async with pulling(bus) as (parked, queue):
        for name in "ab":
            await parked.pull.park(QUEUE)
            assert parked.pull.queue == QUEUE
            await publish(queue, name)
            delivery = await parked.next()
            assert (delivery.job, delivery.num_delivered, delivery.is_parked) == (job(name), 1, True)
            assert parked.pull.queue is None
        await publish(queue, "c")
        assert (await fetch(queue)).job == job("c")
        assert parked.came.empty()


async def test_answers_of_fetches_and_of_the_parked_request_are_never_taken_for_one_another(bus: Bus) -> None:
    async with pulling(bus) as (parked, queue):
        await parked.pull.park(HIGH)
        await publish(queue, "a")
        assert (await fetch(queue)).job == job("a")
        assert await queue.fetch(QUEUE) is None
        assert parked.pull.queue == HIGH
        await publish(queue, "h", to=HIGH)
        assert (await parked.next()).queue == HIGH


async def test_one_request_waits_wherever_it_is_moved(bus: Bus) -> None:
    async with pulling(bus) as (parked, queue):
        await parked.pull.park(HIGH)
        await parked.pull.park(QUEUE)
        await parked.pull.park(QUEUE)
        await publish(queue, "h", to=HIGH)
        assert (await fetch(queue, HIGH)).job == job("h")
        await are_parked(bus, queue, 1)
        await publish(queue, "a", "b")
        assert (await parked.next()).job == job("a")
        assert (await fetch(queue)).job == job("b")
        assert parked.came.empty()


async def test_a_withdrawn_request_is_served_nothing_and_a_later_one_is(bus: Bus) -> None:
    async with pulling(bus) as (parked, queue):
        await parked.pull.park(QUEUE)
        await parked.pull.withdraw()
        assert parked.pull.queue is None
        await parked.pull.park(HIGH)  # its inbox must not bring the first one back to life
        await publish(queue, "a")
        assert (await fetch(queue)).job == job("a")
        await parked.pull.withdraw()
        await parked.pull.withdraw()
        await parked.pull.park(QUEUE)
        await publish(queue, "b")
        assert (await parked.next()).job == job("b")


async def test_a_request_waits_a_second_and_says_so(bus: Bus) -> None:
    async with pulling(bus) as (parked, queue):
        began = time.monotonic()
        await parked.pull.park(QUEUE)
        await asyncio.wait_for(parked.ended.wait(), WITHIN_S)
        assert time.monotonic() - began == pytest.approx(EXPIRES_S, abs=0.5)
        assert parked.pull.queue is None
        await parked.pull.park(QUEUE)  # at once: nothing was wrong
        await publish(queue, "a")
        assert (await parked.next()).job == job("a")


async def test_after_a_refusal_it_waits_and_makes_the_consumer_again(bus: Bus) -> None:
    async with pulling(bus) as (parked, queue):
        await parked.pull.park(QUEUE)
        await are_parked(bus, queue, 1)
        await bus.api(f"CONSUMER.DELETE.{queue.stream}.{QUEUE.consumer}")
        await asyncio.wait_for(parked.ended.wait(), WITHIN_S)
        await parked.pull.park(QUEUE)
        assert parked.pull.queue is None
        async with asyncio.timeout(WITHIN_S):
            while parked.pull.queue is None:
                await parked.pull.park(QUEUE)
                await asyncio.sleep(0.01)
        await publish(queue, "a")
        assert (await parked.next()).job == job("a")


async def test_a_request_of_an_earlier_connection_counts_as_lost(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pulling(bus) as (parked, queue):
        await parked.pull.park(QUEUE)
        monkeypatch.setattr(Bus, "connection_id", "another")
        assert parked.pull.queue is None
        await parked.pull.park(QUEUE)
        await are_parked(bus, queue, 1)
        await publish(queue, "a")
        assert (await parked.next()).job == job("a")


@pytest.mark.parametrize("num_steps", range(10))
async def test_a_job_that_races_with_the_withdrawal_is_taken_or_stays(bus: Bus, num_steps: int) -> None:
    """Case NAT-9: never left to the ack wait."""
    async with pulling(bus) as (parked, queue):
        await parked.pull.park(QUEUE)
        publishing = asyncio.create_task(publish(queue, "a"))
        await asyncio.sleep(0.0001 * num_steps)
        await parked.pull.withdraw()
        num_taken = parked.came.qsize()  # on return it has all that was sent to it
        await publishing
        rest = await queue.fetch_many(QUEUE, 3)
        assert num_taken + len(rest) == 1
        progress = await queue.progress(QUEUE)
        assert progress is not None
        assert (progress.num_in_flight, progress.num_waiting, progress.consumer_sequence) == (1, 0, 1)


async def test_no_job_of_a_crowd_is_lost_to_a_withdrawal(bus: Bus, broker_url: str) -> None:
    """With a PING in place of the refused request some two in a hundred rounds lost one (29 of 1,500)."""
    async with connect(broker_url, bus.settings, name="crowd") as other:
        for number in range(250):
            async with pulling(bus) as (parked, queue):
                await parked.pull.park(QUEUE)
                crowd = JobQueue(other, "m")
                publishing = [asyncio.create_task(publish(crowd, f"{number}-{each}")) for each in range(3)]
                await asyncio.sleep(0.00005 * (number % 20))
                await parked.pull.withdraw()
                await asyncio.gather(*publishing)
                taken = [parked.came.get_nowait() for _ in range(parked.came.qsize())]
                async with asyncio.timeout(WITHIN_S):
                    while len(taken) < 3:
                        taken += await queue.fetch_many(QUEUE, 3)
                assert len({delivery.sequence for delivery in taken}) == len(taken) == 3
                for delivery in taken:
                    await queue.ack(delivery)


@pytest.mark.parametrize("num_steps", range(10))
async def test_a_withdrawal_that_is_cancelled_at_any_step_loses_nothing(bus: Bus, num_steps: int) -> None:
    async with pulling(bus) as (parked, queue):
        await parked.pull.park(QUEUE)
        publishing = asyncio.create_task(publish(queue, "a"))
        withdrawing = asyncio.create_task(parked.pull.withdraw())
        for _ in range(num_steps):
            await asyncio.sleep(0)
        withdrawing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await withdrawing
        await publishing
        await parked.pull.close()
        rest = await queue.fetch_many(QUEUE, 3)
        assert parked.came.qsize() + len(rest) == 1


async def test_a_withdrawal_without_an_answer_says_so_and_what_comes_late_is_taken(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pulling(bus) as (parked, queue):
        await parked.pull.park(QUEUE)

        async def unanswered() -> None:
            raise BrokerUnavailableError("the broker does not answer")

        async def unsent(_: int) -> None:
            """The broker never hears of it."""

        monkeypatch.setattr(bus, "flush", unanswered)
        monkeypatch.setattr(parked.pull, "_last", None)
        monkeypatch.setattr(bus.nc, "_send_unsubscribe", unsent)
        with pytest.raises(BrokerUnavailableError):
            await parked.pull.withdraw()
        assert parked.pull.queue is None
        await publish(queue, "a")
        assert (await parked.next()).job == job("a")
        monkeypatch.undo()
        await parked.pull.park(QUEUE)  # withdrawn first, so still only one waits
        await are_parked(bus, queue, 1)
