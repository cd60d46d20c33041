"""Plays one schedule against a real broker and says what was wrong afterwards."""

import asyncio
import contextlib
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

import headrace.client
from headrace.bus.connection import Bus
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.joblog import JobLog
from headrace.bus.jobqueue import JobQueue
from headrace.bus.provision import ensure_jobs_stream, ensure_provisioned
from headrace.bus.server import BrokerInfo
from headrace.client import Client, Delta, Done, Requeued, Started
from headrace.client.stream import JobStream
from headrace.errors import (
    BrokerError,
    BrokerUnavailableError,
    HeadraceError,
    JobCancelledError,
    JobExpiredError,
    JobFailedError,
    RequestError,
)
from headrace.schemas.events import Event
from headrace.settings import Settings
from tests.deployment import MODEL
from tests.faults.checking import Seen, problems_of_log, problems_of_reader
from tests.faults.lossy import losing
from tests.faults.schedules import MAX_FAULTS, Action, PlannedJob, Schedule
from tests.faults.stage import Stage, watching_logs

__all__ = ["play"]

_PLAYED_WITHIN_S = 90.0
_SETTLED_WITHIN_S = 30.0


async def play(schedule: Schedule, broker: BrokerInfo) -> list[str]:
    """Play it under a prefix of its own; what was wrong, nothing if every promise was kept."""
    settings = Settings(
        prefix=f"f{schedule.seed}-{secrets.token_hex(3)}.v1",
        heartbeat_s=0.1,
        worker_ttl_s=1.0,
        ack_wait_s=1.5,
        stall_s=0.7,
        request_timeout_s=1.0,
        grace_s=0.5,
        max_attempts=MAX_FAULTS,
    )
    with tempfile.TemporaryDirectory() as state_dir, watching_logs() as logged:
        async with headrace.client.connect(broker.url, settings=settings) as client:
            stage = Stage(broker, settings, client, Path(state_dir))
            run = _Run(schedule, stage, client)
            try:
                async with losing(schedule.losses, settings.prefix):
                    problems = await run.play()
                    problems += await stage.close()
                problems += await run.check()
            finally:
                await stage.close()
                await _delete_streams(client.bus)
    return [*problems, *(f"logged: {line}" for line in logged)]


