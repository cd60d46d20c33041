"""The job log: appends by compare-and-set, reads, and delivery to a client's inbox."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from nats.aio.msg import Msg

from headrace.bus.batchget import BATCH, MAX_BATCH_BYTES, batch_get, multi_last
from headrace.bus.clock import format_time
from headrace.bus.connection import (
    ERR_CONSUMER_NOT_FOUND,
    ERR_MESSAGE_NOT_FOUND,
    ApiRefused,
    Bus,
    Stored,
    StoreResult,
)
from headrace.errors import BrokerUnavailableError
from headrace.schemas import subjects
from headrace.schemas.events import Event, decode
from headrace.schemas.states import JobState, fold

__all__ = ["JobDelivery", "JobLog", "event_of_delivery", "event_of_republish"]

DELIVERY_PREFIX: Final = "reply_"
"""Begins the name of each consumer that delivers a job to an inbox."""
_DELIVERY_IDLE_S: Final = 10
_NANOSECONDS: Final = 1_000_000_000


class _StoredMessage(msgspec.Struct, frozen=True):
    seq: int
    data: bytes = b""  # msgspec decodes base64
    hdrs: bytes = b""


class _StoredReply(msgspec.Struct, frozen=True):
    message: _StoredMessage


class _Delivered(msgspec.Struct, frozen=True):
    consumer_seq: int = 0


class _ConsumerCreated(msgspec.Struct, frozen=True):
    num_pending: int = 0
    push_bound: bool = False
    delivered: _Delivered = _Delivered()


class JobDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer that sends a job's events to an inbox; `num_stored` were there when it was made."""

    name: str
    num_stored: int
    is_bound: bool


class JobLog:
    """Reads and appends events of jobs. One per process; holds no state but the connection."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._names = bus.names

    async def append(self, tenant: str, event: Event, *, expected: int, ttl_s: float) -> StoreResult:
        """Append one event if the job's last event has sequence `expected` (0: the log is empty).

        All events of a job get the same `ttl_s`, so none expires before an earlier one whatever the clocks say.
        """
        headers = event.headers()
        headers[subjects.HDR_EXPECTED_LAST_SUBJECT_SEQUENCE] = str(expected)
        headers[subjects.HDR_TTL] = str(math.ceil(ttl_s))
        result = await self._bus.store(self._names.log(tenant, event.job), event.data, headers=headers)
        if isinstance(result, Stored) and event.is_terminal:
            await self.announce_end(tenant, event.job)
        return result

    async def announce_end(self, tenant: str, job: str) -> None:
        """Tell whoever keeps something for the job that it ended; a hint that may be lost."""
        with contextlib.suppress(BrokerUnavailableError):
            await self._bus.publish(self._names.ended(tenant, job))

    async def last(self, tenant: str, job: str) -> Event | None:
        """The last event, None for an empty log. On a replicated stream it may be a moment old."""
        stream, subject = self.stream_of(job), self._names.log(tenant, job)
        reply = await self._bus.request(f"$JS.API.DIRECT.GET.{stream}.{subject}")
        status = (reply.headers or {}).get("Status")
        if status is not None and status != "404":
            raise BrokerUnavailableError(f"cannot read the log of job {job}: status {status}")
        return event_of_direct_get(reply)

    async def last_of(self, jobs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Event]:
        """The last events of several jobs (tenant and id), at most 1,024, by one read. An empty log has none.

        As with `last`, they may be a moment old.
        """
        of_stream: dict[str, list[str]] = {}
        for tenant, job in jobs:
            of_stream.setdefault(self.stream_of(job), []).append(self._names.log(tenant, job))
        found: dict[tuple[str, str], Event] = {}
        for stream, names in of_stream.items():
            for message in await multi_last(self._bus, stream, *names):
                event = event_of_direct_get(message)
                if event is not None:
                    tenant, job = (message.headers or {})[subjects.HDR_SUBJECT].split(".")[-2:]
                    found[tenant, job] = event
        return found

    async def last_from_leader(self, tenant: str, job: str) -> Event | None:
        """The last event by the stream's leader, so never an old one; None for an empty log."""
        payload = {"last_by_subj": self._names.log(tenant, job)}
        try:
            data = await self._bus.api(f"STREAM.MSG.GET.{self.stream_of(job)}", payload)
        except ApiRefused as refused:
            if refused.err_code == ERR_MESSAGE_NOT_FOUND:
                return None
            raise BrokerUnavailableError(f"cannot read the log of job {job}: {refused}") from None
        message = msgspec.json.decode(data, type=_StoredReply).message
        headers = _parse_headers(message.hdrs)
        return decode(headers, message.data, sequence=message.seq, last_sequence=_previous(headers))

    async def read(self, tenant: str, job: str, *, from_sequence: int = 1) -> list[Event]:
        """All events from a sequence on, in order."""
        messages = await batch_get(
            self._bus, self.stream_of(job), self._names.log(tenant, job), from_sequence=from_sequence
        )
        events = [event_of_direct_get(message) for message in messages]
        return [event for event in events if event is not None]

    async def state(self, tenant: str, job: str) -> JobState:
        """What the log says, from all of it. One read where the job never started, which is nearly always."""
        last = await self.last(tenant, job)
        if last is None or last.kind == "accepted":  # which is only ever appended to an empty log
            return fold([last] if last is not None else [])
        return fold(await self.read(tenant, job))

    async def deliver(
        self, tenant: str, job: str, inbox: str, *, from_sequence: int = 1, after_s: float = 0.0
    ) -> JobDelivery:
        """Have the broker send a job's events, past and coming, to an inbox.

        It ends when nobody has listened there for a while, or by `stop_delivery`. The broker sends only to an inbox
        that is subscribed to by its own name; a subscription with wildcards is not interest enough (`is_bound`).
        With `after_s` it begins only then.
        """
        subject = self._names.log(tenant, job)
        name = f"{DELIVERY_PREFIX}{self._bus.nc._nuid.next().decode()}"
        config: dict[str, Any] = {
            "name": name,
            "deliver_subject": inbox,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": max(from_sequence, 1),
            "ack_policy": "none",
            "replay_policy": "instant",
            "filter_subject": subject,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": _DELIVERY_IDLE_S * _NANOSECONDS,
        }
        if after_s:
            config["pause_until"] = format_time(self._bus.clock.now() + after_s)
        stream = self.stream_of(job)
        try:
            data = await self._bus.api(
                f"CONSUMER.CREATE.{stream}.{name}.{subject}",
                {"stream_name": stream, "config": config, "action": "create"},
            )
        except ApiRefused as refused:
            raise BrokerUnavailableError(f"cannot deliver job {job}: {refused}") from None
        created = msgspec.json.decode(data, type=_ConsumerCreated)
        number = created.num_pending + created.delivered.consumer_seq
        return JobDelivery(name=name, num_stored=number, is_bound=created.push_bound)

    async def send_last(self, tenant: str, job: str, inbox: str) -> None:
        """Have the broker send the last event to an inbox, or a status 404, as it answers `last`."""
        await self._bus.publish(f"$JS.API.DIRECT.GET.{self.stream_of(job)}.{self._names.log(tenant, job)}", reply=inbox)

    async def send(self, tenant: str, job: str, inbox: str, *, from_sequence: int) -> None:
        """Have the broker send events from a sequence on to an inbox, as one batched answer."""
        payload = {
            "batch": BATCH,
            "max_bytes": MAX_BATCH_BYTES,
            "seq": max(from_sequence, 1),
            "next_by_subj": self._names.log(tenant, job),
        }
        subject = f"$JS.API.DIRECT.GET.{self.stream_of(job)}"
        await self._bus.publish(subject, msgspec.json.encode(payload), reply=inbox)

    async def stop_delivery(self, job: str, name: str) -> None:
        """Remove a consumer made by `deliver`; fine if it is gone already."""
        try:
            await self._bus.api(f"CONSUMER.DELETE.{self.stream_of(job)}.{name}")
        except ApiRefused as refused:
            if refused.err_code != ERR_CONSUMER_NOT_FOUND:
                raise BrokerUnavailableError(f"cannot remove consumer {name}: {refused}") from None

    async def purge_to_last(self, tenant: str, job: str) -> None:
        """Drop all events but the last; only ever of a job that ended, so that late readers find the whole answer."""
        try:
            await self._bus.api(
                f"STREAM.PURGE.{self.stream_of(job)}", {"filter": self._names.log(tenant, job), "keep": 1}
            )
        except ApiRefused as refused:
            raise BrokerUnavailableError(f"cannot purge the log of job {job}: {refused}") from None

    def stream_of(self, job: str) -> str:
        """The stream that has a job's log: one of several that share the jobs."""
        return self._names.log_stream(self._names.shard_of(job))


