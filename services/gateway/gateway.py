"""The gateway process: what it listens to, and what its parts share."""

import asyncio
import logging
from typing import Final

from headrace.batch import BatchKeeper
from headrace.bus.configuration import ConfigView
from headrace.bus.connection import Bus
from headrace.bus.provision import ensure_provisioned
from headrace.bus.services import answering
from headrace.errors import BrokerUnavailableError
from headrace.gateway.app import make_app
from headrace.gateway.lifecycle import allow_many_connections, listening, serve
from headrace.gateway.watching import OpenRequests
from headrace.lifecycle import unless_stopped
from headrace.listening import is_loopback, url_of

__all__ = ["SERVICE_NAME", "run_gateway"]

log = logging.getLogger(__name__)

SERVICE_NAME: Final = "headrace-gateway"
"""Its name in the NATS services protocol."""

_MAX_OPEN_REQUESTS: Final = 4096


async def run_gateway(bus: Bus, *, stop: asyncio.Event) -> None:
    """Answer HTTP until `stop`, then let what is open come to its end within the grace period.

    Raises HeadraceError where the port cannot be had, BrokerError if the broker is gone for good.
    """
    settings = bus.settings
    allow_many_connections()
    open_requests = OpenRequests(limit=_MAX_OPEN_REQUESTS)
    with listening(settings.http_host, settings.http_port) as bound:
        if not await unless_stopped(ensure_provisioned(bus), stop):
            return
        view = ConfigView(bus)
        keeper = BatchKeeper(bus, is_served=view.has_tenant)
        metadata = {"prefix": bus.names.prefix, "url": url_of(bound)}
        answers = answering(bus, SERVICE_NAME, [], description="OpenAI's API", metadata=metadata)
        async with view.running(may_come_later=True), keeper.running(), answers:
            log.info("listening on %s", url_of(bound))
            await serve(
                make_app(bus, view, open_requests, keeper, is_loopback=is_loopback(bound)),
                bound,
                stop=stop,
                closed=bus.closed,
                open_requests=open_requests,
                grace_s=settings.grace_s,
            )
    if bus.closed.is_set() and not stop.is_set():
        raise BrokerUnavailableError("the connection to the broker was closed for good")
