"""How many messages a worker asks for at once: what it was woken for, and never more than it has room for."""

import asyncio
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.bus.jobqueue import Delivery
from headrace.schemas.subjects import HDR_PASSED, Names, QueueName
from headrace.worker.puller import Puller

NAMES = Names(prefix="headrace.v1")
NORMAL, OTHER = QueueName(), QueueName(queue="other")
MAX_BATCH = 16


class Queues:
    """Job queues with so many messages each, that note what they are asked for."""

    model = "m"

    def __init__(self, waiting: dict[QueueName, int], room: int) -> None:
        self.waiting = dict(waiting)
        self.room = room
        self.asked: list[tuple[int, int]] = []
        self.sequence = 0
        self.passed_on: list[QueueName] = []

    async def counts(self) -> dict[QueueName, int]:
        return dict(self.waiting)

    async def fetch_many(self, queue: QueueName, limit: int) -> list[Delivery]:
        self.asked.append((limit, self.room))
        number = min(limit, self.waiting.get(queue, 0))
        self.waiting[queue] = self.waiting.get(queue, 0) - number
        return [self._delivery(queue) for _ in range(number)]

    async def wake(self, queue: QueueName, headers: dict[str, str]) -> None:
        """Somebody else is told; there is nobody."""
        assert HDR_PASSED in headers
        self.passed_on.append(queue)

    def _delivery(self, queue: QueueName) -> Delivery:
        self.sequence += 1
        return Delivery(
            queue=queue,
            sequence=self.sequence,
            num_delivered=1,
            job=SimpleNamespace(need_tokens=10, accepted_at=0.0, preferred=None),  # type: ignore[arg-type]
            headers={},
            ack_subject="ack",
        )


class Membership:
    """Of the wake group."""


def played(
    waiting: dict[QueueName, int], *, room: int, wakes: int, interrupted: tuple[int, int] = (0, 0)
) -> tuple[Queues, list[Delivery]]:
    """One round of a worker with so much room after so many wakes for `NORMAL`, where so many were `interrupted`, of
    which so many are its share.
    """
    queues = Queues(waiting, room)
    taken: list[Delivery] = []

    def take(delivery: Delivery) -> None:
        queues.room -= 1
        taken.append(delivery)

    async def subscribe(*_: Any, **__: Any) -> Membership:
        return Membership()

    async def leave(_: Membership) -> None:
        pass

    bus = SimpleNamespace(
        names=NAMES,
        clock=SimpleNamespace(now=lambda: 0.0),
        subscribe=subscribe,
        leave=leave,
        nc=SimpleNamespace(is_closed=False),
    )
    puller = Puller(
        bus,  # type: ignore[arg-type]
        queues,  # type: ignore[arg-type]
        worker="w",
        pool="default",
        fetchable_tokens=lambda: max(0, queues.room),
        num_fetchable=lambda limit: min(limit, queues.room),
        take=take,
        ageing_s=10.0,
    )

    async def play() -> None:
        puller._waiting = dict.fromkeys(waiting, 0)
        for _ in range(wakes):
            await puller.wake(NORMAL)
        puller.note_interrupted(NORMAL, interrupted[0], share=interrupted[1])
        async with asyncio.timeout(10):
            await puller._round()

    asyncio.run(play())
    return queues, taken


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 40))
def test_a_fetch_never_asks_for_more_than_there_is_room_for(num_waiting: int, room: int, wakes: int) -> None:
    queues, taken = played({NORMAL: num_waiting}, room=room, wakes=wakes)
    assert all(limit <= min(free, MAX_BATCH) for limit, free in queues.asked)
    assert len(taken) == min(num_waiting, room)


@given(st.integers(1, 60), st.integers(1, 60))
def test_what_was_announced_and_found_no_room_is_announced_to_others(room: int, wakes: int) -> None:
    """Wakes fall where they fall: one worker may get all, beside another with room that nobody told."""
    queues, taken = played({NORMAL: wakes}, room=room, wakes=wakes)
    assert queues.passed_on == [NORMAL] * min(wakes - len(taken), MAX_BATCH)


def test_what_was_announced_is_fetched_together() -> None:
    queues, taken = played({NORMAL: 10}, room=50, wakes=10)
    assert len(taken) == 10
    assert queues.asked[0] == (10, 50)


def test_its_share_of_what_was_interrupted_is_fetched_together() -> None:
    """Its first wake may be taken for the job that a parked pull brings, and then says nothing of the others."""
    queues, taken = played({NORMAL: 10}, room=50, wakes=1, interrupted=(10, 5))
    assert [limit for limit, _ in queues.asked][:2] == [5, 10]
    assert len(taken) == 10


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 20000), st.integers(-5, 20000))
def test_whatever_share_it_is_told_no_fetch_is_larger_than_its_room(
    num_waiting: int, room: int, number: int, share: int
) -> None:
    queues, taken = played({NORMAL: num_waiting}, room=room, wakes=1, interrupted=(number, share))
    assert all(limit <= min(free, MAX_BATCH) for limit, free in queues.asked)
    assert len(taken) == min(num_waiting, room)


def test_without_wakes_each_fetch_that_was_filled_doubles_the_next() -> None:
    queues, _ = played({NORMAL: 40}, room=100, wakes=0)
    assert [limit for limit, _ in queues.asked][:6] == [1, 2, 4, 8, 16, 16]


def test_queues_take_turns_by_single_messages() -> None:
    queues, taken = played({NORMAL: 6, OTHER: 6}, room=50, wakes=6)
    both = [delivery.queue for delivery in taken[:8]]
    assert both.count(NORMAL) == both.count(OTHER) == 4
    assert all(limit == 1 for limit, _ in queues.asked[:8])
