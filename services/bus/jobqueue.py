"""The job queue of one model: publish, fetch, settle, count."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Self

import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from headrace.bus.clock import parse_time
from headrace.bus.connection import (
    ERR_CONSUMER_NOT_FOUND,
    ERR_CONSUMER_NOT_UNIQUE,
    ERR_MESSAGE_NOT_FOUND,
    ERR_SEQUENCE_NOT_FOUND,
    ERR_STREAM_NOT_FOUND,
    ApiRefused,
    Bus,
    StoreResult,
)
from headrace.bus.consumers import require_own_consumers
from headrace.bus.joblog import stream_sequence
from headrace.errors import BrokerUnavailableError, NotProvisionedError
from headrace.schemas import subjects
from headrace.schemas.jobs import Job, decode_job
from headrace.schemas.subjects import QueueName
from headrace.schemas.workers import WorkerNudge

__all__ = ["Delivery", "JobQueue", "Progress", "QueueCounts", "delivery_of"]

log = logging.getLogger(__name__)

_NANOSECONDS: Final = 1_000_000_000
_MAX_WAITING: Final = 4096
_ABANDONED_WAIT_S: Final = 0.5
_ACK, _NAK, _IN_PROGRESS, _TERM = b"+ACK", b"-NAK", b"+WPI", b"+TERM"
_NOTHING_THERE: Final = ("404", "408")
_UNSERVED: Final = "503"
_PULL_ONE: Final = b'{"batch":1,"no_wait":true}'

QueueCounts = dict[QueueName, int]
"""Messages per queue, waiting and running alike."""


class _StoredMessage(msgspec.Struct, frozen=True):
    hdrs: bytes = b""


class _Info(msgspec.Struct, frozen=True):
    state: "_InfoState"
    created: str = ""


class _InfoState(msgspec.Struct, frozen=True):
    messages: int = 0
    subjects: dict[str, int] | None = None


class _Place(msgspec.Struct, frozen=True):
    consumer_seq: int = 0
    stream_seq: int = 0
    last_active: str | None = None


class _ConsumerInfo(msgspec.Struct, frozen=True):
    num_pending: int = 0
    num_ack_pending: int = 0
    delivered: _Place = _Place()
    ack_floor: _Place = _Place()


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a queue's consumer is. What is in flight lies above `ack_floor` and up to `delivered` (stream sequences).

    `consumer_sequence` counts deliveries.
    """

    num_in_flight: int
    num_waiting: int
    ack_floor: int
    delivered: int
    consumer_sequence: int


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """One fetched queue message: ours until its ack wait passes without a renewal.

    `job` is None where the message is none of ours; such a message must be terminated, it can never run. `is_parked`
    says that it came by a parked pull, so that nobody here chose to fetch it.
    """

    queue: QueueName
    sequence: int
    num_delivered: int
    job: Job | None
    headers: Mapping[str, str]
    ack_subject: str
    is_parked: bool = False


class _Pull:
    """A fetch under way: each of its requests gets one answer, a job or a status; `answered` once all of them did."""

    def __init__(self, subject: str, num_requests: int) -> None:
        self.subject = subject
        self.answers: list[Msg] = []
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_requests = num_requests

    @property
    def is_open(self) -> bool:
        """Whether a request has no answer yet."""
        return len(self.answers) < self._num_requests

    def take(self, message: Msg) -> None:
        """An answer came."""
        self.answers.append(message)
        self.give_up(self._num_requests)

    def give_up(self, num_sent: int) -> None:
        """No more than so many requests were sent."""
        self._num_requests = num_sent
        if not self.is_open and not self.answered.done():
            self.answered.set_result(None)


