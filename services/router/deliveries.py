"""Clients on inboxes of their own: the broker sends them their job's events, and a router cleans up after the end."""

import asyncio
import logging
import time
from typing import Final

from headrace.bus.connection import Bus, Message
from headrace.bus.joblog import JobDelivery, JobLog, event_of_delivery
from headrace.errors import BrokerError
from headrace.schemas.subjects import is_job_id, is_name

__all__ = ["Deliveries"]

log = logging.getLogger(__name__)

_LINGER_S: Final = 2.0
"""How long after a job's end its deliveries stay, so that a slow one is complete; the broker ends idle ones anyway."""
_MAX_KEPT: Final = 100_000
_TICK_S: Final = 0.5
_SECURED_FOR_S: Final = 2.0


class Deliveries:
    """One ephemeral consumer per waiting inbox; nothing passes through the router where the broker can deliver.

    It remembers what it made only to remove it early. A router that dies leaves consumers that end when their clients
    go; with more than `_MAX_KEPT` at once the oldest are left to that too.
    """

    def __init__(self, bus: Bus, job_log: JobLog) -> None:
        self._bus = bus
        self._log = job_log
        self._kept: dict[tuple[str, str], list[str]] = {}
        self._ended: list[tuple[float, tuple[str, str]]] = []

    async def secure(self, tenant: str, job: str, inbox: str) -> str:
        """Have the broker begin by itself, a little later, unless `add` comes first; returns what to give it.

        Made before `accepted` is answered: a router that dies right after that leaves nobody waiting for nothing.
        """
        return (await self._log.deliver(tenant, job, inbox, after_s=_SECURED_FOR_S)).name

    async def add(self, tenant: str, job: str, inbox: str, *, instead_of: str) -> None:
        """Send the job's events, from the first, to an inbox.

        An inbox that is subscribed to only through a wildcard gets nothing from the broker's own delivery, so its
        events are forwarded, by this router and for as long as it lives.
        """
        delivery = await self._log.deliver(tenant, job, inbox)
        # In this order: a router that dies in between leaves a client that is told twice, not one that waits in vain.
        await self._log.stop_delivery(job, instead_of)
        if not delivery.is_bound:
            await self._log.stop_delivery(job, delivery.name)
            delivery = await self._forwarded(tenant, job, inbox)
        key = (tenant, job)
        self._kept.setdefault(key, []).append(delivery.name)
        if len(self._kept) > _MAX_KEPT:
            self._kept.pop(next(iter(self._kept)))
        last = await self._log.last(tenant, job)
        if last is not None and last.is_terminal:  # its end may have been announced before we listened for it
            self._note_end(key)

    async def _forwarded(self, tenant: str, job: str, inbox: str) -> JobDelivery:
        own = self._bus.new_inbox()

        async def forward(message: Message) -> None:
            await self._bus.publish(inbox, message.data, headers=message.headers)
            event = event_of_delivery(message)
            if event is not None and event.is_terminal:
                await subscription.unsubscribe()

        subscription = await self._bus.subscribe(own, cb=forward)
        return await self._log.deliver(tenant, job, own)

    async def run(self) -> None:
        """Remove deliveries of jobs that ended, until cancelled."""
        subscription = await self._bus.subscribe(self._bus.names.ended("*", "*"), cb=self._on_ended)
        try:
            while True:
                await asyncio.sleep(_TICK_S)
                await self._remove_due(time.monotonic())
        finally:
            if not self._bus.nc.is_closed:
                await subscription.unsubscribe()

    async def _on_ended(self, message: Message) -> None:
        tenant, job = message.subject.split(".")[-2:]
        if is_name(tenant) and is_job_id(job):
            self._note_end((tenant, job))

    def _note_end(self, key: tuple[str, str]) -> None:
        if key in self._kept:
            self._ended.append((time.monotonic() + _LINGER_S, key))

    async def _remove_due(self, now: float) -> None:
        due = [key for at, key in self._ended if at <= now]
        self._ended = [entry for entry in self._ended if entry[0] > now]
        for key in due:
            last = await self._log.last(*key)
            if last is not None and not last.is_terminal:  # anybody can publish that notice
                continue
            for name in self._kept.pop(key, []):
                try:
                    await self._log.stop_delivery(key[1], name)
                except BrokerError as error:
                    log.info("delivery %s is left to the broker: %s", name, error)
