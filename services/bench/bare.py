"""What NATS alone takes on the same machine at the same time: the yardstick beside each figure."""

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from headrace.bench.ground import Ground
from headrace.bus.connection import Bus, Message, Stored, connect
from headrace.bus.jobqueue import JobQueue
from headrace.bus.provision import ensure_jobs_stream
from headrace.errors import BrokerUnavailableError, HeadraceError
from headrace.schemas.jobs import Job
from headrace.schemas.subjects import JobId, QueueName, Tenant

__all__ = ["Bare", "bare"]

_PREFIX: Final = "headrace-bench-bare"
_MODEL: Final = "bare"
_FLOOD_PART: Final = 500
"""Messages published before the publisher waits for the subscriber, which must not drop any."""

_WAIT_S: Final = 10.0


class Bare:
    """Times plain NATS operations; made by `bare`. Seconds, in the order they were taken in.

    `num_early_fetches` counts the fetches that came before a message just stored could be had.
    """

    def __init__(self, bus: Bus, other: Bus, queue: JobQueue) -> None:
        self.round_trips: list[float] = []
        self.publish_fetches: list[float] = []
        self.num_early_fetches = 0
        self._bus = bus
        self._other = other
        self._queue = queue
        self._num_published = 0
        self._echo_subject = bus.new_inbox()
        self._flood_subject = bus.new_inbox()

    def forget(self) -> None:
        """Begin a new series."""
        self.round_trips = []
        self.publish_fetches = []
        self.num_early_fetches = 0

    async def probe(self) -> None:
        """One round trip, one publish with its fetch."""
        began = time.monotonic()
        await self._bus.request(self._echo_subject, b"x")
        self.round_trips.append(time.monotonic() - began)
        began = time.monotonic()
        stored = await self._queue.publish(self._job(), QueueName(), {})
        if not isinstance(stored, Stored):
            raise HeadraceError(f"a plain publish was not stored: {stored}")
        while (delivery := await self._queue.fetch(QueueName())) is None:
            # The broker acknowledges a message a moment before its consumers know of it.
            self.num_early_fetches += 1
            if time.monotonic() - began > _WAIT_S:
                raise HeadraceError("a plain message that is stored cannot be fetched")
        self.publish_fetches.append(time.monotonic() - began)
        await self._queue.ack(delivery)

    async def flood(self, num_messages: int, size_bytes: int) -> float:
        """Publish so many messages from one connection to a subscriber on another; seconds until all have come."""
        subscription = await self._other.subscribe(self._flood_subject)
        await self._other.nc.flush()
        body = b"x" * size_bytes
        began = time.monotonic()
        try:
            for start in range(0, num_messages, _FLOOD_PART):
                number = min(_FLOOD_PART, num_messages - start)
                for _ in range(number):
                    await self._bus.publish(self._flood_subject, body)
                for _ in range(number):
                    if await self._other.next_message(subscription, _WAIT_S) is None:
                        raise BrokerUnavailableError("a plain message did not arrive")
            return time.monotonic() - began
        finally:
            await subscription.unsubscribe()

    async def echo(self, message: Message) -> None:
        """Answer a round trip."""
        await self._other.publish(message.reply, message.data)

    async def listen(self) -> None:
        """Be ready to answer."""
        await self._other.subscribe(self._echo_subject, cb=self.echo)
        await self._other.nc.flush()

    def _job(self) -> Job:
        self._num_published += 1
        return Job(
            tenant=Tenant("default"),
            job=JobId(f"bare{self._num_published}"),
            op="completions",
            model=_MODEL,
            body=b'{"prompt":"x","max_tokens":1}',
            body_hash="",
            accepted_at=0,
            queue_timeout_s=60,
            deadline_s=60,
            need_tokens=1,
        )


@contextlib.asynccontextmanager
async def bare(field: Ground) -> AsyncIterator[Bare]:
    """Plain NATS on the broker of a measured deployment, under a prefix of its own, which its parts do not see."""
    url, settings = field.stack.url, msgspec.structs.replace(field.settings, prefix=_PREFIX)
    async with connect(url, settings, name="bench-1") as bus, connect(url, settings, name="bench-2") as other:
        await ensure_jobs_stream(bus, _MODEL)
        async with JobQueue(bus, _MODEL) as queue:
            plain = Bare(bus, other, queue)
            await plain.listen()
            yield plain
