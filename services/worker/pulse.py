"""The heartbeat in a thread and on a connection of its own, so that a busy event loop cannot starve it."""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from headrace.bus.connection import Bus, connect
from headrace.bus.heartbeats import WorkersBucket
from headrace.errors import BrokerUnavailableError, NotProvisionedError
from headrace.lifecycle import Backoff, unless_stopped
from headrace.schemas.workers import Heartbeat
from headrace.worker.heart import Heart

__all__ = ["Pulse"]

log = logging.getLogger(__name__)

_STOP_S: Final = 5.0
_SWITCH_S: Final = 0.0005
"""How long one of the two threads may keep the interpreter while the other waits for it, a handful of times a beat.

With Python's own 5 ms a beat beside a busy loop takes 20 ms and more, and a claim may have to wait for one.
"""
_RETRY_FIRST_S: Final = 0.1
_RETRY_MAX_S: Final = 2.0


class Pulse:
    """A `Heart` whose beats are composed by the worker's loop and sent by a thread.

    The loop hands over a composed beat whenever something changed, and at each interval (`refresh`); the thread sends
    the last one it was given. If the loop hands over none for `stuck_after_s` it is not busy but stuck: the thread
    stops beating, and the worker is declared dead like any other that hangs.

    In the worker's loop `on_lost` runs when the registration was lost, `on_fresh` when a beat was stored after
    `is_fresh` was denied; `failed` is set when the heart cannot go on.
    """

    def __init__(
        self,
        bus: Bus,
        worker: str,
        *,
        compose: Callable[[], Heartbeat],
        new_epoch: Callable[[], str],
        on_lost: Callable[[], None],
        on_fresh: Callable[[], None],
        stuck_after_s: float,
    ) -> None:
        self._settings = bus.settings
        self._url = bus.url
        self._inbox_prefix = bus.inbox_prefix
        self._worker = worker
        self._compose = compose
        self._new_epoch = new_epoch
        self._on_lost = on_lost
        self._on_fresh = on_fresh
        self._was_denied = False
        self._stuck_after_s = stuck_after_s
        self._composed: tuple[int, Heartbeat] | None = None
        self._next_number = 0
        self._is_stale = False
        self._claims: list[asyncio.Future[None]] = []
        self._composed_at = time.monotonic()
        self._heart: Heart | None = None
        self._first_epoch = new_epoch()
        self._main_loop: asyncio.AbstractEventLoop | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._is_stopped = False
        self._thread: threading.Thread | None = None
        self.failed = asyncio.Event()
        self.failure: BaseException | None = None

    @property
    def epoch(self) -> str:
        """Name of the present registration."""
        return self._heart.epoch if self._heart is not None else self._first_epoch

    @property
    def revision(self) -> int:
        """Revision of the last acknowledged beat."""
        return self._heart.revision if self._heart is not None else 0

    @property
    def is_fresh(self) -> bool:
        """Whether the last acknowledged beat is younger than half the TTL; a worker that is not must not fetch."""
        is_fresh = self._heart is not None and self._heart.is_fresh
        self._was_denied = self._was_denied or not is_fresh
        return is_fresh

    def changed(self) -> int:
        """Compose a beat and send it soon; returns its number. Changes of one turn of the loop share a beat."""
        if not self._is_stale:
            self._is_stale = True
            asyncio.get_running_loop().call_soon(self._send_changed)
        return self._next_number

    def _send_changed(self) -> None:
        if self._is_stale:
            self.refresh()
        if self._loop is not None and self._heart is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._heart.changed)

    def refresh(self) -> None:
        """Compose the beat to be sent next."""
        self._is_stale = False
        self._composed = (self._next_number, self._compose())
        self._next_number += 1
        self._composed_at = time.monotonic()

    async def refresh_for_ever(self) -> None:
        """Keep the figures of the beat current, and show that the loop turns."""
        while True:
            self.refresh()
            await asyncio.sleep(self._settings.heartbeat_s)

    async def settled(self, number: int) -> None:
        """Wait until no beat is under way that is older than `number`, which was composed before; see `Heart.settled`.

        The heart marks a beat as under way before it takes the composed one, and we composed before we look, so one
        of the two sees the other.
        """
        if self._heart is None or self._main_loop is None:
            raise BrokerUnavailableError("the worker is not registered")
        if self._is_stale:
            self.refresh()
        while not self._heart.is_settled(number):
            stored: asyncio.Future[None] = self._main_loop.create_future()
            self._claims.append(stored)
            await stored

    def _tell_stored(self) -> None:
        assert self._main_loop is not None
        if not self._main_loop.is_closed():
            self._main_loop.call_soon_threadsafe(self._look_again)

    def _look_again(self) -> None:
        """Claims that wait look whether the beat that was just stored is what they wait for."""
        claims, self._claims = self._claims, []
        for stored in claims:
            _resolve(stored)
        if self._was_denied and self._heart is not None and self._heart.is_fresh:
            self._was_denied = False
            self._on_fresh()

    async def start(self) -> None:
        """Register and begin to beat. Raises what keeps the worker from registering."""
        self._main_loop = asyncio.get_running_loop()
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self.refresh()
        registered: asyncio.Future[None] = self._main_loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(registered,), name="heartbeat", daemon=True)
        self._thread.start()
        await registered

    async def stop(self) -> None:
        """Take the key away and end the thread. Safe to call twice, and before `start`."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._is_stopped = True
        if self._loop is not None and self._stopping is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stopping.set)
        await asyncio.to_thread(thread.join, _STOP_S)

    def _run(self, registered: "asyncio.Future[None]") -> None:
        assert self._main_loop is not None
        main_loop = self._main_loop
        try:
            asyncio.run(self._live(registered))
        except BaseException as error:  # the thread's last line: the worker's loop decides what follows
            failure = error
            main_loop.call_soon_threadsafe(self._fail, registered, failure)

    def _fail(self, registered: "asyncio.Future[None]", error: BaseException) -> None:
        if not registered.done():
            registered.set_exception(error)
            return
        log.error("the heartbeat ended: %s", error)
        self.failure = error
        self.failed.set()

    async def _live(self, registered: "asyncio.Future[None]") -> None:
        self._stopping = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if not self._is_stopped:  # `stop` came before it could set the event
            await unless_stopped(self._register_and_beat(registered), self._stopping)

    async def _register_and_beat(self, registered: "asyncio.Future[None]") -> None:
        assert self._main_loop is not None
        async with connect(
            self._url, self._settings, name=f"headrace-heartbeat-{self._worker}", inbox_prefix=self._inbox_prefix
        ) as bus:
            heart = self._heart = Heart(
                WorkersBucket(bus),
                self._worker,
                interval_s=self._settings.heartbeat_s,
                ttl_s=self._settings.worker_ttl_s,
                compose=lambda: self._beat_of(bus),
                new_epoch=self._new_epoch,
                on_lost=self._tell_lost,
                on_stored=self._tell_stored,
                is_well=lambda: time.monotonic() - self._composed_at < self._stuck_after_s,
                epoch=self._first_epoch,
            )

            async def beat_again() -> None:
                heart.changed()

            bus.on_reconnect.append(beat_again)  # monitors wait for a beat on the new connection, and not for long
            await self._register(heart)
            self._main_loop.call_soon_threadsafe(_resolve, registered)
            try:
                async with asyncio.TaskGroup() as group:
                    beating = group.create_task(heart.run(), name="beat")
                    await bus.closed.wait()
                    beating.cancel()
                raise BrokerUnavailableError("the heartbeat's connection was closed for good")
            finally:
                if bus.is_connected:
                    await heart.leave()

    async def _register(self, heart: Heart) -> None:
        retries = Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S, for_s=self._settings.retry_for_s)
        while True:
            try:
                await heart.register()
                return
            except (BrokerUnavailableError, NotProvisionedError) as error:
                if retries.is_over:
                    raise
                log.warning("cannot register yet: %s", error)
                await retries.pause()

    def _beat_of(self, bus: Bus) -> tuple[int, Heartbeat]:
        assert self._heart is not None
        assert self._composed is not None
        number, beat = self._composed
        return number, msgspec.structs.replace(beat, epoch=self._heart.epoch, connection=bus.connection_id)

    async def _tell_lost(self) -> None:
        assert self._main_loop is not None
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def tell() -> None:
            self._on_lost()
            self.refresh()
            loop.call_soon_threadsafe(_resolve, told)

        self._main_loop.call_soon_threadsafe(tell)
        await told


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
