"""The NATS services protocol (`$SRV.PING|INFO|STATS`) for our processes; endpoints handle requests side by side."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.micro.request import Request
from nats.micro.service import EndpointConfig, Service, ServiceConfig

from headrace import __version__, metrics
from headrace.bus.connection import Bus
from headrace.errors import BrokerError, BrokerUnavailableError
from headrace.schemas import subjects
from headrace.schemas.refusals import Refusal
from headrace.schemas.subjects import is_reply

__all__ = ["Endpoint", "IncomingRequest", "answering", "refuse", "reply_with"]

log = logging.getLogger(__name__)

_MAX_CONCURRENT = 512
"""Requests one process handles at once; more wait in the client library's bounded buffer."""


class IncomingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as received. `reply` is empty where the sender wants no answer."""

    subject: str
    reply: str
    data: bytes
    headers: Mapping[str, str]


Handler = Callable[[IncomingRequest], Awaitable[None]]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint: its name in the protocol, the subject it listens on, and what handles its requests."""

    name: str
    subject: str
    handler: Handler
    queue_group: str = "q"


@contextlib.asynccontextmanager
async def answering(
    bus: Bus, name: str, endpoints: list[Endpoint], *, description: str, metadata: Mapping[str, str] | None = None
) -> AsyncIterator[None]:
    """Answer requests inside this context, and a monitor that asks what was counted; at its end, those under way are
    finished first.

    A handler that raises costs its own request alone: it is logged and answered with `internal`.
    """
    slots = asyncio.Semaphore(_MAX_CONCURRENT)
    async with asyncio.TaskGroup() as group:

        def endpoint_handler(handler: Handler) -> Callable[[Request], Awaitable[None]]:
            async def handle(request: Request) -> None:
                incoming = IncomingRequest(
                    subject=request.subject,
                    reply=request._msg.reply,
                    data=request.data,
                    headers=request.headers or {},
                )
                await slots.acquire()
                task = group.create_task(_guarded(bus, handler, incoming))
                task.add_done_callback(lambda _: slots.release())

            return handle

        service = Service(
            bus.nc,
            ServiceConfig(name=name, version=__version__, description=description, metadata=dict(metadata or {})),
        )
        counted: Subscription | None = None
        try:
            await _start(
                bus,
                service,
                [
                    EndpointConfig(
                        name=endpoint.name,
                        subject=endpoint.subject,
                        handler=endpoint_handler(endpoint.handler),
                        queue_group=endpoint.queue_group,
                    )
                    for endpoint in endpoints
                ],
            )
            counted = await bus.subscribe(
                bus.names.metrics(), cb=_telling(bus, name, (metadata or {}).get("worker", ""))
            )
            yield
        finally:
            if counted is not None and not bus.nc.is_closed:
                with contextlib.suppress(NatsError, OSError):
                    await counted.unsubscribe()
            if bus.is_connected:
                with contextlib.suppress(NatsError, TimeoutError, OSError):  # a broker that is mute must not keep us
                    async with asyncio.timeout(bus.settings.request_timeout_s):
                        await service.stop()


def _telling(bus: Bus, name: str, worker: str) -> Callable[[Msg], Awaitable[None]]:
    async def tell(message: Msg) -> None:
        counted = metrics.measured(name.removeprefix("headrace-"), worker)
        await reply_with(
            bus, IncomingRequest(subject=message.subject, reply=message.reply, data=b"", headers={}), counted
        )

    return tell


async def _start(bus: Bus, service: Service, endpoints: list[EndpointConfig]) -> None:
    """Subscribe to all of it. A broker that does not answer now will know our subscriptions when it is back.

    Raises BrokerUnavailableError where the connection is gone for good.
    """
    try:
        with contextlib.suppress(NatsTimeoutError, TimeoutError):  # the library waits 10 s, and then fails
            async with asyncio.timeout(bus.settings.request_timeout_s):
                await service.start()
        for endpoint in endpoints:
            await service.add_endpoint(endpoint)
    except (NatsError, OSError) as error:
        raise BrokerUnavailableError(f"cannot answer requests: {error or type(error).__name__}") from None
    with contextlib.suppress(BrokerUnavailableError):
        await bus.flush()


async def reply_with(
    bus: Bus, request: IncomingRequest, body: object, headers: Mapping[str, str] | None = None
) -> None:
    """Answer with a JSON body, if an answer is wanted and may go there.

    NATS does not check what a client names as its reply, so whoever answers must: an answer must not land in a stream
    of ours, in the broker's own subjects, or in an inbox of another service.
    """
    if request.reply and is_reply(request.reply, bus.names.prefix):
        await bus.publish(request.reply, msgspec.json.encode(body), headers=headers)


async def refuse(bus: Bus, request: IncomingRequest, refusal: Refusal) -> None:
    """Answer with an `error` event in OpenAI's form."""
    headers = {subjects.HDR_EVENT: "error"}
    if refusal.retry_after_s is not None:
        headers[subjects.HDR_RETRY_AFTER] = str(refusal.retry_after_s)
    await reply_with(bus, request, refusal.body(), headers)


async def _guarded(bus: Bus, handler: Handler, request: IncomingRequest) -> None:
    try:
        await handler(request)
        return
    except BrokerError as error:
        log.warning("a request on %s failed: %s", request.subject, error)
    except Exception:
        log.exception("a request on %s failed", request.subject)
    with contextlib.suppress(BrokerError):
        await refuse(bus, request, Refusal(code="internal", message="the request could not be handled"))
