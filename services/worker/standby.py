"""Where an idle worker waits for its next job: one pull parked at one queue, which needs no wake."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Final

from headrace.bus.connection import Bus
from headrace.bus.jobqueue import Delivery, JobQueue
from headrace.bus.parking import ParkedPull
from headrace.schemas.subjects import QueueName

__all__ = ["Standby", "place_to_park"]

_MISSED_AFTER_S: Final = 0.004
"""How long after its wake a job may come by a parked pull before it is fetched after all."""
_AFTER_HINT_S: Final = 60.0
"""How long no pull is parked at a queue some of whose jobs are better run elsewhere: a worker that is named for its
warm cache must not lose them to whoever has waited longest, and what does not fit here is not to come unasked."""
_AFTER_HAND_BACK_S: Final = 1.0
"""The same after a job was handed back to it, or it would come straight back."""
_MAX_AVOIDED: Final = 1024
_MAX_GIVEN: Final = 64


def place_to_park(
    last: QueueName | None, known: Iterable[QueueName], *, pool: str, avoided: Collection[QueueName]
) -> QueueName | None:
    """The queue at which an idle worker of a pool waits: where its last job came from, else the only one known.

    None where that is one to avoid, or none is known, or several are: then wakes say what comes.
    """
    own = {queue for queue in known if queue.pool == pool}
    place = last if last is not None and last.pool == pool else next(iter(own)) if len(own) == 1 else None
    return place if place not in avoided else None


class Standby:
    """The parked pull of one worker: where it stands, and which wakes it makes needless.

    It is never the only way: `missed` is called for a queue where a job was announced that has not come by it within
    4 ms, likely since another worker was parked there before. Until a fetch then finds nothing, or another request is
    parked, it covers nothing.
    """

    def __init__(
        self,
        bus: Bus,
        jobs: JobQueue,
        *,
        worker: str,
        pool: str,
        take: Callable[[Delivery], Awaitable[None]],
        missed: Callable[[QueueName], None],
        look: Callable[[], None],
    ) -> None:
        self._jobs = jobs
        self._worker = worker
        self._pool = pool
        self._take = take
        self._missed = missed
        self._pull = ParkedPull(bus, jobs, take=self._on_job, ended=look)
        self._last: QueueName | None = None
        self._avoided: dict[QueueName, float] = {}
        self._given: OrderedDict[str, None] = OrderedDict()
        self._expected: dict[int, tuple[QueueName, str, asyncio.TimerHandle]] = {}
        self._num_expected = 0
        self._is_doubted = False

    @property
    def is_parked(self) -> bool:
        """Whether a job may come unasked."""
        return self._pull.queue is not None

    def covers(self, queue: QueueName) -> bool:
        """Whether the next job of the queue comes by itself, as far as is known."""
        return self._pull.queue == queue and not self._is_doubted

    def trust(self, queue: QueueName) -> None:
        """A fetch found nothing in the queue, so nothing is missing."""
        if self._pull.queue == queue:
            self._is_doubted = False

    def expects(self, queue: QueueName, sequence: str) -> bool:
        """Whether a job that was announced came by the parked pull, or is about to, so that its wake asks for nothing.

        `sequence` is its place in the stream, "" where the wake does not tell.
        """
        if sequence in self._given:
            return True
        if not self.covers(queue):
            return False
        self._num_expected += 1
        timer = asyncio.get_running_loop().call_later(_MISSED_AFTER_S, self._miss, self._num_expected)
        self._expected[self._num_expected] = (queue, sequence, timer)
        return True

    def _miss(self, number: int) -> None:
        queue, _, _ = self._expected.pop(number)
        self._is_doubted = True
        self._missed(queue)

    def note(self, delivery: Delivery) -> None:
        """A job of ours came, by whatever way."""
        if delivery.queue.pool == self._pool:
            self._last = delivery.queue
        if delivery.job is not None:
            self.note_hint(delivery.queue, delivery.job.preferred)

    def note_hint(self, queue: QueueName, preferred: str | None) -> None:
        """A job of the queue names the worker that has its beginning in its cache."""
        if preferred is not None and preferred != self._worker:
            self.avoid(queue)

    def avoid(self, queue: QueueName) -> None:
        """Park at that queue no more for a while."""
        if queue.pool == self._pool and (queue in self._avoided or len(self._avoided) < _MAX_AVOIDED):
            self._avoided[queue] = time.monotonic() + _AFTER_HINT_S

    async def settle(self, known: Iterable[QueueName]) -> None:
        """Nothing is known to wait, and nothing is held: wait where the next job is likely to come from."""
        now = time.monotonic()
        self._avoided = {queue: until for queue, until in self._avoided.items() if until > now}
        handed_back = {queue for queue, at in self._jobs.handed_back_at.items() if now - at < _AFTER_HAND_BACK_S}
        place = place_to_park(self._last, known, pool=self._pool, avoided=self._avoided.keys() | handed_back)
        if place is None:
            await self.withdraw()
        elif self._pull.queue != place:
            self._is_doubted = False
            await self._pull.park(place)

    async def withdraw(self) -> None:
        """Wait nowhere; every job that was sent here has been taken on return. Raises as `ParkedPull.withdraw`."""
        await self._pull.withdraw()

    async def close(self) -> None:
        """Wait nowhere any more. Raises as `withdraw`."""
        await self._pull.close()

    async def _on_job(self, delivery: Delivery) -> None:
        sequence = str(delivery.sequence)
        self._given[sequence] = None
        while len(self._given) > _MAX_GIVEN:
            self._given.popitem(last=False)
        expected, self._expected = list(self._expected.values()), {}
        for _, _, timer in expected:
            timer.cancel()
        await self._take(delivery)
        for queue, announced, _ in expected:  # one pull brings one job, and the others wait
            if announced != sequence:
                self._missed(queue)
