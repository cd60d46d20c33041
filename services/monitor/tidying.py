"""Job logs made small after the end: a minute later only the last event is left, which holds the whole answer."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

from headrace.bus.connection import Bus, Message
from headrace.bus.following import following
from headrace.bus.joblog import JobLog
from headrace.errors import BrokerError
from headrace.schemas.subjects import is_job_id, is_name

__all__ = ["tidying"]

log = logging.getLogger(__name__)

_AFTER_S: Final = 60.0
_EVERY_S: Final = 5.0
_MAX_WAITING: Final = 100_000
"""Beyond it the oldest are left as they are, until they expire."""
_GROUP: Final = "monitor"


@contextlib.asynccontextmanager
async def tidying(bus: Bus, *, after_s: float = _AFTER_S, every_s: float = _EVERY_S) -> AsyncIterator[None]:
    """Purge the logs of jobs that end inside this context; of several monitors one does each.

    A monitor's task rather than a worker's: the broker cannot permit a purge for one subject of a stream alone. The
    notice of an end may be lost or forged, so the log decides, and what is not purged only takes space.
    """
    ended: deque[tuple[float, str, str]] = deque(maxlen=_MAX_WAITING)

    async def on_ended(message: Message) -> None:
        tenant, job = message.subject.split(".")[-2:]
        if is_name(tenant) and is_job_id(job):
            ended.append((time.monotonic() + after_s, tenant, job))

    async def look_for_ever() -> None:
        await _tidy_for_ever(JobLog(bus), ended, every_s)

    async with following(bus, bus.names.ended("*", "*"), on_push=on_ended, look_for_ever=look_for_ever, queue=_GROUP):
        yield


async def _tidy_for_ever(job_log: JobLog, ended: deque[tuple[float, str, str]], every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        while ended and ended[0][0] <= time.monotonic():
            _, tenant, job = ended.popleft()
            try:
                last = await job_log.last(tenant, job)
                if last is not None and last.is_terminal:
                    await job_log.purge_to_last(tenant, job)
            except BrokerError as error:
                log.info("the log of job %s is not purged: %s", job, error)