class JobQueue:
    """Work on the stream of one model. An async context manager: inside it, fetching works.

    Fetches go one at a time; a message that comes after its fetch gave up goes to `on_late`, so none is ever left
    idle until its ack wait. `handed_back_at` says when a message of a queue was last handed back here (monotonic).
    """

    def __init__(self, bus: Bus, model: str, *, on_late: Callable[[Delivery], Awaitable[None]] | None = None) -> None:
        self._bus = bus
        self.model = model
        self.stream = bus.names.jobs_stream(model)
        self._on_late = on_late
        self._inbox = bus.new_inbox()
        self._subscription: Subscription | None = None
        self._fetch_lock = asyncio.Lock()
        self._pull: _Pull | None = None
        self._abandoned: _Pull | None = None
        self._num_fetches = 0
        self._consumers: set[QueueName] = set()
        self.handed_back_at: dict[QueueName, float] = {}

    async def __aenter__(self) -> Self:
        self._subscription = await self._bus.subscribe(f"{self._inbox}.*", cb=self._on_message)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._subscription is None or self._bus.nc.is_closed:
            return
        if self._abandoned is not None:  # a fetch that was cancelled: what it is sent must not be lost
            await asyncio.wait((self._abandoned.answered,), timeout=_ABANDONED_WAIT_S)
        with contextlib.suppress(NatsError):
            await self._subscription.unsubscribe()

    async def publish(
        self, job: Job, queue: QueueName, headers: Mapping[str, str], *, after: int | None = None
    ) -> StoreResult:
        """Put a job at the tail of its queue. The same tenant and id within the dedupe window is stored once.

        With `after` only if that is still the last sequence of the queue name (see `occupancy`).
        """
        message_headers = {**job.headers(), **headers}
        message_headers[subjects.HDR_MSG_ID] = self._bus.names.message_id(
            job.tenant, job.job, is_handed_over=job.handed_from is not None
        )
        if after is not None:
            message_headers[subjects.HDR_EXPECTED_LAST_SUBJECT_SEQUENCE] = str(after)
            message_headers[subjects.HDR_EXPECTED_LAST_SUBJECT_SEQUENCE_SUBJECT] = self._bus.names.jobs_of_queue(
                self.model, queue.queue
            )
        return await self._bus.store(self._bus.names.jobs(self.model, queue), job.body, headers=message_headers)

    async def counts(self) -> QueueCounts:
        """Messages of each queue (queued and running). Raises NotProvisionedError where the model has no stream."""
        info = await self._info({"subjects_filter": self._bus.names.jobs_filter(self.model)})
        counts: QueueCounts = {}
        for subject, number in (info.state.subjects or {}).items():
            queue = QueueName.from_subject(subject)
            if queue is not None:
                counts[queue] = number
        return counts

    async def exists(self) -> bool:
        """Whether the model has a stream."""
        try:
            await self._info({})
        except NotProvisionedError:
            return False
        return True

    async def created(self) -> str:
        """When the stream was created; a change means every lease is void."""
        return (await self._info({})).created

    async def headers_of(self, sequence: int) -> dict[str, str] | None:
        """Headers of a queued or running message, None if it is gone."""
        found = await self.message_of(sequence)
        return found[0] if found is not None else None

    async def message_of(self, sequence: int) -> tuple[dict[str, str], bytes] | None:
        """Headers and body of a queued or running message, None if it is gone."""
        reply = await self._bus.request(f"$JS.API.DIRECT.GET.{self.stream}", msgspec.json.encode({"seq": sequence}))
        headers = reply.headers or {}
        return (dict(headers), reply.data) if headers.get(subjects.HDR_SEQUENCE) == str(sequence) else None

    async def num_ahead(self, queue: QueueName, sequence: int) -> int | None:
        """Jobs of the same queue that wait before a queued message; None if it no longer waits there."""
        subject = self._bus.names.jobs(self.model, queue)
        payload = {"batch": 1, "seq": sequence, "next_by_subj": subject}
        reply = await self._bus.request(f"$JS.API.DIRECT.GET.{self.stream}", msgspec.json.encode(payload))
        headers = reply.headers or {}
        if headers.get(subjects.HDR_SEQUENCE) != str(sequence):
            return None
        try:
            data = await self._bus.api(f"CONSUMER.INFO.{self.stream}.{queue.consumer}")
        except ApiRefused:
            return None
        num_pending = msgspec.json.decode(data, type=_ConsumerInfo).num_pending
        return max(0, num_pending - int(headers.get("Nats-Num-Pending", "0")) - 1)

    async def progress(self, queue: QueueName) -> Progress | None:
        """Where a queue's consumer stands; None if it has none yet."""
        try:
            data = await self._bus.api(f"CONSUMER.INFO.{self.stream}.{queue.consumer}")
        except ApiRefused as refused:
            if refused.err_code in (ERR_CONSUMER_NOT_FOUND, ERR_STREAM_NOT_FOUND):
                return None
            raise BrokerUnavailableError(f"consumer {queue.consumer} of {self.stream}: {refused}") from None
        info = msgspec.json.decode(data, type=_ConsumerInfo)
        return Progress(
            num_in_flight=info.num_ack_pending,
            num_waiting=info.num_pending,
            ack_floor=info.ack_floor.stream_seq,
            delivered=info.delivered.stream_seq,
            consumer_sequence=info.delivered.consumer_seq,
        )

    async def last_delivered_at(self, queue: QueueName) -> float | None:
        """Unix seconds, by the broker's clock, at which it last sent a message of the queue to a worker."""
        try:
            data = await self._bus.api(f"CONSUMER.INFO.{self.stream}.{queue.consumer}")
        except ApiRefused as refused:
            raise BrokerUnavailableError(f"consumer {queue.consumer} of {self.stream}: {refused}") from None
        at = msgspec.json.decode(data, type=_ConsumerInfo).delivered.last_active
        return parse_time(at) if at is not None else None

    async def nak_on_behalf(self, queue: QueueName, sequence: int, progress: Progress) -> None:
        """Hand a message back that somebody else holds; `progress` must have been read just now.

        The broker takes any consumer sequence above its ack floor and up to the last delivered; it redelivers the
        message first.
        """
        subject = f"$JS.ACK.{self.stream}.{queue.consumer}.1.{sequence}.{progress.consumer_sequence}.0.0"
        await self._bus.publish(subject, _NAK)

    async def delete(self, sequence: int) -> bool:
        """Delete a message of a job that ended; False if it was gone. Never for a job that has not."""
        try:
            await self._bus.api(f"STREAM.MSG.DELETE.{self.stream}", {"seq": sequence, "no_erase": True})
        except ApiRefused as refused:
            if refused.err_code in (ERR_MESSAGE_NOT_FOUND, ERR_SEQUENCE_NOT_FOUND):
                return False
            log.info("message %d of %s is not deleted: %s", sequence, self.stream, refused)
            return False
        return True

    async def ensure_consumer(self, queue: QueueName) -> None:
        """Make a queue's consumer unless it was there when last asked. Raises as `fetch_many` does."""
        if queue not in self._consumers:
            await self._make_consumer(queue)

    def doubt_consumer(self, queue: QueueName) -> None:
        """Its consumer may be gone, or its leader moved: look again next time."""
        self._consumers.discard(queue)

    def next_subject(self, queue: QueueName) -> str:
        """Where requests for a queue's next message go."""
        return f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{queue.consumer}"

    async def fetch(self, queue: QueueName) -> Delivery | None:
        """`fetch_many` of one."""
        return next(iter(await self.fetch_many(queue, 1)), None)

    async def fetch_many(self, queue: QueueName, limit: int) -> list[Delivery]:
        """Take the next messages of a queue, `limit` at most; none where none waits.

        Nothing is parked: the broker answers at once, and what it hands out is ours to run or to give back. Each
        message is asked for by a request of its own, sent together, so each has exactly one answer and it is known
        when all have come. Raises BrokerUnavailableError where no answer comes (what did come is returned),
        BrokerUnsuitableError where somebody else's consumer takes the same jobs.
        """
        async with self._fetch_lock:
            await self.ensure_consumer(queue)
            answers = await self._pull_many(queue, limit)
        deliveries: list[Delivery] = []
        is_unserved = False
        for message in answers:
            status = (message.headers or {}).get("Status")
            if status is None:
                delivery = delivery_of(message)
                deliveries += [delivery] if delivery is not None else []
            elif status not in _NOTHING_THERE:
                self.doubt_consumer(queue)
                is_unserved = is_unserved or status == _UNSERVED
        if is_unserved and not deliveries:
            raise BrokerUnavailableError(f"consumer {queue.consumer} of {self.stream} is not served now")
        return deliveries

    async def _pull_many(self, queue: QueueName, limit: int) -> list[Msg]:
        self._num_fetches += 1
        self._pull = pull = _Pull(f"{self._inbox}.{self._num_fetches}", limit)
        timeout_s = self._bus.settings.request_timeout_s
        num_sent = 0
        try:
            while num_sent < limit:
                num_sent += 1  # from here on it may have been sent
                await self._bus.publish(self.next_subject(queue), _PULL_ONE, reply=pull.subject)
            await asyncio.wait((pull.answered,), timeout=timeout_s)
        except (asyncio.CancelledError, BrokerUnavailableError):
            for message in pull.answers:  # the jobs came in the very moment we were told to stop
                if not self._is_status(message):
                    await self._too_late(message)
            raise
        finally:
            self._pull = None
            pull.give_up(num_sent)
            if not pull.answered.done():
                self._abandoned = pull
        if not pull.answers:
            raise BrokerUnavailableError(f"no answer to a fetch from {queue.consumer} within {timeout_s:g} s")
        return pull.answers

    async def ack(self, delivery: Delivery) -> None:
        """Settle: the job ended. Only ever after its terminal event is known to be stored."""
        await self._bus.publish(delivery.ack_subject, _ACK)

    async def nak(self, delivery: Delivery, *, delay_s: float = 0) -> None:
        """Hand back: the broker redelivers it first, after `delay_s`. Wake somebody with `wake` too."""
        self.handed_back_at[delivery.queue] = time.monotonic()
        body = _NAK if delay_s <= 0 else b'-NAK {"delay": %d}' % int(delay_s * _NANOSECONDS)
        await self._bus.publish(delivery.ack_subject, body)

    async def hand_on(self, delivery: Delivery) -> None:
        """Hand back what came where there is no room for it, and wake whoever has."""
        await self.nak(delivery)
        await self.wake(delivery.queue, delivery.headers)

    async def in_progress(self, delivery: Delivery) -> None:
        """Renew: start its ack wait again."""
        await self._bus.publish(delivery.ack_subject, _IN_PROGRESS)

    async def terminate(self, delivery: Delivery) -> None:
        """Remove a message that is no job of ours."""
        await self._bus.publish(delivery.ack_subject, _TERM)

    async def wake(self, queue: QueueName, headers: Mapping[str, str]) -> None:
        """Wake one worker for a job that was handed back."""
        await self._bus.publish(self._bus.names.wake(self.model, queue), headers=headers)

    async def wake_worker(self, worker: str, queue: QueueName) -> None:
        """Wake one worker by name, for a job that it would start at once."""
        nudge = WorkerNudge(kind="wake", consumer=queue.consumer)
        await self._bus.publish(self._bus.names.ctl(worker), msgspec.json.encode(nudge))

    async def tell_interrupted(self, worker: str, queue: QueueName, number: int, *, share: int = 0) -> None:
        """Tell a worker that so many messages stand at the queue's head that were running before, and how many of them
        are its share; a hint.
        """
        nudge = WorkerNudge(kind="interrupted", consumer=queue.consumer, number=number, share=share)
        await self._bus.publish(self._bus.names.ctl(worker), msgspec.json.encode(nudge))

    async def oldest_waiting_at(self, queue: QueueName) -> float | None:
        """Unix seconds at which the job was accepted that no worker was given yet and came first; None without one.

        Two reads, so it may be a moment old. Jobs that were handed back are not looked at.
        """
        progress = await self.progress(queue)
        subject = self._bus.names.jobs(self.model, queue)
        payload = {"seq": (progress.delivered if progress is not None else 0) + 1, "next_by_subj": subject}
        reply = await self._bus.request(f"$JS.API.DIRECT.GET.{self.stream}", msgspec.json.encode(payload))
        job = decode_job(reply.headers or {}, b"")
        return job.accepted_at if job is not None else None

    async def _info(self, payload: dict[str, Any]) -> _Info:
        try:
            return msgspec.json.decode(await self._bus.api(f"STREAM.INFO.{self.stream}", payload), type=_Info)
        except ApiRefused as refused:
            if refused.err_code == ERR_STREAM_NOT_FOUND:
                raise NotProvisionedError(f"model {self.model!r} has no stream {self.stream}") from None
            raise BrokerUnavailableError(f"{self.stream}: {refused}") from None
        except NotProvisionedError:  # nobody answers at all, which says nothing about the stream
            raise BrokerUnavailableError(f"{self.stream}: JetStream does not answer") from None

    async def _make_consumer(self, queue: QueueName) -> None:
        subject = self._bus.names.jobs(self.model, queue)
        config = {
            "name": queue.consumer,
            "durable_name": queue.consumer,
            "ack_policy": "explicit",
            "deliver_policy": "all",
            "filter_subject": subject,
            "ack_wait": int(self._bus.settings.ack_wait_s * _NANOSECONDS),
            "max_deliver": -1,
            "max_ack_pending": -1,
            "max_waiting": _MAX_WAITING,
        }
        try:
            await self._bus.api(
                f"CONSUMER.CREATE.{self.stream}.{queue.consumer}.{subject}",
                {"stream_name": self.stream, "config": config},
            )
        except ApiRefused as refused:
            if refused.err_code == ERR_STREAM_NOT_FOUND:
                raise NotProvisionedError(f"model {self.model!r} has no stream {self.stream}") from None
            if refused.err_code in ERR_CONSUMER_NOT_UNIQUE:
                await require_own_consumers(self._bus, self.model, wanted=queue)
            raise BrokerUnavailableError(f"cannot make consumer {queue.consumer} of {self.stream}: {refused}") from None
        self._consumers.add(queue)

    async def _on_message(self, message: Msg) -> None:
        # A job keeps its own subject on this inbox; only status answers carry the fetch's. With one fetch at a time
        # a job is one of that fetch's answers, or comes too late.
        is_status = self._is_status(message)
        pull = self._pull
        if pull is not None and pull.is_open and (not is_status or message.subject == pull.subject):
            pull.take(message)
            return
        if not is_status:
            await self._too_late(message)
        if self._abandoned is not None and (not is_status or message.subject == self._abandoned.subject):
            self._abandoned.take(message)

    def _is_status(self, message: Msg) -> bool:
        return message.subject.startswith(self._inbox)

    async def _too_late(self, message: Msg) -> None:
        delivery = delivery_of(message)
        if delivery is not None and self._on_late is not None:
            await self._on_late(delivery)


def delivery_of(message: Msg, *, is_parked: bool = False) -> Delivery | None:
    """A message as fetched; None if it is none of a job queue."""
    sequence = stream_sequence(message)
    parts = message.reply.split(".")
    queue = QueueName.from_consumer(parts[3]) if sequence is not None else None
    if sequence is None or queue is None:
        return None
    headers = message.headers or {}
    return Delivery(
        queue=queue,
        sequence=sequence,
        num_delivered=int(parts[4]),
        job=decode_job(headers, message.data),
        headers=headers,
        ack_subject=message.reply,
        is_parked=is_parked,
    )
