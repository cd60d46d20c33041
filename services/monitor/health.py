"""Tells sick workers to start their engines again. Any number of monitors may say it: a worker obeys once."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from headrace.bus.connection import Bus
from headrace.bus.heartbeats import WorkersView
from headrace.discipline.health import Finding, findings, within_bounds
from headrace.errors import BrokerError
from headrace.schemas.workers import Ailment, Heartbeat, WorkerNudge

__all__ = ["HealthGuard", "Lasting"]

log = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
_AGAIN_S: Final = 5.0
"""A nudge may be lost; the heartbeat shows whether it was obeyed."""
_LASTING_S: Final[dict[Ailment, float]] = {"slow": 5.0}
"""For how long a finding must hold. Failures are counted, and stay; slowness may be a moment's."""


class Lasting:
    """Lets findings through once they have held without a break, and then each at times only."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str, int, Ailment], float] = {}
        self._told_at: dict[tuple[str, str, int, Ailment], float] = {}

    def take(self, found: list[Finding], beats: Mapping[str, Heartbeat], *, now: float) -> list[Finding]:
        """Those of them to act upon now."""
        keys = {_key(finding): finding for finding in found}
        self._since = {key: self._since.get(key, now) for key in keys}
        self._told_at = {key: at for key, at in self._told_at.items() if key in keys}
        lasting = [
            finding for key, finding in keys.items() if now - self._since[key] >= _LASTING_S.get(finding.ailment, 0.0)
        ]
        chosen = [
            finding
            for finding in within_bounds(lasting, beats.values())
            if now - self._told_at.get(_key(finding), -_AGAIN_S) >= _AGAIN_S
        ]
        self._told_at |= {_key(finding): now for finding in chosen}
        return chosen


class HealthGuard:
    """One per monitor. It judges by heartbeats alone, and only while it hears them."""

    def __init__(self, bus: Bus, view: WorkersView, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._view = view
        self._clock = clock
        self._lasting = Lasting()
        self._has_failed = False

    async def run(self) -> None:
        """Look each second, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if not self._view.is_fresh or not self._bus.is_connected:
                self._lasting = Lasting()
                continue
            try:
                await self._look()
            except Exception:  # the edge of a task that must go on: figures are what workers say of themselves
                if not self._has_failed:
                    log.exception("how workers do cannot be judged")
                self._has_failed = True
            else:
                self._has_failed = False

    async def _look(self) -> None:
        beats = self._view.beats
        found = findings(beats.values(), slow_factor=self._bus.settings.slow_factor)
        for finding in self._lasting.take(found, beats, now=self._clock()):
            await self._tell(finding)

    async def _tell(self, finding: Finding) -> None:
        nudge = WorkerNudge(
            kind="restart",
            ailment=finding.ailment,
            reason=finding.reason,
            epoch=finding.epoch,
            engine_run=finding.engine_run,
        )
        log.warning("worker %s is to start its engine again: %s", finding.worker, finding.reason)
        try:
            await self._bus.publish(self._bus.names.ctl(finding.worker), msgspec.json.encode(nudge))
        except BrokerError as error:
            log.warning("worker %s cannot be told now: %s", finding.worker, error)


def _key(finding: Finding) -> tuple[str, str, int, Ailment]:
    return finding.worker, finding.epoch, finding.engine_run, finding.ailment
