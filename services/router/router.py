"""The router process: its endpoints, and what they share."""

import asyncio
import logging

from headrace.bus.configuration import ConfigView
from headrace.bus.connection import Bus, keep_clock
from headrace.bus.heartbeats import WorkersView
from headrace.bus.joblog import JobLog
from headrace.bus.provision import ensure_provisioned
from headrace.bus.services import Endpoint, answering
from headrace.errors import BrokerUnavailableError
from headrace.lifecycle import unless_stopped, wait_first
from headrace.router.control import Control
from headrace.router.deliveries import Deliveries
from headrace.router.ingress import Ingress
from headrace.router.limits import TenantLimits
from headrace.router.models import Models
from headrace.router.queue_limits import keep_queue_limits
from headrace.router.settlement import Settlement
from headrace.schemas.subjects import ROUTER_GROUP

__all__ = ["run_router"]

log = logging.getLogger(__name__)


async def run_router(bus: Bus, *, stop: asyncio.Event) -> None:
    """Route until `stop`; requests under way are finished first. Raises BrokerError if the broker is gone for good."""
    if not await unless_stopped(ensure_provisioned(bus), stop):
        return
    workers = WorkersView(bus)
    view = ConfigView(bus)
    async with workers.running(), view.running(), asyncio.TaskGroup() as group:
        models = Models(bus, workers, view)
        limits = TenantLimits(bus, view)
        settlement = Settlement(bus, limits)
        deliveries = Deliveries(bus, JobLog(bus))
        background = [
            group.create_task(deliveries.run(), name="deliveries"),
            group.create_task(keep_clock(bus), name="clock"),
            group.create_task(limits.run(), name="unspent permits"),
            group.create_task(settlement.run(), name="settlement"),
            group.create_task(keep_queue_limits(bus, view), name="queue limits"),
        ]
        ingress = Ingress(bus, models, deliveries, settlement, view)
        control = Control(bus, models)
        names = bus.names
        endpoints = [
            Endpoint(name="infer", subject=names.infer_filter(), handler=ingress.handle, queue_group=ROUTER_GROUP),
            Endpoint(name="cancel", subject=names.cancel("*", "*"), handler=control.cancel, queue_group=ROUTER_GROUP),
            Endpoint(name="status", subject=names.status("*", "*"), handler=control.status, queue_group=ROUTER_GROUP),
        ]
        async with answering(
            bus,
            "headrace-router",
            endpoints,
            description="takes inference requests in",
            metadata={"prefix": names.prefix},
        ):
            log.info("routing %s", names.infer_filter())
            await wait_first(stop, bus.closed)
        for task in background:
            task.cancel()
    if bus.closed.is_set() and not stop.is_set():
        raise BrokerUnavailableError("the connection to the broker was closed for good")