class _Run:
    def __init__(self, schedule: Schedule, stage: Stage, client: Client) -> None:
        self._schedule = schedule
        self._stage = stage
        self._client = client
        self._began = 0.0
        self._seen: list[tuple[PlannedJob, Seen]] = []

    async def play(self) -> list[str]:
        """Raise the curtain, strike, heal, wait for the end of every job."""
        await ensure_provisioned(self._client.bus)
        await ensure_jobs_stream(
            self._client.bus, MODEL
        )  # known from the start: requests queue until a worker is there
        names = [f"w{number}" for number in range(1, self._schedule.num_workers + 1)]
        names += ["r1", "r2", *(f"m{number}" for number in range(1, self._schedule.num_monitors + 1))]
        for name in names:
            await self._start(name)
        try:
            async with asyncio.timeout(_PLAYED_WITHIN_S), asyncio.TaskGroup() as group:
                supervising = group.create_task(self._supervise())
                await self._until_workers_beat(self._schedule.num_workers)
                self._began = time.monotonic()
                readers = [task for job in self._schedule.jobs for task in self._plan(group, job)]
                readers.append(group.create_task(self._strike()))
                await asyncio.wait(readers)
                supervising.cancel()
        except TimeoutError:
            return [f"after {_PLAYED_WITHIN_S:g} s there is no end of it", *await self._unfinished()]
        return self._stage.problems() + await self._settled()

    async def check(self) -> list[str]:
        """Compare logs and readers with what was wanted."""
        problems = []
        log = JobLog(self._client.bus)
        for job in self._schedule.jobs:
            events = await log.read("default", job.wanted.job)
            found = problems_of_log(job.wanted, events)
            for planned, seen in self._seen:
                if planned is job and seen.end:
                    found += problems_of_reader(job.wanted, events, seen)
            problems += found + ([_shown(events)] if found else [])
        return problems

    # readers

    def _plan(self, group: asyncio.TaskGroup, job: PlannedJob) -> list[asyncio.Task[None]]:
        tasks = [self._read(job, job.at_s, self._submit(job))]
        if job.also_at_s is not None:
            tasks.append(self._read(job, job.also_at_s, self._submit(job)))
        if job.attach_at_s is not None:
            tasks.append(self._attach(job, job.attach_at_s))
        if job.cancel_at_s is not None:
            tasks.append(self._cancel(job, job.cancel_at_s))
        return [group.create_task(task) for task in tasks]

    def _submit(self, job: PlannedJob) -> JobStream:
        wanted = job.wanted
        body: dict[str, Any] = {"max_tokens": wanted.num_tokens, "ignore_eos": True, "stream": wanted.is_streaming}
        if wanted.n > 1:
            body["n"] = wanted.n
        if job.op == "chat":
            body["messages"] = [{"role": "user", "content": wanted.prompt}]
        else:
            body["prompt"] = wanted.prompt
        return self._client.stream(model=MODEL, job_id=wanted.job, priority=job.priority, **body)

    async def _read(self, job: PlannedJob, at_s: float, stream: JobStream, after: int = 0) -> None:
        seen = Seen(job=job.wanted.job, after=after)
        self._seen.append((job, seen))
        await self._until(at_s)
        try:
            async with stream:
                async for event in stream:
                    if isinstance(event, Started):
                        seen.starts.append(event)
                    elif isinstance(event, Requeued):
                        seen.requeues.append(event)
                    elif isinstance(event, Delta):
                        seen.deltas.append(event)
                        if job.is_slow:
                            await asyncio.sleep(0.05)
                    elif isinstance(event, Done):
                        seen.done, seen.end = event, "done"
        except JobCancelledError:
            seen.end = "cancelled"
        except JobExpiredError:
            seen.end = "expired"
        except JobFailedError:
            seen.end = "failed"
        except HeadraceError as error:
            seen.end = f"{type(error).__name__}: {error}"

    async def _attach(self, job: PlannedJob, at_s: float) -> None:
        await self._until(at_s)
        while not await self._is_known(job.wanted.job):  # it cannot be attached to before
            await asyncio.sleep(0.05)
        await self._read(job, 0, self._client.attach(job.wanted.job, after=job.attach_after), job.attach_after)

    async def _is_known(self, job: str) -> bool:
        try:
            return await JobLog(self._client.bus).last("default", job) is not None
        except BrokerError:
            return False

    async def _cancel(self, job: PlannedJob, at_s: float) -> None:
        await self._until(at_s)
        with contextlib.suppress(RequestError, BrokerError):  # it may not be known yet, or the routers may be away
            await self._client.cancel(job.wanted.job)

    # faults

    async def _strike(self) -> None:
        for action in self._schedule.actions:
            await self._until(action.at_s)
            await self._do(action)
        for name, player in list(self._stage.players.items()):  # what is left must be able to finish
            player.thaw()
            if player.is_over and not name.startswith("m"):
                await self._start(name)

    async def _supervise(self) -> None:
        """Start again who gave up at its start: whoever runs Headrace has something that does."""
        while True:
            for name, player in list(self._stage.players.items()):
                if player.failed_to_start:
                    await self._start(name)
            await asyncio.sleep(0.1)

    async def _do(self, action: Action) -> None:
        player = self._stage.players[action.target]
        if action.kind == "stranger naks":
            await self._nak_something()
        elif action.kind == "restart":
            if player.is_over:
                player.thaw()
                await self._start(action.target)
        elif player.is_over:
            return
        elif action.kind == "kill":
            await player.kill()
        elif action.kind == "freeze":
            player.freeze()
        elif action.kind == "thaw":
            player.thaw()
        elif action.kind == "drop":
            player.drop()
        elif action.kind == "drain":
            player.thaw()
            player.drain()
        elif player.engine is not None:  # what a process has in it cannot be reached
            player.engine.die()

    async def _start(self, name: str) -> None:
        schedule = self._schedule
        before = self._stage.players.get(name)
        if before is not None:  # a worker's id belongs to the one before until that has left
            await before.ended()
        if name.startswith("r"):
            await self._stage.router(name)
        elif name.startswith("m"):
            await self._stage.monitor(name, has_notices=schedule.has_notices)
        else:
            start = self._stage.worker_process if schedule.has_processes else self._stage.worker
            await start(name, max_concurrency=schedule.max_concurrency, tokens_per_second=schedule.tokens_per_second)

    async def _nak_something(self) -> None:
        """A late or wrong NAK: the broker delivers a message once more, to whoever asks."""
        queue = JobQueue(self._client.bus, MODEL)
        with contextlib.suppress(BrokerError):
            for name in await queue.counts():
                progress = await queue.progress(name)
                if progress is None or not progress.num_in_flight:
                    continue
                for sequence in range(progress.ack_floor + 1, progress.delivered + 1):
                    await queue.nak_on_behalf(name, sequence, progress)

    # waiting

    async def _until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, self._began + at_s - time.monotonic()))

    async def _until_workers_beat(self, number: int) -> None:
        bucket = WorkersBucket(self._client.bus)
        while True:
            with contextlib.suppress(BrokerUnavailableError):  # it is slow on a busy machine; the schedule has a limit
                if sum(seen.beat is not None for seen in (await bucket.list()).values()) >= number:
                    return
            await asyncio.sleep(0.05)

    async def _settled(self) -> list[str]:
        """Wait until nothing is queued, held or reserved; what still is, otherwise."""
        problems = ["nothing could be read of what is left"]
        until = time.monotonic() + _SETTLED_WITHIN_S
        while problems and time.monotonic() < until:
            with contextlib.suppress(BrokerUnavailableError):
                problems = await self._left_over()
            if problems:
                await asyncio.sleep(0.1)
        for name, player in self._stage.players.items():
            if player.engine is not None and not player.is_over and player.engine.num_running:
                problems.append(f"the engine of {name} still runs {player.engine.num_running} requests")
        return problems + self._stage.problems()

    async def _left_over(self) -> list[str]:
        queue, bucket = JobQueue(self._client.bus, MODEL), WorkersBucket(self._client.bus)
        left = [f"{number} messages of {name} are left" for name, number in (await queue.counts()).items()]
        for worker, seen in (await bucket.list()).items():
            beat = seen.beat
            if beat is not None and not beat.is_tombstone and (beat.held or beat.running or beat.kv_reserved_tokens):
                left.append(f"{worker} still holds {beat.held}, {beat.kv_reserved_tokens} tokens reserved")
        return left

    async def _unfinished(self) -> list[str]:
        log = JobLog(self._client.bus)
        found = []
        for job, seen in self._seen:
            if not seen.end:
                found.append(f"{job.wanted.job} (reader after {seen.after}) has {len(seen.deltas)} deltas and no end")
                found.append(_shown(await log.read("default", job.wanted.job)))
        return found + self._stage.problems()


async def _delete_streams(bus: Bus) -> None:
    names = bus.names
    streams = [names.jobs_stream(MODEL), names.log_stream(0), names.dead_stream]
    streams += [f"KV_{bucket}" for bucket in (names.workers_bucket, names.config_bucket, names.usage_bucket)]
    for stream in streams:
        with contextlib.suppress(Exception):  # what is left hurts nobody
            await bus.api(f"STREAM.DELETE.{stream}")


def _shown(events: list[Event]) -> str:
    lines = []
    for event in events:
        owner = f" by {event.owner.worker}/{event.owner.epoch[:4]}/{event.owner.engine_run}" if event.owner else ""
        more = f" {event.reason} lost={event.lost}" if event.kind == "requeued" else ""
        error = event.error() if event.kind in ("failed", "expired") else None
        more += f" {error.code}: {error.message}" if error is not None else ""
        lines.append(
            f"    {event.sequence}<-{event.last_sequence} {event.kind} attempt {event.attempt}"
            f" tokens {event.offset}+{event.count}{owner}{more}"
        )
    return "\n".join(lines)
