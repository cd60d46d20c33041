"""A monitor process: follows the heartbeats, evicts, logs, answers what it sees. Any number may run; none leads."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from headrace.bus.connection import Bus
from headrace.bus.heartbeats import WorkersView
from headrace.bus.overview import list_workers, overview
from headrace.bus.provision import ensure_provisioned
from headrace.bus.services import Endpoint, IncomingRequest, answering, refuse, reply_with
from headrace.errors import BrokerError, BrokerUnavailableError
from headrace.lifecycle import unless_stopped, wait_first
from headrace.monitor.autoscaler import Autoscaler
from headrace.monitor.changes import Change, changes_between, live_beats
from headrace.monitor.deadlines import Deadlines
from headrace.monitor.guard import Guard
from headrace.monitor.health import HealthGuard
from headrace.monitor.lost import LostWorkers
from headrace.monitor.orphans import remove_orphans_for_ever
from headrace.monitor.tidying import tidying
from headrace.schemas.refusals import Refusal
from headrace.schemas.workers import Heartbeat

__all__ = ["SERVICE_NAME", "run_monitor"]

log = logging.getLogger(__name__)

SERVICE_NAME: Final = "headrace-monitor"
"""Its name in the NATS services protocol."""

_LOOK_S: Final = 1.0
"""Longest wait for a push before it looks by itself."""


async def run_monitor(bus: Bus, *, stop: asyncio.Event, has_http: bool = False) -> None:
    """Watch until `stop` is set; with `has_http` also answer `/metrics` and `/healthz`.

    Goes on through a broker's restart. Raises BrokerError where the broker cannot be used at the start, or the
    connection was given up for good.
    """
    if not await unless_stopped(ensure_provisioned(bus), stop):
        return
    monitor = _Monitor(bus)
    view = WorkersView(bus)
    autoscaler = Autoscaler(bus, view)
    endpoint = Endpoint(name="state", subject=bus.names.monitor_state(), handler=monitor.answer)
    bus.on_reconnect.append(monitor.on_reconnect)
    try:
        async with (
            view.running(),
            answering(
                bus,
                SERVICE_NAME,
                [endpoint],
                description="Watches Headrace's workers",
                metadata={"prefix": bus.names.prefix, "notices": "no" if bus.settings.system_url is None else "yes"},
            ),
            _answering_http(bus, view, autoscaler) if has_http else contextlib.nullcontext(),
            _guarding(bus, view, autoscaler),
            Deadlines(bus).running(),
            tidying(bus),
        ):
            log.info("watching %s", bus.names.workers_bucket)
            while not stop.is_set():
                await monitor.look(view)
                await wait_first(stop, view.changed, bus.closed, monitor.reconnected, timeout_s=_LOOK_S)
                view.changed.clear()
                if bus.closed.is_set() and not stop.is_set():
                    raise BrokerUnavailableError("the connection to the broker was given up; start the monitor again")
                if monitor.reconnected.is_set():
                    await monitor.after_reconnect()
    finally:
        bus.on_reconnect.remove(monitor.on_reconnect)


@contextlib.asynccontextmanager
async def _guarding(bus: Bus, view: WorkersView, autoscaler: Autoscaler) -> AsyncIterator[None]:
    """Evict, hand over and scale inside this context."""
    guard = Guard(bus, view)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(guard.run(), name="guard"),
            group.create_task(remove_orphans_for_ever(bus), name="orphaned deliveries"),
            group.create_task(HealthGuard(bus, view).run(), name="health"),
            group.create_task(autoscaler.run(), name="autoscaler"),
        ]
        if (system_url := bus.settings.system_url) is not None:
            tasks.append(group.create_task(guard.listen(system_url), name="disconnect notices"))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


def _answering_http(
    bus: Bus, view: WorkersView, autoscaler: Autoscaler
) -> contextlib.AbstractAsyncContextManager[None]:
    from headrace.monitor.exposition import Exposition
    from headrace.monitor.http import answering_http

    return answering_http(bus, Exposition(bus, view, lambda: autoscaler.wanted))


class _Monitor:
    """What one monitor knows: the live workers at its last look, and those it saw go."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._known: dict[str, Heartbeat] = {}
        self._lost = LostWorkers()
        self.reconnected = asyncio.Event()

    async def on_reconnect(self) -> None:
        """The broker is back; told by the connection, which must not be kept waiting."""
        self.reconnected.set()

    async def after_reconnect(self) -> None:
        """Make what a broker that lost its store no longer has; the view lists the workers anew by itself."""
        self.reconnected.clear()
        try:
            await ensure_provisioned(self._bus)
        except BrokerError as error:
            log.warning("cannot check the streams after a reconnect: %s", error)

    async def look(self, view: WorkersView) -> None:
        """Compare the view with the last look; log and remember the differences."""
        now = live_beats(view.workers)
        gone = [worker for worker, beat in self._known.items() if worker not in now or now[worker].epoch != beat.epoch]
        if gone and not view.is_fresh:
            return  # the broker does not answer: silence says nothing about the workers
        left: set[str] = set()
        if gone:
            try:
                _, ended = await list_workers(self._bus)
            except BrokerError:
                return
            left = {worker.id for worker in ended if worker.ending == "left"}
        for change in changes_between(self._known, now, left=left):
            _log_change(change)
            self._lost.take(change)
        self._known = now

    async def answer(self, request: IncomingRequest) -> None:
        """Answer what `status --json` would print, with what this monitor remembers of the workers that are gone."""
        try:
            now = await overview(self._bus)
        except BrokerError as error:
            await refuse(self._bus, request, Refusal(code="internal", message=str(error)))
            return
        await reply_with(self._bus, request, msgspec.structs.replace(now, gone=self._lost.merged_with(now.gone)))


def _log_change(change: Change) -> None:
    before, now = change.before, change.now
    if now is not None and before is None:
        log.info("worker %s of model %s appeared: %s", change.worker, now.model, _shown(now))
    elif now is not None and before is not None:
        level = logging.WARNING if now.state == "Failed" else logging.INFO
        log.log(level, "worker %s: %s → %s", change.worker, before.state, _shown(now))
    elif before is not None and change.kind == "left":
        log.info("worker %s left", change.worker)
    elif before is not None:
        log.warning("worker %s expired; it held %d requests", change.worker, len(before.held))


def _shown(beat: Heartbeat) -> str:
    """The state, and what goes with it: the reason where it takes nothing, what it can hold where it works."""
    if beat.reason:
        return f"{beat.state}: {beat.reason}"
    if beat.state == "Ready":
        return (
            f"Ready, engine {beat.engine}, {beat.kv_capacity_tokens} KV tokens, {beat.max_concurrency} requests at most"
        )
    return beat.state