def event_of_direct_get(message: Msg) -> Event | None:
    """The event in an answer of the direct-get API; None for a status answer."""
    headers = message.headers or {}
    if subjects.HDR_SEQUENCE not in headers:
        return None
    return decode(headers, message.data, sequence=int(headers[subjects.HDR_SEQUENCE]), last_sequence=_previous(headers))


def event_of_republish(message: Msg) -> Event | None:
    """The event in a message on a job's inbox; None for anything else, the router's own answers included."""
    headers = message.headers or {}
    if subjects.HDR_SEQUENCE not in headers or subjects.HDR_SUBJECT not in headers:
        return None
    try:
        sequence, previous = int(headers[subjects.HDR_SEQUENCE]), int(headers.get(subjects.HDR_LAST_SEQUENCE, "0"))
    except ValueError:
        return None
    return decode(headers, message.data, sequence=sequence, last_sequence=previous)


def event_of_delivery(message: Msg) -> Event | None:
    """The event in a message of a consumer made by `deliver`; None for anything else."""
    sequence = stream_sequence(message)
    headers = message.headers or {}
    return decode(headers, message.data, sequence=sequence, last_sequence=_previous(headers)) if sequence else None


def stream_sequence(message: Msg) -> int | None:
    """Stream sequence of a message that a consumer delivered, from its ack subject; None if it has none."""
    parts = message.reply.split(".")
    # $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<timestamp>.<pending>
    if len(parts) != 9 or parts[:2] != ["$JS", "ACK"] or not (parts[5].isascii() and parts[5].isdigit()):
        return None
    return int(parts[5])


def _previous(headers: Mapping[str, str]) -> int | None:
    """Sequence of the event before, as the append named it; the broker took the event only because it was true.

    The `Nats-Last-Sequence` of a batched answer is no such thing: it names the message before within the answer.
    """
    expected = headers.get(subjects.HDR_EXPECTED_LAST_SUBJECT_SEQUENCE, "")
    return int(expected) if expected.isascii() and expected.isdigit() else None


def _parse_headers(raw: bytes) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in raw.split(b"\r\n")[1:]:
        name, separator, value = line.partition(b":")
        if separator:
            headers[name.decode()] = value.strip().decode()
    return headers
