"""A host agent: takes slots that fit, keeps their workers running, and says so in leases. Any number; none leads."""

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from headrace import __version__
from headrace.bus.configuration import ConfigView
from headrace.bus.connection import Bus, keep_clock
from headrace.bus.heartbeats import WorkersView
from headrace.bus.instances import InstancesBucket, InstancesView
from headrace.bus.provision import ensure_provisioned
from headrace.bus.services import answering
from headrace.errors import BrokerError, BrokerUnavailableError
from headrace.host.launching import Launch
from headrace.host.lease import Lease
from headrace.host.naming import earlier_workers, worker_id
from headrace.host.planning import Action, Claim, Drain, GiveUp, MarkFailed, Release, Sight, Start, plan
from headrace.host.presence import Presence
from headrace.host.replica import Replica
from headrace.lifecycle import unless_stopped, wait_first
from headrace.schemas.instances import Device, FailedGeneration, GroupName, HostBeat, SlotName
from headrace.schemas.replicas import ReplicaGroup

__all__ = ["Agent", "HostOptions", "run_host"]

log = logging.getLogger(__name__)

SERVICE_NAME: Final = "headrace-host"
"""Its name in the NATS services protocol."""

_COOL_OFF_S: Final = 60.0
"""How long a host leaves a generation to others after it failed here."""
_FORGET_S: Final = 30.0
"""After that, a generation that failed and is configured no more may be tried again: all have seen the change."""
_LEASE_BEATS: Final = 4
_WATCH_SHARE: Final = 0.1


class HostOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which host it is, and what it lends to workers."""

    host: str
    devices: tuple[Device, ...]


async def run_host(bus: Bus, options: HostOptions, launch: Launch, *, stop: asyncio.Event) -> None:
    """Run one agent until `stop` is set, its workers are drained and its leases given back.

    Goes on through a broker's restart. Raises BrokerError where the broker cannot be used at the start or the
    connection was given up for good, ConfigError where another agent runs under the same name.
    """
    if await unless_stopped(ensure_provisioned(bus), stop):
        await Agent(bus, options, launch).run(stop)


class Agent:
    """Holds the parts of an agent together.

    Leases and the host's beat live for twice the time a worker's heartbeat does, and are renewed four times in it. They
    are renewed by a task of their own, and watched by another, so that no wait of a plan makes them late.
    """

    def __init__(self, bus: Bus, options: HostOptions, launch: Launch) -> None:
        self._bus = bus
        self._host = options.host
        self._devices = options.devices
        self._launch = launch
        self._epoch = secrets.token_hex(4)
        self._ttl_s = 2 * bus.settings.worker_ttl_s
        self._beat_s = self._ttl_s / _LEASE_BEATS
        self._bucket = InstancesBucket(bus)
        self._instances = InstancesView(bus)
        self._workers = WorkersView(bus)
        self._config = ConfigView(bus)
        self._replicas: dict[SlotName, Replica] = {}
        self._avoided: dict[tuple[GroupName, str, str], tuple[float, str]] = {}
        self._waiting: dict[SlotName, float] = {}
        self._num_started = 0
        self._is_draining = False
        self._is_waiting = False
        self._reason = ""
        self._was_away_at = -math.inf
        self._changed = asyncio.Event()
        self._is_due = asyncio.Event()
        self._presence = Presence(self._bucket, self._host, self._beat, ttl_s=self._ttl_s, beat_s=self._beat_s)

    async def run(self, stop: asyncio.Event) -> None:
        """Register, run replicas until `stop`, drain, leave."""
        async with (
            self._instances.running(),
            self._workers.running(),
            self._config.running(),
            answering(
                self._bus,
                SERVICE_NAME,
                [],
                description="Runs Headrace's workers on a host",
                metadata={"host": self._host},
            ),
            asyncio.TaskGroup() as group,
        ):
            if not await unless_stopped(self._presence.register(), stop):
                return
            log.info("host %s lends %s", self._host, ", ".join(map(_shown, self._devices)) or "nothing")
            self._bus.on_reconnect.append(self._on_reconnect)
            try:
                async with self._renewing(group):
                    await self._follow(group, stop)
                    await self._leave()
            finally:
                self._bus.on_reconnect.remove(self._on_reconnect)
            if self._bus.is_connected:
                await self._presence.leave()
        if self._presence.ousted.is_set():
            raise self._presence.refusal()
        if self._bus.closed.is_set() and not stop.is_set():
            raise BrokerUnavailableError("the connection to the broker was given up; start the agent again")

    # what it says

    @contextlib.asynccontextmanager
    async def _renewing(self, group: asyncio.TaskGroup) -> AsyncIterator[None]:
        tasks = [
            group.create_task(self._renew_for_ever(), name="renewals"),
            group.create_task(self._watch_leases(), name="leases"),
            group.create_task(keep_clock(self._bus), name="clock"),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    async def _renew_for_ever(self) -> None:
        while True:
            replicas = list(self._replicas.values())
            await asyncio.gather(
                self._presence.beat(),
                *(each.lease.renew(each.as_slot(), every_s=0.9 * self._beat_s) for each in replicas),
            )
            await wait_first(self._is_due, timeout_s=self._beat_s)
            self._is_due.clear()

    async def _watch_leases(self) -> None:
        """Drain what is another's, whatever else waits for the broker."""
        while True:
            await asyncio.sleep(_WATCH_SHARE * self._ttl_s)
            for replica in self._replicas.values():
                if replica.state != "Draining" and not replica.lease.is_held:
                    log.warning("the lease of %s is lost; draining its worker", replica.name)
                    replica.drain()

    def _beat(self) -> HostBeat:
        return HostBeat(
            host=self._host,
            epoch=self._epoch,
            devices=self._promised(),
            num_slots=sum(replica.lease.is_held for replica in self._replicas.values()),
            interval_s=self._beat_s,
            is_draining=self._is_draining,
            reason=self._reason,
            version=__version__,
        )

    def _promised(self) -> tuple[Device, ...]:
        promised = {device.name: 0 for device in self._devices}
        for replica in self._replicas.values():
            promised[replica.device] += replica.need_bytes
        return tuple(msgspec.structs.replace(device, promised_bytes=promised[device.name]) for device in self._devices)

    # what it does

    async def _follow(self, group: asyncio.TaskGroup, stop: asyncio.Event) -> None:
        """Plan and act at each change, until told to stop or nothing more can be done."""
        events = (self._instances.changed, self._workers.changed, self._config.changed, self._changed)
        ends = (stop, self._bus.closed, self._presence.ousted)
        while not any(event.is_set() for event in ends):
            for event in events:
                event.clear()
            beats = self._workers.beats
            for replica in self._replicas.values():
                replica.look(beats.get(replica.worker), is_fresh=self._workers.is_fresh)
            planned = plan(self._sight())
            self._waiting = dict(planned.waiting)
            self._say_why(planned.reason or next((why for _, why in self._avoided.values()), ""))
            for action in planned.actions:
                try:
                    await self._do(action, group)
                except BrokerError as error:
                    log.warning("%s of %s is put off: %s", type(action).__name__, action.slot, error)
            with contextlib.suppress(BrokerError):
                await self._tell_proven()
                await self._forget_failed()
            await wait_first(*ends, *events, timeout_s=self._beat_s / 2)

    def _sight(self) -> Sight:
        now = time.monotonic()
        self._avoided = {key: avoided for key, avoided in self._avoided.items() if avoided[0] > now}
        view = self._instances
        return Sight(
            host=self._host,
            now=now,
            beat_s=self._beat_s,
            groups=_groups(self._config),
            scales=view.scales,
            slots=view.slots if view.is_fresh else {},  # who sees fewer stops fewer
            hosts=view.hosts,
            failed=view.failed.keys(),
            proven=view.proven,
            devices=self._devices,
            holdings={name: replica.as_holding() for name, replica in self._replicas.items()},
            avoided=self._avoided.keys(),
            waiting=self._waiting,
            may_claim=self._may_claim(now),
        )

    def _may_claim(self, now: float) -> bool:
        """Not while the broker is away, nor right after it: leases that expired meanwhile are first their holders'."""
        is_settled = now - max(self._was_away_at, self._instances.unsure_at) >= self._ttl_s
        return self._instances.is_fresh and is_settled and not self._has_predecessors()

    async def _on_reconnect(self) -> None:
        self._was_away_at = time.monotonic()
        self._is_due.set()

    def _has_predecessors(self) -> bool:
        """Whether workers of an earlier run of this agent still drain here: their memory is not known, but taken."""
        found = earlier_workers(self._host, self._epoch, self._workers.beats)
        if bool(found) != self._is_waiting:
            self._is_waiting = bool(found)
            if found:
                log.warning("taking nothing while workers of an earlier run drain here: %s", ", ".join(found))
        return bool(found)

    async def _do(self, action: Action, group: asyncio.TaskGroup) -> None:
        if isinstance(action, Claim):
            await self._claim(action)
            return
        replica = self._replicas[action.slot]
        match action:
            case Start():
                self._num_started += 1
                worker = worker_id(self._host, self._epoch, self._num_started)
                log.info("starting worker %s for %s on %s", worker, action.slot, replica.device)
                replica.start(worker, group)
            case Drain(why=why):
                log.info("draining %s: %s", action.slot, why)
                replica.drain()
            case Release():
                log.info("releasing %s", action.slot)
                await self._release(replica)
            case GiveUp(why=why):
                log.warning("%s is left to other hosts for %g s; it fails here: %s", action.slot, _COOL_OFF_S, why)
                key = (action.slot.group, action.slot.generation, replica.device)
                self._avoided[key] = time.monotonic() + _COOL_OFF_S, f"{action.slot} fails here: {why}"
                await self._release(replica)
            case MarkFailed(why=why, failures=failures):
                log.error("no more workers like %s are started, until the configuration changes: %s", action.slot, why)
                failed = FailedGeneration(
                    reason=why, failures=failures, host=self._host, failed_at=self._bus.clock.now()
                )
                await self._bucket.mark_failed(action.slot.group, action.slot.generation, failed)

    async def _claim(self, claim: Claim) -> None:
        lease = Lease(self._bucket, claim.slot, ttl_s=self._ttl_s, timeout_s=self._beat_s)
        replica = Replica(
            claim,
            lease,
            host=self._host,
            epoch=self._epoch,
            launch=self._launch,
            changed=self._note_change,
            is_online=lambda: self._instances.is_fresh,
        )
        if await lease.claim(replica.as_slot()):
            log.info("took %s, on %s", claim.slot, claim.device)
            self._replicas[claim.slot] = replica
            self._note_change()
        else:
            log.info("%s was taken by another", claim.slot)

    async def _release(self, replica: Replica) -> None:
        await replica.lease.release()
        del self._replicas[replica.name]
        self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._is_due.set()

    async def _tell_proven(self) -> None:
        """Say of a generation that came up that it does, before anybody takes a failure of it for its own."""
        groups = _groups(self._config)
        for name, replica in self._replicas.items():
            group = groups.get(name.group)
            is_wanted = group is not None and group.generation == name.generation
            if is_wanted and replica.state == "Ready" and self._instances.proven.get(name.group) != name.generation:
                await self._bucket.mark_proven(name.group, name.generation)

    async def _forget_failed(self) -> None:
        """Let generations be tried again that were configured away since they failed."""
        groups = _groups(self._config)
        until = self._bus.clock.now() - _FORGET_S
        for (name, generation), failed in list(self._instances.failed.items()):
            group = groups.get(name)
            if failed.failed_at < until and (group is None or group.generation != generation):
                await self._bucket.forget_failed(name, generation)

    def _say_why(self, reason: str) -> None:
        if reason != self._reason:
            self._reason = reason
            self._is_due.set()
            if reason:
                log.warning("%s", reason)

    async def _leave(self) -> None:
        """Give the leases back at once, so that others start while our workers drain; wait until those are gone."""
        self._is_draining = True
        self._is_due.set()
        replicas = list(self._replicas.values())
        log.info("leaving; giving %d leases back, draining their workers", len(replicas))
        for replica in replicas:
            replica.drain()
        await asyncio.gather(*(replica.lease.release() for replica in replicas))
        for replica in replicas:
            await replica.ended.wait()  # bounded: a worker that does not stop is killed


def _groups(config: ConfigView) -> dict[GroupName, ReplicaGroup]:
    return {
        GroupName(model, group.pool): group
        for model, entry in config.config.models.items()
        for group in entry.instances
    }


def _shown(device: Device) -> str:
    return f"{device.name} ({device.total_bytes / (1 << 30):.1f} GiB)"
