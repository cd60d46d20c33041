"""Everything a deployment tells, asked side by side: reads only, each with a timeout, whatever the broker does."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

import msgspec

from headrace.bus.batchget import batch_get, sequence_of
from headrace.bus.clock import parse_time
from headrace.bus.configuration import StoredEntry, config_of, read_entries
from headrace.bus.connection import Bus, connect
from headrace.bus.consumers import Consumer, list_consumers
from headrace.bus.deadletters import DeadLetters
from headrace.bus.disconnects import Disconnect, disconnects
from headrace.bus.instancelist import Snapshot, read_instances
from headrace.bus.joblog import JobLog
from headrace.bus.overview import overview
from headrace.bus.provision import StreamConfig, deployment_streams, jobs_stream
from headrace.bus.survey import (
    Account,
    Beat,
    ask_parts,
    list_streams,
    read_account,
    read_beats,
    read_stream,
    server_of,
)
from headrace.doctor.facts import BrokerFacts, Facts, Known, StreamFacts, SystemFacts, Unread, WaitingJob, value_of
from headrace.errors import BrokerDeniedError, BrokerError, BrokerUnavailableError, ConfigError, NotProvisionedError
from headrace.schemas import subjects
from headrace.schemas.config import Config
from headrace.schemas.jobs import Job, decode_job
from headrace.schemas.overview import Overview
from headrace.schemas.subjects import QueueName

__all__ = ["gather"]

_WITHIN_S: Final = 10.0
"""Longest time for everything; what has no answer by then is not known."""

_NOTICE_WITHIN_S: Final = 2.0
_MAX_AT_ONCE: Final = 16
_MAX_WAITING: Final = 25
"""Oldest messages of a model that are looked at."""
_MAX_BACKLOGS: Final = 20
"""Models whose waiting jobs are looked at."""
_PARTS: Final = ("headrace-router", "headrace-monitor", "headrace-gateway")
_NO_JETSTREAM: Final = Unread(reason="there is no JetStream")

T = TypeVar("T")
Say = Callable[[str], None]


async def gather(bus: Bus, *, system_url: str | None, say: Say) -> Facts:
    """What is to be known over this connection; `say` is told what is asked.

    `system_url` is where disconnect notices come from, None where this machine's settings do not say. Raises
    BrokerUnavailableError where the broker is mute.
    """
    say("asking the broker about itself")
    until = asyncio.get_running_loop().time() + _WITHIN_S
    asked_at = time.monotonic()
    await bus.flush()
    round_trip_s = time.monotonic() - asked_at
    account, _ = await asyncio.gather(_account(bus), bus.sync_clock())
    has_jetstream = account is not None
    say("asking for parts, streams, workers and queues")
    deployment = _Deployment(bus, until)
    system, parts, _ = await asyncio.gather(
        _system(bus, system_url, until),
        _read(ask_parts(bus, wanted=_PARTS), until),
        deployment.read() if has_jetstream else asyncio.sleep(0),
    )
    return Facts(
        settings=bus.settings,
        broker=BrokerFacts(url=bus.shown_url, round_trip_s=round_trip_s, **msgspec.structs.asdict(server_of(bus))),
        account=account if account is not None else _NO_JETSTREAM,
        has_jetstream=has_jetstream,
        system=system,
        stream_names=deployment.stream_names,
        streams=deployment.streams,
        consumers=deployment.consumers,
        parts=parts,
        beats=deployment.beats,
        overview=deployment.overview,
        entries=deployment.entries,
        config=deployment.config,
        instances=deployment.instances,
        waiting=deployment.waiting,
        num_dead=deployment.num_dead,
    )


async def _account(bus: Bus) -> Known[Account] | Unread | None:
    """None where there is no JetStream."""
    try:
        return Known(await read_account(bus))
    except NotProvisionedError:
        return None
    except BrokerUnavailableError as error:
        return Unread(reason=str(error), is_denied=isinstance(error, BrokerDeniedError))


async def _system(bus: Bus, url: str | None, until: float) -> SystemFacts:
    """Whether notices of disconnects come: a connection of ours is ended to see."""
    if url is None:
        return SystemFacts(is_set=False)
    ended: set[str] = set()
    heard = asyncio.Event()

    async def on_notice(notice: Disconnect) -> None:
        ended.add(notice.connection)
        heard.set()

    async def is_told_of(connection: str) -> None:
        while connection not in ended:
            heard.clear()
            await heard.wait()

    try:
        async with asyncio.timeout_at(until), disconnects(url, bus.settings, handler=on_notice):
            async with connect(bus.url, bus.settings, name="headrace-doctor", inbox_prefix=bus.inbox_prefix) as other:
                connection = other.connection_id
            async with asyncio.timeout(_NOTICE_WITHIN_S):
                await is_told_of(connection)
    except TimeoutError:
        return SystemFacts(
            is_set=True, trouble="it told nothing of a connection that was ended: is its user the system's?"
        )
    except (BrokerError, ConfigError) as error:
        return SystemFacts(is_set=True, trouble=str(error))
    return SystemFacts(is_set=True)


class _Deployment:
    """What is in the streams and buckets. Before it is read nothing is known of them."""

    def __init__(self, bus: Bus, until: float) -> None:
        self._bus = bus
        self._until = until
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)
        self.stream_names: Known[list[str]] | Unread = _NO_JETSTREAM
        self.streams: tuple[StreamFacts, ...] = ()
        self.consumers: dict[str, Known[list[Consumer]] | Unread] = {}
        self.beats: Known[list[Beat]] | Unread = _NO_JETSTREAM
        self.overview: Known[Overview] | Unread = _NO_JETSTREAM
        self.entries: Known[dict[str, StoredEntry]] | Unread = _NO_JETSTREAM
        self.config = Config()
        self.instances: Known[Snapshot] | Unread = _NO_JETSTREAM
        self.waiting: Known[list[WaitingJob]] | Unread = _NO_JETSTREAM
        self.num_dead: Known[int] | Unread = _NO_JETSTREAM

    async def read(self) -> None:
        """Read all of it."""
        bus = self._bus
        (
            self.stream_names,
            self.entries,
            self.instances,
            self.beats,
            self.overview,
            self.num_dead,
        ) = await asyncio.gather(
            _read(list_streams(bus), self._until),
            _read(read_entries(bus), self._until),
            _read(read_instances(bus), self._until),
            _read(read_beats(bus), self._until),
            _read(overview(bus), self._until),
            _read(DeadLetters(bus).count(), self._until),
        )
        stored = value_of(self.entries, {})
        self.config = config_of({key: each.entry for key, each in stored.items() if each.entry is not None})
        names = value_of(self.stream_names, [])
        models = sorted(model for name in names if (model := bus.names.model_of_stream(name)) is not None)
        self.streams, consumers, self.waiting = await asyncio.gather(
            self._streams(models),
            asyncio.gather(*(self._slotted(list_consumers(bus, bus.names.jobs_stream(model))) for model in models)),
            _read(self._waiting(), self._until),
        )
        self.consumers = dict(zip(models, consumers, strict=True))

    async def _streams(self, models: Iterable[str]) -> tuple[StreamFacts, ...]:
        bus = self._bus
        limits = {model: self.config.model(model).queue_limit for model in models}
        wanted: list[tuple[str | None, StreamConfig]] = [
            (None, config) for config in deployment_streams(bus.names, bus.settings)
        ]
        wanted += [(model, jobs_stream(bus.names, bus.settings, model, limits[model])) for model in limits]
        found = await asyncio.gather(*(self._slotted(read_stream(bus, config["name"])) for _, config in wanted))
        return tuple(
            StreamFacts(name=config["name"], wanted=config, found=each, model=model)
            for (model, config), each in zip(wanted, found, strict=True)
        )

    async def _waiting(self) -> list[WaitingJob]:
        queues = self.overview.value.queues if isinstance(self.overview, Known) else ()
        backlogs = sorted({queue.model for queue in queues if queue.queued})[:_MAX_BACKLOGS]
        return [job for model in backlogs for job in await self._waiting_of(model)]

    async def _waiting_of(self, model: str) -> list[WaitingJob]:
        bus = self._bus
        held = {
            each.sequence for beat in value_of(self.beats, []) if beat.beat.model == model for each in beat.beat.held
        }
        page = await batch_get(
            bus, bus.names.jobs_stream(model), bus.names.jobs_filter(model), from_sequence=1, limit=_MAX_WAITING
        )
        messages: list[tuple[Job, QueueName, float | None]] = []
        for message in page:
            headers = message.headers or {}
            job = decode_job(headers, b"")
            queue = QueueName.from_subject(headers.get(subjects.HDR_SUBJECT, ""))
            if job is not None and queue is not None and sequence_of(message) not in held:
                messages.append((job, queue, parse_time(headers.get(subjects.HDR_TIMESTAMP, ""))))
        lasts = await JobLog(bus).last_of([(job.tenant, job.job) for job, _, _ in messages]) if messages else {}
        found: list[WaitingJob] = []
        for job, queue, stored_at in messages:
            last = lasts.get((job.tenant, job.job))
            if last is not None and last.kind not in ("accepted", "requeued"):
                continue  # it runs, or has ended and its message is about to go
            until = job.deadline_at if last is not None and last.kind == "requeued" else job.queue_until
            has_own_time = stored_at is not None and job.handed_from is None
            found.append(
                WaitingJob(
                    model=model,
                    tenant=job.tenant,
                    job=job.job,
                    queue=queue,
                    left_s=min(until, job.deadline_at) - bus.clock.now(),
                    router_ahead_s=job.accepted_at - stored_at if has_own_time and stored_at is not None else None,
                )
            )
        return found

    async def _slotted(self, asked: Awaitable[T]) -> Known[T] | Unread:
        async with self._slots:
            return await _read(asked, self._until)


async def _read(asked: Awaitable[T], until: float) -> Known[T] | Unread:
    try:
        async with asyncio.timeout_at(until):
            return Known(await asked)
    except TimeoutError:
        return Unread(reason=f"no whole answer within {_WITHIN_S:g} s")
    except BrokerError as error:
        return Unread(reason=str(error), is_denied=isinstance(error, BrokerDeniedError))
    except msgspec.MsgspecError as error:
        return Unread(reason=f"an answer cannot be read: {error}")
