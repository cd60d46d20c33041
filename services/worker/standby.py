"""Where an idle worker waits for its next job: one pull parked at one queue, which needs no wake."""

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Final

from headrace.bus.connection import Bus
from headrace.bus.jobqueue import Delivery, JobQueue
from headrace.bus.parking import ParkedPull
from headrace.schemas.subjects import QueueName

__all__ = ["UNSERVED_AFTER_S", "Standby", "place_to_park"]

UNSERVED_AFTER_S: Final = 0.004
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

    It is never the only way: a wake for what should come by it is followed by a fetch where nothing came in
    `UNSERVED_AFTER_S`, and until that fetch finds nothing, or the next request is parked, the pull covers nothing.
    """

    def __init__(
        self,
        bus: Bus,
        jobs: JobQueue,
        *,
        worker: str,
        pool: str,
        take: Callable[[Delivery], Awaitable[None]],
        look: Callable[[], None],
    ) -> None:
        self._jobs = jobs
        self._worker = worker
        self._pool = pool
        self._take = take
        self._pull = ParkedPull(bus, jobs, take=self._on_job, ended=look)
        self._last: QueueName | None = None
        self._avoided: dict[QueueName, float] = {}
        self._given: OrderedDict[str, None] = OrderedDict()
        self._is_doubted = False

    @property
    def is_parked(self) -> bool:
        """Whether a job may come unasked."""
        return self._pull.queue is not None

    def covers(self, queue: QueueName) -> bool:
        """Whether the next job of the queue comes by itself, as far as is known."""
        return self._pull.queue == queue and not self._is_doubted

    def doubt(self) -> None:
        """A job that was announced has not come."""
        self._is_doubted = True

    def trust(self, queue: QueueName) -> None:
        """A fetch found nothing in the queue, so nothing is missing."""
        if self._pull.queue == queue:
            self._is_doubted = False

    def was_given(self, sequence: str) -> bool:
        """Whether this job came by the parked pull, so that its wake has nothing to say."""
        return sequence in self._given

    def note(self, delivery: Delivery) -> None:
        """A job of ours came, by whatever way."""
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
        self._given[str(delivery.sequence)] = None
        while len(self._given) > _MAX_GIVEN:
            self._given.popitem(last=False)
        await self._take(delivery)
