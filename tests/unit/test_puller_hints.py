"""What a worker knows of waiting requests: no wake is forgotten, no empty queue is insisted on, no lane starves."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from headrace.bus.jobqueue import Delivery
from headrace.schemas.config import Config, ModelConfig, PoolConfig
from headrace.schemas.subjects import Names, QueueName
from headrace.worker.puller import Puller

NORMAL = QueueName()
AGEING_S = 10.0
NOW = 1_000.0


class Queues:
    """Job queues with so many messages each, and so many that run elsewhere; heads have waited since `accepted_at`.

    `in_count` and `in_fetch` run in each such call, between the broker's answer and its coming here.
    """

    model = "m"

    def __init__(self, waiting: dict[QueueName, int], *, accepted_at: float = NOW) -> None:
        self.waiting = dict(waiting)
        self.accepted_at = accepted_at
        self.running: dict[QueueName, int] = {}
        self.asked: list[QueueName] = []
        self.in_count: Callable[[], None] = lambda: None
        self.in_fetch: Callable[[], None] = lambda: None

    async def counts(self) -> dict[QueueName, int]:
        counted = {queue: number for queue, number in self.waiting.items() if number} | self.running
        self.in_count()
        return counted

    async def fetch_many(self, queue: QueueName, limit: int) -> list[Delivery]:
        self.asked.append(queue)
        number = min(limit, self.waiting.get(queue, 0))
        self.in_fetch()
        self.waiting[queue] = self.waiting.get(queue, 0) - number
        job: Any = SimpleNamespace(need_tokens=10, accepted_at=self.accepted_at, preferred=None)
        return [
            Delivery(queue=queue, sequence=1, num_delivered=1, job=job, headers={}, ack_subject="ack")
            for _ in range(number)
        ]

    async def oldest_waiting_at(self, _: QueueName) -> float:
        return self.accepted_at


class Membership:
    """Of the wake group."""


def puller_of(queues: Queues, taken: list[Delivery], *, room: int, pool: str = "default") -> Puller:
    """A puller with room for so many."""

    async def subscribe(*_: Any, **__: Any) -> Membership:
        return Membership()

    async def leave(_: Membership) -> None:
        pass

    bus = SimpleNamespace(
        names=Names(prefix="headrace.v1"),
        clock=SimpleNamespace(now=lambda: NOW),
        subscribe=subscribe,
        leave=leave,
        nc=SimpleNamespace(is_closed=False),
    )
    lending = PoolConfig(name="lender", lends_to=("default",))
    return Puller(
        bus,  # type: ignore[arg-type]
        queues,  # type: ignore[arg-type]
        worker="w",
        pool=pool,
        fetchable_tokens=lambda: max(0, room - len(taken)),
        num_fetchable=lambda limit: min(limit, room - len(taken)),
        take=taken.append,
        ageing_s=AGEING_S,
        config=lambda: Config(models={"m": ModelConfig(pools=(lending,))}),
    )


def come(puller: Puller, queues: Queues) -> None:
    """A job, with its wake; only one."""
    if not queues.waiting.get(NORMAL):
        queues.waiting[NORMAL] = 1
        puller._note(NORMAL)


async def test_a_wake_that_comes_while_the_queues_are_counted_is_not_forgotten() -> None:
    queues, taken = Queues({}), list[Delivery]()
    puller = puller_of(queues, taken, room=1)
    puller._waiting = {NORMAL: 0}
    queues.in_count = lambda: come(puller, queues)
    await puller._round()
    assert len(taken) == 1


async def test_a_wake_that_comes_while_an_empty_queue_is_asked_is_not_forgotten() -> None:
    queues, taken = Queues({}), list[Delivery]()
    puller = puller_of(queues, taken, room=1)
    queues.running = {NORMAL: 1}
    queues.in_fetch = lambda: come(puller, queues)
    await puller._round()
    assert not taken
    assert puller._look.is_set()
    await puller._round()  # at once, and without counting again
    assert len(taken) == 1


async def test_queues_that_were_not_announced_are_asked_once() -> None:
    """What runs elsewhere is counted too; whoever is behind such queues must not wait for three tries of each."""
    running = [QueueName(lane="high", queue=f"q{number}") for number in range(20)]
    queues, taken = Queues({NORMAL: 1}), list[Delivery]()
    puller = puller_of(queues, taken, room=5)
    puller._synced_at = asyncio.get_running_loop().time() + 60
    puller._waiting = dict.fromkeys(running, 1) | {NORMAL: 1}
    await puller._round()
    assert len(taken) == 1
    assert sorted(queues.asked) == sorted([*running, NORMAL])


async def served_in_lane(lane: str, waiting: dict[QueueName, int], *, pool: str) -> set[QueueName]:
    """Queues of a lane that were served in rounds more than a second apart, each with room for one."""
    queues, served = Queues(waiting, accepted_at=NOW - AGEING_S - 1), set[QueueName]()
    taken: list[Delivery] = []
    puller = puller_of(queues, taken, room=1, pool=pool)
    for _ in range(400):
        taken.clear()
        puller._synced_at = -1e9
        puller._heads.clear()  # a second has passed
        await puller._round()
        served |= {delivery.queue for delivery in taken if delivery.queue.lane == lane}
    return served


async def test_however_many_queues_a_lane_has_each_ages() -> None:
    low = [QueueName(lane="low", queue=f"q{number:02}") for number in range(30)]
    waiting = {QueueName(lane="high"): 10_000, **dict.fromkeys(low, 100)}
    assert await served_in_lane("low", waiting, pool="default") == set(low)


async def test_lanes_of_a_pool_that_is_lent_to_age_too() -> None:
    low = QueueName(lane="low")
    waiting = {QueueName(lane="high"): 10_000, low: 100}
    assert await served_in_lane("low", waiting, pool="lender") == {low}
