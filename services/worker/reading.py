"""What a worker reads of its jobs' logs: before a claim what the claim depends on, after it all that is continued."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from headrace.bus.joblog import JobLog
from headrace.schemas.events import Event
from headrace.schemas.jobs import Job
from headrace.schemas.states import JobState, fold, step, tells_all

__all__ = ["LogReader", "Read"]

_MAX_EVENTS: Final = 128
"""Events asked for at a time, about. What has come is taken in one go: were all logs of many jobs that come at once
asked for together, each claim's answer would wait behind all of them, and the first would run when the last is read.
"""
_MAX_LOOKS: Final = 256
"""Last events read by one request; the broker answers up to 1,024."""
_HOLE_READS: Final = 10
_HOLE_PAUSE_S: Final = 0.2


class Read(msgspec.Struct, frozen=True):
    """What a job's log says of it, and the events that say so: all, or the last one where it says enough."""

    state: JobState
    events: tuple[Event, ...] = ()

    def with_claim(self, started: Event) -> "Read":
        """What it says once our claim is its last event."""
        return Read(step(self.state, started), (*self.events, started))


class LogReader:
    """Reads logs. One per worker; holds no state but the reads under way."""

    def __init__(self, job_log: JobLog) -> None:
        self._log = job_log
        self._turn = asyncio.Lock()
        self._num_events = 0
        self._is_less = asyncio.Event()
        self._asked: dict[tuple[str, str], list[asyncio.Future[Event | None]]] = {}
        self._looks: set[asyncio.Task[None]] = set()

    async def before_claim(self, job: Job) -> Read:
        """As much of a job's log as decides about it: its last event, or where that leaves something open, all.

        Raises BrokerError where the broker does not tell.
        """
        last = await self._last(job)
        if last is None:
            return Read(JobState())
        events = (last,) if tells_all(last) else await self._all(job, last)
        return Read(fold(events), events)

    async def history(self, job: Job, claimed: Read) -> Read | None:
        """All of a job's log up to our claim of it, with which `claimed` ends; None where it has a hole that stays.

        The broker took the claim only because what was read before it ends with the job's last event, so where that was
        all, it is not read again (ADR 15). Raises BrokerError where the broker does not tell.
        """
        sequence = claimed.state.sequence
        history = claimed
        for number in range(_HOLE_READS + 1):
            if history.state.is_whole and history.state.sequence == sequence:
                return history
            await asyncio.sleep(_HOLE_PAUSE_S if number else 0)
            events = tuple(event for event in await self._all(job, claimed.events[-1]) if event.sequence <= sequence)
            history = Read(fold(events), events)
        return None

    async def _all(self, job: Job, last: Event) -> tuple[Event, ...]:
        async with self._room_for(last.offset + last.count):  # no event has less than one token, but for a few
            return tuple(await self._log.read(job.tenant, job.job))

    @contextlib.asynccontextmanager
    async def _room_for(self, num_events: int) -> AsyncIterator[None]:
        """Wait, in turn, until so many more may be asked for; a log that is longer than all is read alone."""
        num_events = min(num_events, _MAX_EVENTS)
        async with self._turn:
            while self._num_events + num_events > _MAX_EVENTS:
                self._is_less.clear()
                await self._is_less.wait()
            self._num_events += num_events
        try:
            yield
        finally:
            self._num_events -= num_events
            self._is_less.set()

    async def _last(self, job: Job) -> Event | None:
        """The last event; of jobs asked for in the same turn of the loop, all by one request."""
        loop = asyncio.get_running_loop()
        if not self._asked:
            loop.call_soon(self._send)
        answer: asyncio.Future[Event | None] = loop.create_future()
        self._asked.setdefault((job.tenant, job.job), []).append(answer)
        return await answer

    def _send(self) -> None:
        asked, self._asked = list(self._asked.items()), {}
        for first in range(0, len(asked), _MAX_LOOKS):
            look = asyncio.create_task(self._look(dict(asked[first : first + _MAX_LOOKS])), name="look at logs")
            self._looks.add(look)
            look.add_done_callback(self._looks.discard)

    async def _look(self, asked: dict[tuple[str, str], list[asyncio.Future[Event | None]]]) -> None:
        lasts: dict[tuple[str, str], Event] = {}
        failure: Exception | None = None
        try:
            if len(asked) == 1:
                ((tenant, job),) = asked
                last = await self._log.last(tenant, job)
                lasts = {(tenant, job): last} if last is not None else {}
            else:
                lasts = await self._log.last_of(list(asked))
        except Exception as error:  # whoever waits here is told, whatever it was
            failure = error
        for key, answers in asked.items():
            for answer in answers:
                if answer.done():
                    continue
                if failure is not None:
                    answer.set_exception(failure)
                else:
                    answer.set_result(lasts.get(key))
