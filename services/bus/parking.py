"""A parked pull: a request that waits at the broker for a queue's next job, so that the job comes without a wake."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from headrace.bus.connection import Bus
from headrace.bus.jobqueue import Delivery, JobQueue, delivery_of
from headrace.errors import BrokerUnavailableError, NotProvisionedError
from headrace.schemas.subjects import QueueName

__all__ = ["EXPIRES_S", "ParkedPull"]

log = logging.getLogger(__name__)

EXPIRES_S: Final = 1.0
"""How long a request waits at the broker: what is given to a worker that hangs is given within this time."""
_LATE_S: Final = 0.25
"""How much later than that its answer may come before it counts as lost."""
_AFTER_FAULT_S: Final = 0.5
_EXPIRED: Final = "408"
_PARK_ONE: Final = b'{"batch":1,"expires":%d}' % int(EXPIRES_S * 1_000_000_000)
_REFUSED: Final = b'{"batch":1,"expires":1000000,"idle_heartbeat":1000000}'
"""A pull that the broker must refuse: its beats are as far apart as it is long."""
_REFUSAL_WITHIN_S: Final = 0.5


class _Request(msgspec.Struct, frozen=True):
    queue: QueueName
    subject: str
    connection: str
    sent_at: float


class ParkedPull:
    """At most one request for one job. `take` gets each job that comes, `ended` is called where one came to nothing.

    Its inbox is its own, and a fresh one after each withdrawal: only the subscription tells whose answer a job is, and
    the broker serves no request whose inbox nobody listens to. Nothing is trusted for ever: a request that has no
    answer a moment after its time, or was sent on an earlier connection, counts as lost. After a refusal none is sent
    for half a second. `take` must not call back in here.
    """

    def __init__(
        self, bus: Bus, jobs: JobQueue, *, take: Callable[[Delivery], Awaitable[None]], ended: Callable[[], None]
    ) -> None:
        self._bus = bus
        self._jobs = jobs
        self._take = take
        self._ended = ended
        self._inbox = ""
        self._last: QueueName | None = None
        self._subscription: Subscription | None = None
        self._request: _Request | None = None
        self._is_leaving = False
        self._num_requests = 0
        self._not_before = 0.0

    @property
    def queue(self) -> QueueName | None:
        """The queue whose next job the broker would send here now, as far as is known."""
        request = self._request
        if request is None or request.connection != self._bus.connection_id:
            return None
        return request.queue if time.monotonic() < request.sent_at + EXPIRES_S + _LATE_S else None

    async def park(self, queue: QueueName) -> None:
        """Have a request wait for a job of that queue, and no other; nothing changes if one does.

        Raises BrokerUnavailableError and BrokerUnsuitableError as a fetch does; a request may wait then.
        """
        if self.queue == queue and not self._is_leaving:
            return
        if self._request is not None or self._is_leaving:
            await self.withdraw()
        if time.monotonic() < self._not_before or not self._bus.is_connected:
            return
        await self._jobs.ensure_consumer(queue)
        if self._subscription is None:
            self._inbox = self._bus.new_inbox()
            self._subscription = await self._bus.subscribe(f"{self._inbox}.*", cb=self._on_message)
        self._num_requests += 1
        self._last = queue
        self._request = request = _Request(
            queue, f"{self._inbox}.{self._num_requests}", self._bus.connection_id, time.monotonic()
        )
        await self._bus.publish(self._jobs.next_subject(queue), _PARK_ONE, reply=request.subject)

    async def withdraw(self) -> None:
        """Have no request wait. On return `take` has had every job that was sent here before.

        In a cluster one may be under way between two servers; then it goes nowhere, and monitors find it. Raises
        BrokerUnavailableError where the broker does not answer. After that, or when it was cancelled, jobs still come
        to `take`, and it is to be called again.
        """
        subscription = self._subscription
        if subscription is None or (self._request is None and not self._is_leaving):
            return
        self._request, self._is_leaving = None, True
        if self._bus.is_connected:
            await self._end_interest(subscription)
        with contextlib.suppress(NatsError):
            await subscription.unsubscribe()
        if self._subscription is subscription:
            self._subscription, self._is_leaving = None, False

    async def close(self) -> None:
        """Withdraw for good. Raises as `withdraw`."""
        self._is_leaving = self._subscription is not None
        await self.withdraw()

    async def _end_interest(self, subscription: Subscription) -> None:
        try:
            await self._bus.nc._send_unsubscribe(subscription._id)
            await self._all_sent()
            async with asyncio.timeout(self._bus.settings.request_timeout_s):
                await subscription._pending_queue.join()
        except (NatsError, TimeoutError, OSError) as error:
            raise BrokerUnavailableError(f"a parked pull is not withdrawn: {error or type(error).__name__}") from None

    async def _all_sent(self) -> None:
        """Nothing more comes by the request that was withdrawn: a later one of the same consumer has its answer.

        A PING is answered past the queue in which a stream's messages wait to be sent (measured: about one withdrawal
        in a hundred lost a job so, with jobs arriving), what a consumer answers is not. Without that, a PING must do.
        """
        if self._last is not None:
            with contextlib.suppress(BrokerUnavailableError, NotProvisionedError):
                subject = self._jobs.next_subject(self._last)
                await self._bus.request(subject, _REFUSED, timeout_s=_REFUSAL_WITHIN_S)
                return
        await self._bus.flush()

    async def _on_message(self, message: Msg) -> None:
        if not message.subject.startswith(self._inbox):  # a job keeps its own subject
            self._request = None
            delivery = delivery_of(message, is_parked=True)
            if delivery is not None:
                await self._take(delivery)
            return
        request = self._request
        if request is None or message.subject != request.subject:
            return
        self._request = None
        now = time.monotonic()
        status = (message.headers or {}).get("Status")
        if status != _EXPIRED:
            log.debug("a parked pull for %s ended with status %s", request.queue.consumer, status)
            self._jobs.doubt_consumer(request.queue)
        if status != _EXPIRED or now - request.sent_at < EXPIRES_S / 2:
            self._not_before = now + _AFTER_FAULT_S
        self._ended()
