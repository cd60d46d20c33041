"""Where an idle worker parks its pull, and when it lets others come first."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bus.jobqueue import Delivery
from headrace.schemas.subjects import LANES, QueueName
from headrace.worker.standby import Standby, place_to_park

NORMAL, HIGH, LENT = QueueName(), QueueName(lane="high"), QueueName(pool="other")
QUEUES = [QueueName(pool=pool, lane=lane) for pool in ("default", "other") for lane in LANES]
queues = st.sampled_from(QUEUES)


@given(st.none() | queues, st.sets(queues), st.sets(queues))
def test_it_parks_where_the_last_job_came_from_or_at_the_only_queue_known(
    last: QueueName | None, known: set[QueueName], avoided: set[QueueName]
) -> None:
    place = place_to_park(last, known, pool="default", avoided=avoided)
    own = {queue for queue in known if queue.pool == "default"}
    assert place is None or (place.pool == "default" and place not in avoided)
    if last is not None and last.pool == "default":
        assert place == (last if last not in avoided else None)
    elif len(own) == 1:
        assert place == (None if own <= avoided else next(iter(own)))
    else:
        assert place is None


class Pull:
    """Stands for the parked pull: where it was told to be."""

    def __init__(self, *_: Any, take: Any, ended: Any) -> None:
        self.queue: QueueName | None = None
        self.take = take

    async def park(self, queue: QueueName) -> None:
        self.queue = queue

    async def withdraw(self) -> None:
        self.queue = None


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with patch("headrace.worker.standby.ParkedPull", Pull), patch("headrace.worker.standby.time", clock):
        yield clock


class Standing:
    """A standby of worker `w`, and what it took."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.missed: list[QueueName] = []
        self.miss = asyncio.Event()
        self.jobs = SimpleNamespace(handed_back_at={})

        async def take(delivery: Delivery) -> None:
            self.taken.append(delivery.sequence)

        def missed(queue: QueueName) -> None:
            self.missed.append(queue)
            self.miss.set()

        bus: Any = None
        jobs: Any = self.jobs
        self.standby = Standby(bus, jobs, worker="w", pool="default", take=take, missed=missed, look=lambda: None)

    def place(self, *known: QueueName) -> QueueName | None:
        asyncio.run(self.standby.settle(known))
        pull: Any = self.standby._pull
        return pull.queue  # type: ignore[no-any-return]

    async def comes(self, delivery: Delivery) -> None:
        pull: Any = self.standby._pull
        pull.queue = None
        await pull.take(delivery)

    async def until_missed(self) -> list[QueueName]:
        await asyncio.wait_for(self.miss.wait(), 10)
        return self.missed


def delivery_of(queue: QueueName, sequence: int = 1, *, preferred: str | None = None) -> Delivery:
    job: Any = SimpleNamespace(need_tokens=1, preferred=preferred)
    return Delivery(queue=queue, sequence=sequence, num_delivered=1, job=job, headers={}, ack_subject="ack")


def test_it_does_not_park_where_jobs_are_named_for_others(clock: Clock) -> None:
    standing = Standing()
    standing.standby.note(delivery_of(NORMAL, preferred="w"))
    assert standing.place(NORMAL) == NORMAL
    standing.standby.note(delivery_of(NORMAL, preferred="x"))
    assert standing.place(NORMAL) is None
    clock.now += 59
    standing.standby.note_hint(NORMAL, "x")  # a wake says it too
    clock.now += 59
    assert standing.place(NORMAL) is None
    clock.now += 2
    assert standing.place(NORMAL) == NORMAL


def test_it_does_not_park_where_it_just_handed_back(clock: Clock) -> None:
    standing = Standing()
    standing.jobs.handed_back_at[NORMAL] = clock.now
    assert standing.place(NORMAL) is None
    clock.now += 1.1
    assert standing.place(NORMAL) == NORMAL


def test_hints_of_other_pools_or_without_end_are_not_remembered(clock: Clock) -> None:
    standing = Standing()
    for number in range(5000):
        standing.standby.note_hint(QueueName(queue=f"q{number}"), "x")
    standing.standby.note_hint(LENT, "x")
    assert len(standing.standby._avoided) == 1024


async def test_what_was_announced_and_does_not_come_is_missed_and_doubted_until_a_fetch_found_nothing() -> None:
    with patch("headrace.worker.standby.ParkedPull", Pull):
        standing = Standing()
        standby = standing.standby
        assert not standby.expects(NORMAL, "1")
        await standby.settle([NORMAL])
        assert standby.covers(NORMAL)
        assert not standby.expects(HIGH, "1")
        assert standby.expects(NORMAL, "1")
        assert await standing.until_missed() == [NORMAL]
        assert not standby.covers(NORMAL)
        assert not standby.expects(NORMAL, "2")
        standby.trust(HIGH)
        assert not standby.covers(NORMAL)
        standby.trust(NORMAL)
        assert standby.covers(NORMAL)


async def test_of_several_announced_one_comes_and_the_others_are_fetched_at_once() -> None:
    with patch("headrace.worker.standby.ParkedPull", Pull):
        standing = Standing()
        await standing.standby.settle([NORMAL])
        assert all(standing.standby.expects(NORMAL, sequence) for sequence in ("7", "8", "", "9"))
        await standing.comes(delivery_of(NORMAL, 8))
        assert standing.missed == [NORMAL] * 3
        assert standing.standby.expects(NORMAL, "8")
        assert not standing.standby.expects(NORMAL, "10")


async def test_the_wake_of_a_job_that_came_by_itself_is_known() -> None:
    with patch("headrace.worker.standby.ParkedPull", Pull):
        standing = Standing()
        for sequence in range(1, 101):
            await standing.comes(delivery_of(NORMAL, sequence))
            assert standing.standby.expects(NORMAL, str(sequence))
        assert standing.taken == list(range(1, 101))
        assert not standing.standby.expects(NORMAL, "1")
        assert not standing.standby.expects(NORMAL, "")
