"""The worker's heartbeat: one key, written by compare-and-set; a worker declared dead learns it when it beats."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from headrace.bus.connection import Refused, Stored, StoreResult, Unknown
from headrace.bus.heartbeats import WorkersBucket
from headrace.errors import BrokerUnavailableError, ConfigError, NotProvisionedError
from headrace.lifecycle import Backoff
from headrace.schemas.workers import Heartbeat, SeenBeat

__all__ = ["Heart"]

log = logging.getLogger(__name__)

_MIN_INTERVAL_S: Final = 0.02
"""Bounds the beats that changes of the held set cause."""
_TAKING: Final = -1
"""Stands for the number of a beat that is being taken: older than any."""


class Heart:
    """Beats at each interval, and at once when told that something changed.

    `compose` gives the beat to send and its number, which rises. `epoch` names the registration; losing the key ends
    it: `on_lost` is called, and a new epoch begins. `revision` is the last acknowledged beat's; `on_stored` is called
    after each. No beat is sent while `is_well` says no.
    """

    def __init__(
        self,
        bucket: WorkersBucket,
        worker: str,
        *,
        interval_s: float,
        ttl_s: float,
        compose: Callable[[], tuple[int, Heartbeat]],
        new_epoch: Callable[[], str],
        on_lost: Callable[[], Awaitable[None]],
        on_stored: Callable[[], None] = lambda: None,
        is_well: Callable[[], bool] = lambda: True,
        epoch: str | None = None,
    ) -> None:
        self._bucket = bucket
        self._worker = worker
        self._interval_s = interval_s
        self._ttl_s = ttl_s
        self._compose = compose
        self._new_epoch = new_epoch
        self._on_lost = on_lost
        self._on_stored = on_stored
        self._is_well = is_well
        self._changed = asyncio.Event()
        self._stored = asyncio.Event()
        self._oldest_open: int | None = None
        self._last_ok = -float("inf")
        self.epoch = epoch if epoch is not None else new_epoch()
        self.revision = 0

    @property
    def is_fresh(self) -> bool:
        """Whether the last acknowledged beat is younger than half the TTL; a worker that is not must not fetch."""
        return time.monotonic() - self._last_ok < self._ttl_s / 2

    def changed(self) -> None:
        """Beat soon: what the worker holds, or its state, changed."""
        self._changed.set()

    async def register(self) -> None:
        """Take the key. Raises ConfigError ("worker id in use") where another live worker has it.

        A key that somebody may still hold is watched for one TTL; if it stands still, its worker is dead.
        """
        seen = await self._bucket.get(self._worker)
        is_taken = seen is not None and seen.beat is not None and not seen.beat.is_tombstone
        if seen is not None and is_taken and seen.beat is not None and seen.beat.epoch != self.epoch:
            log.info(
                "worker id %s has a heartbeat already; waiting %.1f s to see if it lives", self._worker, self._ttl_s
            )
            seen = await self._watch(seen)
        self.revision = seen.revision if seen is not None else 0
        result = await self._beat()
        if isinstance(result, Refused):
            raise ConfigError(f"worker id in use: {self._worker!r} was registered by another worker just now")
        if not isinstance(result, Stored):
            raise BrokerUnavailableError(f"cannot register worker {self._worker}: {result.reason}")

    def is_settled(self, number: int) -> bool:
        """Whether no beat older than `number` is under way, or of unknown outcome. May be asked from another thread."""
        oldest = self._oldest_open
        return oldest is None or oldest >= number

    async def settled(self, number: int) -> None:
        """Wait until that is so.

        A claim names the last acknowledged beat, and any later one must list what was claimed. So a claim waits for
        the beats that were composed before its message was listed, or others would take the owner for one that gave
        it up.
        """
        while not self.is_settled(number):
            self._stored.clear()
            await self._stored.wait()

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            if not self._is_well():
                log.error("the worker's event loop is stuck; no beat is sent")
                continue
            started = time.monotonic()
            result = await self._beat()
            if isinstance(result, Refused) and not await self._is_still_mine():
                await self._lost()
            elif isinstance(result, Unknown) and not result.is_unserved:
                self._changed.set()  # no answer came for a whole interval: what changed is hidden for long enough
            await asyncio.sleep(max(0.0, _MIN_INTERVAL_S - (time.monotonic() - started)))

    async def leave(self) -> None:
        """Take the key away, so that nobody waits for it to expire; also where the last beat's answer never came."""
        result = await self._bucket.remove(self._worker, expected_revision=self.revision)
        if isinstance(result, Refused) and await self._is_still_mine():
            await self._bucket.remove(self._worker, expected_revision=self.revision)

    async def _beat(self) -> StoreResult:
        if self._oldest_open is None:
            self._oldest_open = _TAKING  # before it is taken, so that whoever composes and then looks sees one of them
        number, beat = self._compose()
        if self._oldest_open == _TAKING:
            self._oldest_open = number
        # No longer than an interval: after a beat without an answer the next one's compare-and-set tells what it was.
        result = await self._bucket.put(
            beat, expected_revision=self.revision, ttl_s=self._ttl_s, timeout_s=self._interval_s
        )
        if isinstance(result, Stored):
            self.revision = result.sequence
            self._last_ok = time.monotonic()
            self._oldest_open = None
            self._stored.set()
            self._on_stored()
        return result

    async def _is_still_mine(self) -> bool:
        """Whether nobody took the key from us: it holds an unacknowledged beat of ours, or it expired untouched.

        It expires while the broker cannot be reached, which is no fault of anybody's. Whoever declares a worker dead
        writes a tombstone, on the marker's revision too, so taking the key back is a race with one winner.
        """
        try:
            seen = await self._bucket.get(self._worker)
        except (BrokerUnavailableError, NotProvisionedError):
            return True  # not known yet; the next beat will tell
        if seen is None:
            self.revision = 0
        elif seen.beat is None and not seen.has_left:
            self.revision = seen.revision
        elif seen.beat is not None and not seen.beat.is_tombstone and seen.beat.epoch == self.epoch:
            self.revision = max(self.revision, seen.revision)
        else:
            return False
        self._changed.set()
        return True

    async def _lost(self) -> None:
        log.warning("worker %s was declared dead; dropping what it held and registering anew", self._worker)
        self._last_ok = -float("inf")
        await self._on_lost()
        self.epoch = self._new_epoch()
        backoff = Backoff(first_s=_MIN_INTERVAL_S, max_s=self._interval_s)
        while True:
            try:
                await self.register()
                return
            except (BrokerUnavailableError, NotProvisionedError) as error:
                log.warning("cannot register anew: %s", error)
                await backoff.pause()

    async def _watch(self, seen: SeenBeat) -> SeenBeat | None:
        await asyncio.sleep(self._ttl_s + 0.5)
        now = await self._bucket.get(self._worker)
        if now is not None and now.beat is not None and now.revision != seen.revision and not now.beat.is_tombstone:
            raise ConfigError(
                f"worker id in use: {self._worker!r} runs on {now.beat.host} (process {now.beat.pid}); "
                "choose another HEADRACE_WORKER_ID"
            )
        return now
