"""When and from where a worker fetches: wakes, a look around now and then, and never more than it has room for."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from headrace.bus.connection import Bus, Message, Subscription
from headrace.bus.jobqueue import Delivery, JobQueue
from headrace.discipline import choice
from headrace.discipline.choice import QueueView
from headrace.discipline.shares import Shares
from headrace.errors import BrokerError, BrokerUnsuitableError
from headrace.schemas.config import Config
from headrace.schemas.jobs import decode_need
from headrace.schemas.subjects import HDR_PASSED, HDR_PREFERRED, HDR_SEQUENCE, LANES, WORKER_GROUP, QueueName
from headrace.worker.standby import Standby

__all__ = ["Puller", "is_fresh"]

log = logging.getLogger(__name__)

_RESYNC_S: Final = 0.15
_AFTER_ERROR_S: Final = 0.15
"""What a broker in trouble gets before it is asked again: no more than between two looks, or its return is missed."""
_TRIES_AFTER_WAKE: Final = 3
"""A message is announced, and even acknowledged, a moment before its consumer has it (measured: 7 times in 4,000)."""
_TRY_AGAIN_S: Final = 0.003
_MAX_BATCH: Final = 16
"""Messages fetched at once. Anybody can publish wakes, so what they say is bounded."""
_AFTER_PREFERRED_S: Final = 0.002
"""Head start of the worker that has a job's beginning in its cache."""
_LEFT_TO_ANOTHER_S: Final = 0.02
"""Head start of the worker that a job was handed to, which hears of it later than we do; doubled at each delivery."""
_MOST_LEFT_S: Final = 0.16
"""Enough for its next look around, so that it gets the job even if it does not hear of it."""
_FRESH_S: Final = 0.01
_PARKED_FRESH_S: Final = 0.05
"""The same where a parked pull brought it, and others before this one may have had it in their hands."""
_HEAD_FOR_S: Final = 1.0
"""How long what is known of a queue's head may be true."""
_MAX_INTERRUPTED: Final = 10_000
_MAX_INTERRUPTED_QUEUES: Final = 256
_MAX_HEADS: Final = 8
"""Heads looked at in one round."""


def is_fresh(delivery: Delivery, *, now: float) -> bool:
    """Whether the job was published so short a time ago that the worker its hint names is about to fetch it."""
    fresh_s = _PARKED_FRESH_S if delivery.is_parked else _FRESH_S
    return delivery.job is not None and now - delivery.job.accepted_at <= fresh_s


