"""When and from where a worker fetches: wakes, a look around now and then, and never more than it has room for."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Final

from headrace.bus.connection import Bus, Message, Subscription
from headrace.bus.jobqueue import Delivery, JobQueue
from headrace.errors import BrokerError
from headrace.schemas.subjects import HDR_PASSED, WORKER_GROUP, QueueName
from headrace.worker.discipline import order

__all__ = ["Puller"]

log = logging.getLogger(__name__)

_RESYNC_S: Final = 0.15
_AFTER_ERROR_S: Final = 0.5
_TRIES_AFTER_WAKE: Final = 3
"""A message is announced, and even acknowledged, a moment before its consumer has it (measured: 7 times in 4,000)."""
_TRY_AGAIN_S: Final = 0.003
_MAX_BATCH: Final = 16
"""Messages fetched at once. Anybody can publish wakes, so what they say is bounded."""


class Puller:
    """Fetches while there is `room`, never more messages than that says, and gives each to `take`.

    A worker with room is a member of its pool's wake group, so that a new job wakes one worker that can run it; a
    full one leaves the group. What is known to wait is a hint: a fetch that finds nothing clears it.
    """

    def __init__(
        self,
        bus: Bus,
        queue: JobQueue,
        *,
        pool: str,
        room: Callable[[], int],
        take: Callable[[Delivery], None],
    ) -> None:
        self._bus = bus
        self._queue = queue
        self._pool = pool
        self._room = room
        self._take = take
        self._waiting: dict[QueueName, int] = {}
        self._woken: dict[QueueName, int] = {}
        self._last_served: dict[QueueName, int] = {}
        self._num_fetched = 0
        self._synced_at = -math.inf
        self._look = asyncio.Event()
        self._membership: Subscription | None = None
        self._is_stopped = False

    def look(self) -> None:
        """Look for work now: room was made, or the connection came back."""
        self._look.set()

    def stop(self) -> None:
        """Fetch nothing more; `run` returns once a fetch under way is over."""
        self._is_stopped = True
        self._look.set()

    async def run(self) -> None:
        """Fetch until stopped."""
        try:
            while not self._is_stopped:
                await self._told_to_look()
                if self._is_stopped:
                    return
                try:
                    await self._round()
                except BrokerError as error:
                    log.warning("cannot fetch: %s", error)
                    await asyncio.sleep(_AFTER_ERROR_S)
        finally:
            await self._leave()

    async def _told_to_look(self) -> None:
        try:
            async with asyncio.timeout(_RESYNC_S):
                await self._look.wait()
        except TimeoutError:
            return
        self._look.clear()

    async def _round(self) -> None:
        if not self._has_room():
            await self._leave()
            return
        await self._join()
        resync = time.monotonic() - self._synced_at >= _RESYNC_S
        if resync:
            counts = await self._queue.counts()
            self._synced_at = time.monotonic()
            known = dict.fromkeys(self._waiting, 0)
            self._waiting = known | {queue: number for queue, number in counts.items() if queue.pool == self._pool}
        num_tries = _TRIES_AFTER_WAKE if not resync else 1
        batch = 1
        while (room := self._room()) > 0 and not self._is_stopped:
            deliveries = await self._fetch_next(num_tries, batch=batch, room=room)
            if not deliveries:
                return
            batch = 2 * len(deliveries)
            for delivery in deliveries:
                self._take(delivery)
        if not self._has_room():
            await self._leave()

    def _has_room(self) -> bool:
        return self._room() > 0

    async def _fetch_next(self, num_tries: int, *, batch: int, room: int) -> list[Delivery]:
        queues = order(self._waiting, last_served=self._last_served)
        for queue in queues:
            limit = self._limit(queue, queues, batch=batch, room=room)
            deliveries = await self._queue.fetch_many(queue, limit)
            for _ in range(num_tries - 1):
                if deliveries:
                    break
                await asyncio.sleep(_TRY_AGAIN_S)
                deliveries = await self._queue.fetch_many(queue, limit)
            num_left = self._waiting.get(queue, 0) - len(deliveries)
            self._waiting[queue] = max(0, num_left) if deliveries else 0
            self._woken[queue] = max(0, self._woken.get(queue, 0) - len(deliveries)) if deliveries else 0
            if deliveries:
                self._num_fetched += 1
                self._last_served[queue] = self._num_fetched
                return deliveries
        return []

    def _limit(self, queue: QueueName, queues: list[QueueName], *, batch: int, room: int) -> int:
        """As many as we were woken for, since each wake goes to one worker; else twice as many as came at last.

        Queues of one lane take turns by single messages.
        """
        if any(other.lane == queue.lane for other in queues if other != queue):
            return 1
        return min(max(batch, self._woken.get(queue, 0)), room, _MAX_BATCH)

    async def _join(self) -> None:
        if self._membership is None:
            subject = self._bus.names.wake_pool(self._queue.model, self._pool)
            self._membership = await self._bus.subscribe(subject, queue=WORKER_GROUP, cb=self._on_wake)

    async def _leave(self) -> None:
        membership, self._membership = self._membership, None
        if membership is not None and not self._bus.nc.is_closed:
            await membership.unsubscribe()

    async def _on_wake(self, message: Message) -> None:
        queue = QueueName.from_subject(message.subject)
        if queue is None:
            return
        headers = message.headers or {}
        if self._has_room() and not self._is_stopped:
            if queue in self._waiting:
                self._waiting[queue] += 1
                self._woken[queue] = self._woken.get(queue, 0) + 1
            else:  # anybody can publish a wake; whether there is such a queue, the stream knows
                self._synced_at = -math.inf
            self._look.set()
        elif HDR_PASSED not in headers:  # it came as we filled up: somebody else may have room
            await self._bus.publish(message.subject, headers={**headers, HDR_PASSED: "1"})
