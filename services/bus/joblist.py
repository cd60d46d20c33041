"""The jobs that wait and run: the messages of the job queues, joined with what heartbeats list and the log says."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Final, Literal

import msgspec

from headrace.bus.batchget import batch_get
from headrace.bus.clock import parse_time
from headrace.bus.connection import Bus
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.joblog import JobLog
from headrace.bus.jobqueue import JobQueue, QueueCounts
from headrace.errors import NotProvisionedError
from headrace.schemas import subjects
from headrace.schemas.jobs import Job, decode_job
from headrace.schemas.subjects import QueueName
from headrace.schemas.workers import Heartbeat

__all__ = ["JobListing", "ListedJob", "ListedState", "list_jobs"]

ListedState = Literal["queued", "running"]
"""Running: a live worker holds it, whether its engine works on it yet or not. Queued: no worker holds it."""

_PAGE: Final = 256
_MAX_READS: Final = 64


class ListedJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job that has not ended. `age_s` is how long ago it was queued, `num_ahead` how many of its own queue wait
    before it (None where it does not wait), `attempt` the one that runs or comes next.
    """

    sequence: int
    job: str
    tenant: str
    op: str
    model: str
    queue: QueueName
    state: ListedState
    attempt: int
    age_s: float
    worker: str | None = None
    num_ahead: int | None = None


class JobListing(msgspec.Struct, frozen=True, kw_only=True):
    """The oldest jobs that were asked for, oldest first, how many messages there are at all, and how many of each queue
    of each model wait.
    """

    jobs: list[ListedJob]
    num_messages: int
    waiting: dict[str, QueueCounts]


class _Message(msgspec.Struct, frozen=True):
    """A queue message without its body."""

    sequence: int
    stored_at: float
    queue: QueueName
    job: Job


async def list_jobs(bus: Bus, models: Iterable[str], *, limit: int, state: ListedState | None = None) -> JobListing:
    """At most `limit` jobs of the models. Reads pages of that size until it has them, and writes nothing.

    A model without a stream has none. Raises BrokerUnavailableError.
    """
    beats = [
        seen.beat
        for seen in (await WorkersBucket(bus).list()).values()
        if seen.beat is not None and not seen.beat.is_tombstone
    ]
    now = bus.clock.now()
    found: list[ListedJob] = []
    waiting: dict[str, QueueCounts] = {}
    num_messages = 0
    for model in models:
        lister = _Lister(bus, model, beats, now=now)
        try:
            counts = await lister.queue.counts()
        except NotProvisionedError:
            continue
        num_messages += sum(counts.values())
        waiting[model] = lister.waiting_of(counts)
        found += await lister.oldest(limit=limit, state=state)
    return JobListing(
        jobs=sorted(found, key=lambda each: -each.age_s)[:limit], num_messages=num_messages, waiting=waiting
    )


class _Lister:
    """Lists one model's jobs."""

    def __init__(self, bus: Bus, model: str, beats: Iterable[Heartbeat], *, now: float) -> None:
        self._bus = bus
        self._now = now
        self._model = model
        self._log = JobLog(bus)
        self.queue = JobQueue(bus, model)
        self._holders = {
            held.sequence: (beat.worker, held) for beat in beats if beat.model == model for held in beat.held
        }

    def waiting_of(self, counts: QueueCounts) -> QueueCounts:
        """Messages of each queue less those that are held."""
        waiting = dict(counts)
        for _, held in self._holders.values():
            name = QueueName.from_consumer(held.consumer)
            if name in waiting:
                waiting[name] = max(0, waiting[name] - 1)
        return waiting

    async def oldest(self, *, limit: int, state: ListedState | None) -> list[ListedJob]:
        """The oldest of the model, oldest first."""
        if state == "running":
            messages = await self._held_messages(limit)
            return [self._running(message) for message in messages]
        jobs: list[ListedJob] = []
        num_waiting: dict[QueueName, int] = {}
        subject = self._bus.names.jobs_filter(self._model)
        sequence = 1
        while len(jobs) < limit:
            page = await batch_get(
                self._bus, self.queue.stream, subject, from_sequence=sequence, limit=min(_PAGE, limit)
            )
            if not page:
                break
            sequence = int((page[-1].headers or {})[subjects.HDR_SEQUENCE]) + 1
            messages = [message for each in page if (message := _message(each.headers or {})) is not None]
            attempts = await self._attempts([each for each in messages if each.sequence not in self._holders])
            for message in messages:
                if message.sequence in self._holders:
                    if state is None:
                        jobs.append(self._running(message))
                elif (attempt := attempts[message.sequence]) is not None:
                    num_ahead = num_waiting.get(message.queue, 0)
                    num_waiting[message.queue] = num_ahead + 1
                    jobs.append(self._listed(message, "queued", attempt=attempt, num_ahead=num_ahead))
        return jobs[:limit]

    async def _held_messages(self, limit: int) -> list[_Message]:
        sequences = sorted(self._holders)[:limit]
        found: list[_Message] = []
        for start in range(0, len(sequences), _MAX_READS):
            reads = (self.queue.headers_of(sequence) for sequence in sequences[start : start + _MAX_READS])
            found += (
                message for headers in await asyncio.gather(*reads) if (message := _message(headers or {})) is not None
            )
        return found

    async def _attempts(self, messages: list[_Message]) -> dict[int, int | None]:
        """Which attempt comes next, by sequence; None for a job that has ended, whose message is only not gone yet."""
        attempts: dict[int, int | None] = {}
        for start in range(0, len(messages), _MAX_READS):
            group = messages[start : start + _MAX_READS]
            lasts = await asyncio.gather(*(self._log.last(each.job.tenant, each.job.job) for each in group))
            for message, last in zip(group, lasts, strict=True):
                is_over = last is not None and last.is_terminal
                attempts[message.sequence] = None if is_over else last.attempt if last is not None else 1
        return attempts

    def _running(self, message: _Message) -> ListedJob:
        worker, held = self._holders[message.sequence]
        return self._listed(message, "running", attempt=held.attempt, worker=worker)

    def _listed(
        self,
        message: _Message,
        state: ListedState,
        *,
        attempt: int,
        worker: str | None = None,
        num_ahead: int | None = None,
    ) -> ListedJob:
        return ListedJob(
            sequence=message.sequence,
            job=message.job.job,
            tenant=message.job.tenant,
            op=message.job.op,
            model=self._model,
            queue=message.queue,
            state=state,
            attempt=attempt,
            age_s=round(max(0.0, self._now - message.stored_at), 3),
            worker=worker,
            num_ahead=num_ahead,
        )


def _message(headers: Mapping[str, str]) -> _Message | None:
    """A queue message from its headers; None for one that is no job of ours."""
    job = decode_job(headers, b"")
    queue = QueueName.from_subject(headers.get(subjects.HDR_SUBJECT, ""))
    if job is None or queue is None:
        return None
    stored_at = parse_time(headers.get(subjects.HDR_TIMESTAMP, ""))
    return _Message(
        sequence=int(headers[subjects.HDR_SEQUENCE]),
        stored_at=stored_at if stored_at is not None else job.accepted_at,
        queue=queue,
        job=job,
    )
