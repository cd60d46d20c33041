"""Requests in flight of one tenant: counted in its own queue, and published only if nobody else did since the count."""

import asyncio
from collections.abc import Mapping
from typing import Final

from headrace.bus.connection import Bus, Refused, Stored, StoreResult
from headrace.bus.jobqueue import JobQueue
from headrace.bus.occupancy import last_sequence, num_messages
from headrace.lifecycle import Backoff
from headrace.schemas.jobs import Job
from headrace.schemas.subjects import QueueName

__all__ = ["InFlight"]

_RETRY_FIRST_S: Final = 0.001
_RETRY_MAX_S: Final = 0.02
_FOR_S: Final = 5.0
_MAX_LOCKS: Final = 4_096


class InFlight:
    """Publishes within a limit that holds exactly, however many routers publish at once.

    The count is taken after the queue's last sequence was read, and the publish names that sequence: the broker refuses
    it if anybody published to the queue in between. A message that ended in between only makes the count too high.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}

    async def publish(
        self, jobs: JobQueue, job: Job, queue: QueueName, headers: Mapping[str, str], *, limit: int
    ) -> StoreResult | None:
        """What became of the publish; None, with nothing stored, where `limit` requests are in flight already."""
        key = (job.model, queue.queue)
        if key not in self._locks and len(self._locks) >= _MAX_LOCKS:
            self._locks = {known: lock for known, lock in self._locks.items() if lock.locked()}
        async with self._locks.setdefault(key, asyncio.Lock()):
            retries = Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S, for_s=_FOR_S)  # from its turn on
            while True:
                last = await last_sequence(self._bus, job.model, queue.queue)
                if await num_messages(self._bus, job.model, queue.queue) >= limit:
                    return None
                result = await jobs.publish(job, queue, headers, after=last)
                if isinstance(result, Stored) or retries.is_over:
                    return result
                if not (isinstance(result, Refused) and result.is_lost_race):
                    return result
                await retries.pause()
