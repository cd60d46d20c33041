"""Publishing a job that did not start in time to its fallback model: the first half of a hand-over."""

from collections.abc import Mapping
from typing import Final

from headrace.bus.connection import Bus, Refused, Stored
from headrace.bus.jobqueue import JobQueue
from headrace.errors import BrokerUnavailableError
from headrace.schemas.jobs import Job
from headrace.schemas.subjects import QueueName

__all__ = ["publish_to_fallback"]

_CARRIED: Final = ("traceparent", "tracestate")


async def publish_to_fallback(bus: Bus, job: Job, queue: QueueName, headers: Mapping[str, str]) -> int | None:
    """Put the job into its fallback's queue; the sequence there, for the event that hands it over.

    Nothing runs from that message before the log says that the job is the fallback's. Any number may do this: the
    message is stored once. None where the fallback cannot take it: its queue is full, or it has none.
    Raises BrokerUnavailableError where that is not known.
    """
    if job.fallback is None:
        return None
    fallback = JobQueue(bus, job.fallback)
    there = QueueName(job.fallback_pool, queue.lane, queue.queue)
    carried = {name: headers[name] for name in _CARRIED if name in headers}
    result = await fallback.publish(job.handed_over(bus.clock.now()), there, carried)
    if isinstance(result, Stored):
        return result.sequence
    if isinstance(result, Refused) or (result.is_unserved and not await fallback.exists()):
        return None
    raise BrokerUnavailableError(f"job {job.job} may not be with its fallback {job.fallback}: {result.reason}")
