"""What a worker reads of its jobs' logs: before a claim what the claim depends on, after it all that is continued."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from headrace.bus.joblog import JobLog
from headrace.errors import BrokerError, BrokerUnavailableError
from headrace.lifecycle import Backoff
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
_RETRY_FIRST_S: Final = 0.05
_RETRY_MAX_S: Final = 0.5


class Read(msgspec.Struct, frozen=True):
    """What a job's log says of it, and the events that say so: all, or the last one where it says enough.

    `is_overtaken`: others have written since our claim, with which `events` ends.
    """

    state: JobState
    events: tuple[Event, ...] = ()
    is_overtaken: bool = False

    def with_claim(self, started: Event) -> "Read":
        """What it says once our claim is its last event."""
        return Read(step(self.state, started), (*self.events, started))


class _Budget:
    """How many events of one stream are asked for at a time. One for each: none waits for another's answers."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._num_events = 0
        self._is_less = asyncio.Event()

    @contextlib.asynccontextmanager
    async def room_for(self, num_events: int) -> AsyncIterator[None]:
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


class LogReader:
    """Reads logs. One per worker; holds no state but the reads under way."""

    def __init__(self, job_log: JobLog, *, retry_for_s: float) -> None:
        self._log = job_log
        self._retry_for_s = retry_for_s
        self._budgets: dict[str, _Budget] = {}
        self._asked: dict[tuple[str, str], list[asyncio.Future[Event | None]]] = {}
        self._looks: set[asyncio.Task[None]] = set()

    async def before_claim(self, job: Job, queue_sequence: int) -> Read:
        """As much of a job's log as decides about its message `queue_sequence`: the last event, or all.

        Raises BrokerError where the broker does not tell.
        """
        last = await self._last(job)
        if last is None:
            return Read(JobState())
        if last.kind == "accepted":  # only ever appended to an empty log
            return Read(fold((last,)), (last,))
        if tells_all(last) and (last.model, last.queue_sequence) == (job.model, queue_sequence):
            return Read(msgspec.structs.replace(fold((last,)), body_hash=job.body_hash), (last,))
        events = await self._all(job, last)
        return Read(fold(events), events)

    async def history(self, job: Job, claimed: Read) -> Read | None:
        """All of a job's log up to our claim of it, with which `claimed` ends; None where it has a hole that stays.

        The broker took the claim only because what was read before it ends with the job's last event, so where that was
        all, it is not read again (ADR 15). Raises BrokerError where the broker does not tell, or only an old state.
        """
        claim = claimed.events[-1]
        history, newest = claimed, claim.sequence
        for number in range(_HOLE_READS + 1):
            if history.state.is_whole:
                return history
            await asyncio.sleep(_HOLE_PAUSE_S if number else 0)
            read = await self._surely_all(job, claim)
            newest = read[-1].sequence if read else 0
            events = (*(event for event in read if event.sequence < claim.sequence), claim)
            history = Read(fold(events), events, is_overtaken=newest > claim.sequence)
        if newest < (claim.last_sequence or 0):  # a replica that is behind; the job is ours, and is delivered again
            raise BrokerUnavailableError(f"the log of job {job.job} is older than our claim")
        return None

    async def _surely_all(self, job: Job, last: Event) -> tuple[Event, ...]:
        """The log of a job that is ours already, and would wait for its next delivery if we gave up at once."""
        retries = Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S, for_s=self._retry_for_s)
        while True:
            try:
                return await self._all(job, last)
            except BrokerError:
                if retries.is_over:
                    raise
                await retries.pause()

    async def _all(self, job: Job, last: Event) -> tuple[Event, ...]:
        budget = self._budgets.setdefault(self._log.stream_of(job.job), _Budget())
        async with budget.room_for(last.offset + last.count):  # no event has less than one token, but for a few
            return tuple(await self._log.read(job.tenant, job.job))

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
        of_stream: dict[str, list[tuple[tuple[str, str], list[asyncio.Future[Event | None]]]]] = {}
        for key, answers in asked:
            of_stream.setdefault(self._log.stream_of(key[1]), []).append((key, answers))
        for together in of_stream.values():  # a stream that does not answer keeps no other's from being read
            for first in range(0, len(together), _MAX_LOOKS):
                look = asyncio.create_task(self._look(dict(together[first : first + _MAX_LOOKS])), name="look at logs")
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
