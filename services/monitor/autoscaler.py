"""Follows the load of the groups that are to follow it: looks once a second, decides, writes by compare-and-set."""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Final

import msgspec

from headrace import metrics
from headrace.bus.activity import last_worked_at
from headrace.bus.configuration import ConfigView
from headrace.bus.connection import Bus
from headrace.bus.heartbeats import WorkersView
from headrace.bus.jobqueue import JobQueue, QueueCounts
from headrace.bus.scales import NEVER_WRITTEN, KnownScale, Scales
from headrace.discipline.replicas import wanted_replicas
from headrace.discipline.scaling import GroupLoad, decide
from headrace.errors import BrokerError, NotProvisionedError
from headrace.monitor.groupload import group_load
from headrace.monitor.quiet import Quiet
from headrace.schemas.config_text import key_of
from headrace.schemas.instances import GroupName, Scale
from headrace.schemas.replicas import Autoscale, ReplicaGroup

__all__ = ["Autoscaler"]

log = logging.getLogger(__name__)

_EVERY_S: Final = 1.0
_MARGIN_S: Final = 1.0
_MAX_AT_ONCE: Final = 8
"""Models looked at together."""
_QUIET_TTLS: Final = 2.0
"""Times to live of a worker in which it does nothing after a fault of its own or the broker's."""


class Autoscaler:
    """One per monitor; any number may run: they see the same, decide the same, and the first to write has it.

    While no group is scaled it asks the broker nothing. Else once a second: all keys of decisions in one read, and one
    look at the queues of each model with such a group; whether the last replica did anything is asked only before it
    goes. `wanted` is how many replicas each configured group shall have, as was seen last.
    """

    def __init__(self, bus: Bus, workers: WorkersView) -> None:
        self._bus = bus
        self._workers = workers
        self._config = ConfigView(bus)
        self._scales = Scales(bus)
        span_s = _QUIET_TTLS * bus.settings.worker_ttl_s
        self._quiet = Quiet(span_s=span_s, every_s=_EVERY_S, now=time.monotonic())
        self._is_tidied = False
        self._room = asyncio.Semaphore(_MAX_AT_ONCE)
        self._troubled: set[str] = set()
        self.wanted: Mapping[GroupName, int] = {}

    async def run(self) -> None:
        """Scale until cancelled; a broker that does not answer only makes it wait."""
        self._bus.on_reconnect.append(self._on_reconnect)
        try:
            async with self._config.running(may_come_later=True):
                await self._tick_for_ever()
        finally:
            self._bus.on_reconnect.remove(self._on_reconnect)

    async def _on_reconnect(self) -> None:
        self._quiet.begin(time.monotonic())

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            if self._config.changed.is_set():
                self._config.changed.clear()
                self._is_tidied = False
            is_well = self._config.is_read and self._workers.is_fresh and self._bus.is_connected
            if not self._quiet.may_act(time.monotonic(), is_well=is_well):
                continue
            try:
                await self._look()
            except BrokerError as error:
                log.warning("the number of replicas stays as it is for now: %s", error)
                self._quiet.begin(time.monotonic())
            self._quiet.note_asked(time.monotonic())

    async def _look(self) -> None:
        groups = {
            GroupName(model, group.pool): group
            for model, config in self._config.config.models.items()
            for group in config.instances
        }
        scaled = {name: group.autoscale for name, group in groups.items() if group.autoscale is not None}
        known = await self._scales.read() if scaled or not self._is_tidied else {}
        await self._tidy(known, scaled)
        scales = {name: each.scale for name, each in known.items() if name in scaled}
        self.wanted = {name: wanted_replicas(group, scales.get(name)) for name, group in groups.items()}
        # Of a paused model nothing starts whatever there is, so nothing follows from what waits.
        models = {name.model for name in scaled if not self._config.config.model(name.model).paused}
        self._troubled &= models
        async with asyncio.TaskGroup() as looks:
            for model in models:
                of_model = {name: bounds for name, bounds in scaled.items() if name.model == model}
                looks.create_task(self._look_at(model, groups, of_model, known), name=f"load of {model}")

    async def _look_at(
        self,
        model: str,
        groups: Mapping[GroupName, ReplicaGroup],
        scaled: Mapping[GroupName, Autoscale],
        known: Mapping[GroupName, KnownScale],
    ) -> None:
        """Decide on the groups of one model; what is wrong with it alone keeps no other from its replicas."""
        try:
            async with self._room:
                asked_at = time.monotonic()
                messages = await self._messages(model)
                if time.monotonic() - asked_at > self._bus.settings.request_timeout_s + _MARGIN_S:
                    self._quiet.begin(time.monotonic())  # it was us that stood still: what we know of workers is old
                if not self._quiet.is_over(time.monotonic()):
                    return
                for name, bounds in scaled.items():
                    await self._decide(name, groups[name], bounds, known.get(name, NEVER_WRITTEN), messages)
        except BrokerError as error:
            if model not in self._troubled:
                log.warning("model %s: the number of replicas stays as it is for now: %s", model, error)
            self._troubled.add(model)
        except Exception:  # the edge of a task that must go on: figures are what workers say of themselves
            if model not in self._troubled:
                log.exception("model %s: how many replicas it needs cannot be told", model)
            self._troubled.add(model)
        else:
            self._troubled.discard(model)

    async def _tidy(self, known: Mapping[GroupName, KnownScale], scaled: Mapping[GroupName, Autoscale]) -> None:
        """Remove the decisions on groups that are scaled no more, as far as the entries of their models can be read."""
        for name, each in known.items():
            is_known = key_of("models", name.model) not in self._config.unreadable
            is_left_over = is_known and name not in scaled and each.scale is not None
            if is_left_over and await self._scales.remove(name, expected_revision=each.revision):
                log.info("model %s, pool %s: its number of replicas no longer follows the load", *_of(name))
        self._is_tidied = True

    async def _messages(self, model: str) -> QueueCounts:
        try:
            return await JobQueue(self._bus, model).counts()
        except NotProvisionedError:
            return {}  # nobody has asked for it yet

    async def _decide(
        self, name: GroupName, group: ReplicaGroup, bounds: Autoscale, known: KnownScale, messages: QueueCounts
    ) -> None:
        now = self._bus.clock.now()
        load = group_load(group, name, scale=known.scale, messages=messages, beats=self._workers.beats.values())
        decided = decide(bounds, known.scale, load, now)
        if decided is not None and decided.replicas == 0 < load.wanted:
            load = msgspec.structs.replace(load, worked_at=await last_worked_at(self._bus, name.model, name.pool))
            decided = decide(bounds, known.scale, load, now)
        if decided is None or not await self._scales.write(name, decided, expected_revision=known.revision):
            return
        self.wanted = {**self.wanted, name: decided.replicas}
        if decided.replicas != load.wanted:
            _tell(name, load, decided)


def _tell(name: GroupName, load: GroupLoad, decided: Scale) -> None:
    log.info(
        "model %s, pool %s: %d → %d replicas (%d ready): %s",
        *_of(name), load.wanted, decided.replicas, load.num_ready, decided.reason,
    )  # fmt: skip
    direction = "up" if decided.replicas > load.wanted else "down"
    metrics.SCALINGS.add(metrics.model_label(name.model), name.pool, direction)


def _of(name: GroupName) -> tuple[str, str]:
    return name.model, name.pool
