"""Keeps the promise that a dead worker's requests go on elsewhere: watches, suspects, evicts, sweeps."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from headrace.bus.connection import Bus
from headrace.bus.disconnects import Disconnect, disconnects
from headrace.bus.heartbeats import WorkersView
from headrace.bus.overview import list_models
from headrace.errors import BrokerError
from headrace.monitor.eviction import Evictor
from headrace.monitor.liveness import Suspect, Watch
from headrace.monitor.sweep import Sweep

__all__ = ["Guard"]

log = logging.getLogger(__name__)

_TICK_S: Final = 0.1
_MAX_LAG_S: Final = 0.5
_SWEEP_S: Final = 0.5
_RETRY_LISTEN_S: Final = 5.0
_CLOSED_REASON: Final = "Client Closed"
_RESET_REASONS: Final = ("Read Error", "Write Error")
_BACK_WITHIN_S: Final = 0.15
"""What a worker gets to beat on a new connection after its own was reset; it connects again at once."""


class Guard:
    """One per monitor; any number of monitors may run, since each action begins with a compare-and-set."""

    def __init__(self, bus: Bus, view: WorkersView) -> None:
        self._bus = bus
        self._view = view
        self._evictor = Evictor(bus, self._peers)
        self._watch = Watch(ttl_s=bus.settings.worker_ttl_s)
        self._sweep = Sweep(bus, self._evictor)
        self._evicting: set[str] = set()
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Guard until cancelled."""
        self._watch.excuse(time.monotonic())
        self._bus.on_reconnect.append(self._on_reconnect)
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._tick_for_ever(group), name="liveness")
                group.create_task(self._sweep_for_ever(), name="sweep")
        finally:
            self._group = None
            self._bus.on_reconnect.remove(self._on_reconnect)

    def _peers(self, model: str, pool: str) -> list[str]:
        beats = self._view.beats.values()
        return [beat.worker for beat in beats if (beat.model, beat.pool) == (model, pool)]

    async def listen(self, system_url: str) -> None:
        """Take disconnect notices from the system account until cancelled; silence takes longer to tell."""
        while True:
            try:
                async with disconnects(system_url, self._bus.settings, handler=self.on_disconnect):
                    log.info("listening for disconnect notices")
                    await asyncio.Event().wait()
            except BrokerError as error:
                log.warning("no disconnect notices: %s; trying again", error)
                await asyncio.sleep(_RETRY_LISTEN_S)

    async def on_disconnect(self, notice: Disconnect) -> None:
        """The broker says that a connection ended: if it was a worker's and the client closed it, its process is gone.

        A reset is what the kernel sends for a killed process that had not read everything yet, but something between
        may have sent it: then the worker is back in a moment. Other reasons are troubles of the network or the broker,
        which the worker may outlive.
        """
        if notice.reason != _CLOSED_REASON and notice.reason not in _RESET_REASONS:
            return
        for worker, seen in list(self._view.workers.items()):
            beat = seen.beat
            if beat is None or beat.is_tombstone or beat.connection != notice.connection:
                continue
            if notice.reason == _CLOSED_REASON:
                await self._evict_disconnected(worker, notice)
            elif self._group is not None:
                self._group.create_task(self._evict_unless_back(worker, notice), name=f"reset {worker}")

    async def _evict_unless_back(self, worker: str, notice: Disconnect) -> None:
        await asyncio.sleep(_BACK_WITHIN_S)
        await self._evict_disconnected(worker, notice)

    async def _evict_disconnected(self, worker: str, notice: Disconnect) -> None:
        if worker in self._evicting:
            return
        self._evicting.add(worker)
        try:
            # The view may be a beat behind, and the tombstone needs the very last revision and list.
            seen = await self._view.refresh(worker)
            beat = seen.beat if seen is not None else None
            if seen is not None and beat is not None and not beat.is_tombstone and beat.connection == notice.connection:
                await self._evict_seen(Suspect(seen=seen, last_beat=beat, reason=f"disconnected: {notice.reason}"))
        except BrokerError as error:
            log.warning("worker %s cannot be evicted now: %s", worker, error)
            self._watch.excuse(time.monotonic())
        finally:
            self._evicting.discard(worker)

    async def _evict(self, suspect: Suspect) -> None:
        now = await self._view.refresh(suspect.last_beat.worker)
        if now is not None and now.revision != suspect.seen.revision:
            return  # it has beaten, or left, or somebody was faster
        await self._evict_seen(suspect)

    async def _evict_seen(self, suspect: Suspect) -> None:
        """Evict on what was read just now."""
        if await self._evictor.evict(suspect.seen, suspect.last_beat, reason=suspect.reason):
            await self._sweep.after_eviction(suspect.last_beat, self._view.beats)
        await self._view.refresh(suspect.last_beat.worker)

    async def _tick_for_ever(self, group: asyncio.TaskGroup) -> None:
        expected = time.monotonic() + _TICK_S
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            if now - expected > _MAX_LAG_S or not self._view.is_fresh or not self._bus.is_connected:
                self._watch.excuse(now)
                self._sweep.restart()
            expected = now + _TICK_S
            for suspect in self._watch.suspects(self._view.workers, self._view.heard, now=now):
                worker = suspect.last_beat.worker
                if worker in self._evicting:
                    continue
                self._evicting.add(worker)
                group.create_task(
                    self._guarded(worker, partial(self._evict, suspect)),
                    name=f"evict {worker}",
                )
            for beat in self._watch.replaced(self._view.workers):
                self._watch.forget(beat.worker)
                group.create_task(
                    self._guarded(beat.worker, partial(self._evictor.hand_over, beat)),
                    name=f"hand over {beat.worker}",
                )

    async def _guarded(self, worker: str, act: Callable[[], Awaitable[object]]) -> None:
        try:
            await act()
            self._watch.forget(worker)
        except BrokerError as error:
            log.warning("worker %s cannot be dealt with now: %s", worker, error)
            self._watch.excuse(time.monotonic())
        finally:
            self._evicting.discard(worker)

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            if not self._view.is_fresh:
                continue
            try:
                await self._sweep.run_once(await list_models(self._bus), self._view.beats)
            except BrokerError as error:
                log.info("cannot look through the queues now: %s", error)
                self._watch.excuse(time.monotonic())
                self._sweep.restart()

    async def _on_reconnect(self) -> None:
        self._watch.excuse(time.monotonic())
        self._sweep.restart()