class Puller:
    """Fetches while `fetchable_tokens` says that there is room, and gives each message to `take`.

    Several at once where several are announced: at most as many as `num_fetchable` says would start beside each other.

    A worker with room is a member of its pool's wake group, so that a new job wakes one worker that can run it; a
    full one leaves the group. What is known to wait is a hint: a fetch that finds nothing clears it. Which queue is
    next is the discipline's choice, over what this worker has served. Pools that its own lends to are looked at now
    and then, and only while its own has nothing and `may_borrow` says so: their own workers, which are woken, come
    first.

    While `is_idle` says that it holds nothing, a pull is parked at one queue, which saves that queue's next job the
    wake. It may bring a job beside any fetch, so it is withdrawn before one unless `has_room_for_two`.
    """

    def __init__(
        self,
        bus: Bus,
        queue: JobQueue,
        *,
        worker: str,
        pool: str,
        fetchable_tokens: Callable[[], int],
        num_fetchable: Callable[[int], int],
        take: Callable[[Delivery], None],
        ageing_s: float,
        config: Callable[[], Config] = Config,
        may_borrow: Callable[[], bool] = lambda: True,
        is_idle: Callable[[], bool] = lambda: False,
        has_room_for_two: Callable[[], bool] = lambda: False,
    ) -> None:
        self._bus = bus
        self._queue = queue
        self._worker = worker
        self._pool = pool
        self._fetchable_tokens = fetchable_tokens
        self._num_fetchable = num_fetchable
        self._take = take
        self._ageing_s = ageing_s
        self._config = config
        self._may_borrow = may_borrow
        self._is_idle = is_idle
        self._has_room_for_two = has_room_for_two
        self._standby = Standby(
            bus, queue, worker=worker, pool=pool, take=self._on_parked, missed=self._note_missed, look=self.look
        )
        self._shares: dict[str, Shares] = {}
        self._waiting: dict[QueueName, int] = {}
        self._woken: dict[QueueName, int] = {}
        self._interrupted: dict[QueueName, int] = {}
        self._shared: dict[QueueName, int] = {}
        self._heads: dict[QueueName, tuple[float, float | None]] = {}
        self._looked_at: dict[QueueName, float] = {}
        self._left_until: dict[QueueName, float] = {}
        self._synced_at = -math.inf
        self._look = asyncio.Event()
        self._membership: Subscription | None = None
        self._is_stopped = False
        self._is_behind = False

    def look(self) -> None:
        """Look for work now: room was made, or the connection came back."""
        self._look.set()

    def leave_to_another(self, delivery: Delivery) -> None:
        """A job is handed to a worker by name: take none of its queue for a moment, or we would get it back."""
        queue = delivery.queue
        left_s = min(_MOST_LEFT_S, _LEFT_TO_ANOTHER_S * 2.0 ** min(16, delivery.num_delivered - 1))
        self._left_until[queue] = time.monotonic() + left_s
        if queue in self._waiting:
            self._waiting[queue] += 1
        asyncio.get_running_loop().call_later(left_s, self._look.set)

    def stop(self) -> None:
        """Fetch nothing more; `run` returns once a fetch under way is over."""
        self._is_stopped = True
        self._look.set()

    async def wake(self, queue: QueueName) -> None:
        """Somebody has a job for us in that queue; where there is no room after all, another worker is woken."""
        if self._has_room() and queue.pool in self._pools():
            self._announce(queue, {})
        else:
            await self._queue.wake(queue, {HDR_PASSED: "1"})

    def note_interrupted(self, queue: QueueName, number: int, *, share: int = 0) -> None:
        """So many requests that were running before stand at the head of the queue: they come before other queues.

        `share` of them are for this worker to fetch, at once where it has the room.
        """
        is_known = queue in self._waiting or len(self._interrupted) < _MAX_INTERRUPTED_QUEUES
        if is_known and number > 0 and queue.pool == self._pool:
            self._interrupted[queue] = min(_MAX_INTERRUPTED, self._interrupted.get(queue, 0) + number)
            self._shared[queue] = min(_MAX_INTERRUPTED, self._shared.get(queue, 0) + max(0, min(share, number)))

    def refund(self, queue: QueueName, tokens: int) -> None:
        """Of a job fetched from the queue these went unused: it ended early, or went to another worker."""
        if tokens <= 0:
            return
        views = list(self._views(queue.pool))
        choice.charge(views, self._shares_of(queue.pool), queue, -tokens, ageing_s=self._ageing_s)

    def undo(self, queue: QueueName, tokens: int) -> None:
        """A job fetched from the queue, of so many tokens, stands at its head again, as if it had not been fetched."""
        views = list(self._views(queue.pool))
        shares = self._shares_of(queue.pool)
        choice.charge(views, shares, queue, -tokens, ageing_s=self._ageing_s, is_undone=True)
        if queue in self._waiting:
            self._waiting[queue] += 1

    async def run(self) -> None:
        """Fetch until stopped. Raises BrokerUnsuitableError where it never could."""
        self._look.set()
        try:
            while not self._is_stopped:
                await self._told_to_look()
                if self._is_stopped:
                    return
                began = time.monotonic()
                try:
                    await self._round()
                except BrokerUnsuitableError:  # it will not pass by itself, and a person must know
                    raise
                except BrokerError as error:
                    log.warning("cannot fetch: %s", error)
                    await asyncio.sleep(began + _AFTER_ERROR_S - time.monotonic())  # one that timed out waited already
                    self._look.set()
        finally:
            with contextlib.suppress(BrokerError):
                await self._standby.close()
            with contextlib.suppress(BrokerError):
                await self._leave()

    def _has_room(self) -> bool:
        return not self._is_stopped and self._fetchable_tokens() > 0

    async def _told_to_look(self) -> None:
        until_resync_s = self._synced_at + _RESYNC_S - time.monotonic()
        try:  # with room the next look around is due by then; a full worker has none behind it
            async with asyncio.timeout(until_resync_s if 0 < until_resync_s < _RESYNC_S else _RESYNC_S):
                await self._look.wait()
        except TimeoutError:
            return
        self._look.clear()

    async def _round(self) -> None:
        if not self._has_room():
            await self._stand_back()
            return
        await self._join()
        resync = time.monotonic() - self._synced_at >= _RESYNC_S
        if resync:
            counts = await self._queue.counts()
            self._synced_at = time.monotonic()
            pools = self._pools()
            self._waiting = {  # wakes may have come since the broker counted
                queue: max(counts.get(queue, 0), self._woken.get(queue, 0))
                for queue in self._waiting | counts
                if queue.pool in pools
            }
            await self._look_at_heads()
        if not any(self._woken.values()) and not self._is_behind and any(self._waiting.values()):
            await asyncio.sleep(_AFTER_PREFERRED_S)  # what was published a moment ago may be about to be fetched
        batch = 1
        while self._has_room():
            deliveries = await self._fetch_next(batch)
            if not deliveries:
                await (self._standby.settle(self._waiting) if self._is_idle() else self._standby.withdraw())
                return
            batch = 2 * len(deliveries)
            for delivery in deliveries:
                self._take(delivery)
        await self._stand_back()

    async def _stand_back(self) -> None:
        """Full: no job may come by itself, and no wake."""
        await self._standby.withdraw()
        await self._leave()

    def _pools(self) -> tuple[str, ...]:
        """Its own pool, then those that it lends to."""
        return (self._pool, *self._config().model(self._queue.model).pool(self._pool).lends_to)

    def _shares_of(self, pool: str) -> Shares:
        return self._shares.setdefault(pool, Shares())

    async def _fetch_next(self, batch: int) -> list[Delivery]:
        for pool in self._pools():
            if pool != self._pool and not self._may_borrow():
                break
            deliveries = await self._fetch_from(pool, batch)
            if deliveries:
                return deliveries
        self._is_behind = False
        return []

    async def _fetch_from(self, pool: str, batch: int) -> list[Delivery]:
        views, shares = list(self._views(pool)), self._shares_of(pool)
        queues = choice.order(views, shares, ageing_s=self._ageing_s)
        for queue in queues:
            if self._standby.covers(queue):
                continue
            if not await self._make_way():
                return []
            limit = self._limit(queue, batch) if len(queues) == 1 else 1  # queues take turns message by message
            num_wakes, num_noted = self._woken.get(queue, 0), self._interrupted.get(queue, 0)
            deliveries = await self._queue.fetch_many(queue, limit)
            for _ in range(_TRIES_AFTER_WAKE - 1 if num_wakes else 0):
                if deliveries:
                    break
                await asyncio.sleep(_TRY_AGAIN_S)
                num_wakes, num_noted = self._woken.get(queue, 0), self._interrupted.get(queue, 0)
                deliveries = await self._queue.fetch_many(queue, limit)
            if deliveries:
                self._woken[queue] = max(0, self._woken.get(queue, 0) - len(deliveries))
                self._count_as_served(queue, deliveries, views, num_noted=num_noted)
                return deliveries
            self._standby.trust(queue)
            num_since = self._woken.get(queue, 0) - num_wakes  # woken while it was asked
            self._waiting[queue] = self._woken[queue] = num_since
            self._forget_interrupted(queue, num_noted)
        return []

    def _count_as_served(
        self, queue: QueueName, deliveries: list[Delivery], views: list[QueueView], *, num_noted: int
    ) -> None:
        for delivery in deliveries:
            need_tokens = delivery.job.need_tokens if delivery.job is not None else 0
            choice.charge(views, self._shares_of(queue.pool), queue, need_tokens, ageing_s=self._ageing_s)
            self._standby.note(delivery)
        self._is_behind = not is_fresh(deliveries[-1], now=self._bus.clock.now())
        # One that was handed back may not have been counted; a fetch that finds nothing corrects that.
        num_new = sum(delivery.num_delivered == 1 for delivery in deliveries)
        self._waiting[queue] = max(0, self._waiting.get(queue, 0) - num_new)
        self._heads.pop(queue, None)
        # Redeliveries come first, so one that is none says that no more of those noted before wait.
        is_redelivery = deliveries[-1].num_delivered > 1
        self._forget_interrupted(queue, len(deliveries) if is_redelivery else num_noted)

    async def _make_way(self) -> bool:
        """Withdraw the parked pull unless its job would have room beside one that is fetched; whether there is room."""
        if self._standby.is_parked and not (self._is_idle() and self._has_room_for_two()):
            await self._standby.withdraw()
        return self._has_room()

    async def _on_parked(self, delivery: Delivery) -> None:
        """A job came by itself: take it, or hand it back if there is no room any more."""
        queue = delivery.queue
        if not self._has_room():
            await self._queue.hand_on(delivery)
            return
        if delivery.num_delivered == 1:
            self._waiting[queue] = self._waiting.get(queue, 0) + 1
        if delivery.job is not None and delivery.job.need_tokens > self._fetchable_tokens():
            self._standby.avoid(queue)
        views = list(self._views(queue.pool))
        self._count_as_served(queue, [delivery], views, num_noted=self._interrupted.get(queue, 0))
        self._take(delivery)
        self.look()

    def _forget_interrupted(self, queue: QueueName, number: int) -> None:
        for noted in (self._interrupted, self._shared):
            num_left = noted.pop(queue, 0) - number
            if num_left > 0:
                noted[queue] = num_left

    def _limit(self, queue: QueueName, batch: int) -> int:
        """As many as are meant for us: each wake goes to one worker, and of what was interrupted we are told our share.
        Else twice as many as came at last.
        """
        if self._standby.is_parked:
            return 1
        wanted = min(max(batch, self._woken.get(queue, 0), self._shared.get(queue, 0)), _MAX_BATCH)
        return max(1, self._num_fetchable(wanted)) if wanted > 1 else 1

    def _views(self, pool: str) -> Iterator[QueueView]:
        now = self._bus.clock.now()
        self._left_until = {queue: until for queue, until in self._left_until.items() if until > time.monotonic()}
        config = self._config()
        for queue, number in self._waiting.items():
            if queue.pool != pool or queue in self._left_until:
                continue
            _, accepted_at = self._heads.get(queue, (0.0, None))
            oldest_wait_s = now - accepted_at if accepted_at is not None else None
            weight = config.weight_of(queue.queue)
            yield QueueView(
                name=queue,
                num_waiting=number,
                oldest_wait_s=oldest_wait_s,
                weight=weight,
                num_interrupted=self._interrupted.get(queue, 0),
            )

    async def _look_at_heads(self) -> None:
        """Learn how long the heads of lower lanes have waited, where a higher one of their pool may go before them.

        Those looked at longest ago come first, so that each is looked at, however many there are.
        """
        waiting = [queue for queue, number in self._waiting.items() if number > 0]
        tops: dict[str, int] = {}
        for queue in waiting:
            tops[queue.pool] = min(LANES.index(queue.lane), tops.get(queue.pool, len(LANES)))
        now = time.monotonic()
        self._heads = {queue: head for queue, head in self._heads.items() if now - head[0] < _HEAD_FOR_S}
        self._looked_at = {queue: at for queue, at in self._looked_at.items() if queue in self._waiting}
        lower = [queue for queue in waiting if LANES.index(queue.lane) > tops[queue.pool] and queue not in self._heads]
        longest_ago = sorted(lower, key=lambda queue: self._looked_at.get(queue, -math.inf))[:_MAX_HEADS]
        for queue in longest_ago:
            self._looked_at[queue] = time.monotonic()
        accepted = await asyncio.gather(*(self._queue.oldest_waiting_at(queue) for queue in longest_ago))
        self._heads |= {queue: (now, at) for queue, at in zip(longest_ago, accepted, strict=True)}

    async def _join(self) -> None:
        if self._membership is None:
            subject = self._bus.names.wake_pool(self._queue.model, self._pool)
            self._membership = await self._bus.subscribe(subject, queue=WORKER_GROUP, cb=self._on_wake)

    async def _leave(self) -> None:
        membership, self._membership = self._membership, None
        if membership is not None and not self._bus.nc.is_closed:
            await self._bus.leave(membership)  # a wake that is under way is passed on
        await self._pass_on()

    async def _pass_on(self) -> None:
        """Wake others for what we were woken for and could not take: they may have room, and nobody told them."""
        woken, self._woken = self._woken, {}
        for queue, number in woken.items():
            for _ in range(min(number, _MAX_BATCH)):
                await self._queue.wake(queue, {HDR_PASSED: "1"})

    async def _on_wake(self, message: Message) -> None:
        queue = QueueName.from_subject(message.subject)
        if queue is None:
            return
        headers = message.headers or {}
        num_tokens = self._fetchable_tokens() if not self._is_stopped else 0
        may_pass = HDR_PASSED not in headers
        if num_tokens and (decode_need(headers) <= num_tokens or not may_pass):
            self._announce(queue, headers)
        elif may_pass:  # it does not fit, or came as we filled up: somebody else may have room
            await self._bus.publish(message.subject, headers={**headers, HDR_PASSED: "1"})

    def _announce(self, queue: QueueName, headers: Mapping[str, str]) -> None:
        sequence, preferred = headers.get(HDR_SEQUENCE, ""), headers.get(HDR_PREFERRED)
        self._standby.note_hint(queue, preferred)
        if self._standby.expects(queue, sequence):
            return
        if preferred in (None, self._worker):
            self._note(queue)
        else:
            asyncio.get_running_loop().call_later(_AFTER_PREFERRED_S, self._note, queue)

    def _note_missed(self, queue: QueueName) -> None:
        self._note(queue, num_wakes=0)

    def _note(self, queue: QueueName, *, num_wakes: int = 1) -> None:
        if queue in self._waiting:
            self._waiting[queue] += 1
            self._woken[queue] = self._woken.get(queue, 0) + num_wakes
        else:  # anybody can publish a wake; whether there is such a queue, the stream knows
            self._synced_at = -math.inf
        self._look.set()
