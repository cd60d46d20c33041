"""Which batches this process runs: each batch by one process at a time, taken over within seconds if that is gone."""

import asyncio
import contextlib
import logging
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Final

from headrace.batch.sweeping import sweep_for_ever
from headrace.batch.work import BatchWork, TakenOver
from headrace.bus.batches import BatchChange, BatchRecords
from headrace.bus.connection import Bus
from headrace.errors import BrokerError
from headrace.lifecycle import Backoff, wait_first
from headrace.schemas.subjects import Tenant

__all__ = ["BatchKeeper"]

log = logging.getLogger(__name__)

_LOOK_EVERY_S: Final = 1.0
_LEASE_TTL_S: Final = 5
_RENEW_EVERY_S: Final = 1.0
_SILENT_S: Final = 3.0 * _LEASE_TTL_S
"""A lease that nobody renewed for so long is dead, whatever became of the broker's word of it."""

_MAX_RUNNING: Final = 8
_RETRY_FIRST_S: Final = 0.5
_RETRY_MAX_S: Final = 10.0

_Key = tuple[Tenant, str]


class _Open:
    """A batch that is not over, as this process knows it. `told` is set whenever its record changes.

    Until `sends_until` it may send requests: 0 where it only has its files to write.
    """

    def __init__(self) -> None:
        self.is_known = False
        self.sends_until = 0.0
        self.is_leased = False
        self.lease_revision = 0
        self.lease_seen_at = 0.0
        self.told = asyncio.Event()

    def is_free(self, now: float) -> bool:
        """Whether nobody runs it."""
        return self.is_known and (not self.is_leased or now - self.lease_seen_at > _SILENT_S)


class BatchKeeper:
    """Looks for batches that nobody runs, and runs some; several processes that do so are equal.

    A lease in the broker says who runs a batch. It lives five seconds and is renewed each second, so a process that
    dies is noticed by its expiry; one that stops gives its leases up. A lease protects nothing but effort: what a
    runner writes is right though another may run the same batch. Holds the open batches in memory, and at most eight
    running ones, but one of each tenant in any case, so that nobody's batches keep another's from running; the rest
    wait for a process with room. The requests of a tenant that is not `served` any more wait too, until it is again or
    their time is up.
    """

    def __init__(self, bus: Bus, *, is_served: Callable[[Tenant], bool]) -> None:
        self._bus = bus
        self._is_served = is_served
        self._records = BatchRecords(bus)
        self._owner = uuid.uuid4().hex
        self._seen_revision = 0
        self._open: dict[_Key, _Open] = {}
        self._running: dict[_Key, asyncio.Task[None]] = {}
        self._look_now = asyncio.Event()

    def nudge(self) -> None:
        """Something was written about a batch: look at once."""
        self._look_now.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Inside this context batches are looked for and run; at its end they are left to others.

        What dead processes left of files is removed too.
        """
        looking = asyncio.create_task(self._look_for_ever(), name="look for batches")
        sweeping = asyncio.create_task(sweep_for_ever(self._bus), name="sweep files")
        try:
            yield
        finally:
            tasks = [looking, sweeping, *self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_for_ever(self) -> None:
        while True:
            try:
                await self._look()
            except BrokerError as error:
                log.debug("batches cannot be looked at now: %s", error)
            except Exception:  # the edge of a task that must go on
                log.exception("looking for batches failed")
            await wait_first(self._look_now, timeout_s=_LOOK_EVERY_S * random.uniform(0.8, 1.2))
            self._look_now.clear()

    async def _look(self) -> None:
        async for change in self._records.changes(after=self._seen_revision):
            self._note(change)
            self._seen_revision = change.revision
        for key in self._next():
            revision = await self._acquire(key, self._open[key].lease_revision)
            if revision is not None:
                task = asyncio.create_task(self._keep(key, self._open[key], revision), name=f"batch {key[1]}")
                self._running[key] = task

    def _next(self) -> list[_Key]:
        """What to run beside what runs already: of the tenants that have the fewest running here, the oldest first."""
        now = time.monotonic()
        free = [
            key
            for key, each in self._open.items()
            if key not in self._running and each.is_free(now) and self._may_run(key, each)
        ]
        running = Counter(tenant for tenant, _ in self._running)
        chosen: list[_Key] = []
        while free:
            key = min(free, key=lambda each: running[each[0]])
            if running[key[0]] and running.total() >= _MAX_RUNNING:
                break
            free.remove(key)
            running[key[0]] += 1
            chosen.append(key)
        return chosen

    def _may_run(self, key: _Key, each: _Open) -> bool:
        """Whether its tenant is served, or it sends nothing any more."""
        return self._is_served(key[0]) or self._bus.clock.now() >= each.sends_until

    def _note(self, change: BatchChange) -> None:
        key = (Tenant(change.tenant), change.batch)
        if change.is_lease:
            each = self._open.get(key) or _Open()
            each.is_leased, each.lease_revision = change.lease is not None, change.revision
            each.lease_seen_at = time.monotonic()
            if each.is_known or each.is_leased:
                self._open[key] = each
            else:
                self._open.pop(key, None)
            return
        if change.record is None or change.record.is_over:
            each = self._open.pop(key, _Open())
        else:
            each = self._open.setdefault(key, _Open())
            each.is_known = True
            is_sending = change.record.status in ("validating", "in_progress")
            each.sends_until = change.record.expires_at if is_sending else 0.0
        each.told.set()

    async def _acquire(self, key: _Key, expected: int) -> int | None:
        """Take or renew a lease whose revision was that; its new revision, None if it is another's."""
        revision = await self._records.take_lease(*key, self._owner, expected=expected, ttl_s=_LEASE_TTL_S)
        if revision is not None:
            return revision
        lease, revision = await self._records.lease(*key)
        if lease is not None:
            return revision if lease.owner == self._owner else None  # the answer to an earlier try was lost
        return await self._records.take_lease(*key, self._owner, expected=revision, ttl_s=_LEASE_TTL_S)

    async def _keep(self, key: _Key, each: _Open, revision: int) -> None:
        """Run a batch for as long as its lease is ours."""
        working = asyncio.create_task(self._work(key, each), name=f"work on {key[1]}")
        ended = asyncio.Event()
        working.add_done_callback(lambda _: ended.set())
        try:
            while not await wait_first(ended, timeout_s=_RENEW_EVERY_S):
                if not self._may_run(key, each):
                    log.info("batch %s waits: its tenant %s was removed", key[1], key[0])
                    return
                try:
                    renewed = await self._acquire(key, revision)
                except BrokerError as error:  # nobody else can take it now either
                    log.debug("the lease of batch %s cannot be renewed now: %s", key[1], error)
                    continue
                if renewed is None:
                    log.info("batch %s is run by another process now", key[1])
                    return
                revision = renewed
        finally:
            working.cancel()
            await asyncio.wait((working,))
            await self._records.drop_lease(*key, expected=revision)
            self._running.pop(key, None)

    async def _work(self, key: _Key, each: _Open) -> None:
        retries = Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S)
        while True:
            try:
                await BatchWork(self._bus, *key, told=each.told).run()
                return
            except TakenOver as error:
                log.info("%s", error)
                return
            except BrokerError as error:
                log.warning("batch %s cannot go on now: %s", key[1], error)
            except Exception:  # the edge of a batch: it must not be lost, nor spin
                log.exception("batch %s failed; it is begun again", key[1])
            await retries.pause()
