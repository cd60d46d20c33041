"""Deliveries to clients' own inboxes that outlived their job and the router that made them."""

import asyncio
import logging
from typing import Final

import msgspec

from headrace.bus.clock import parse_time
from headrace.bus.connection import ApiRefused, Bus
from headrace.bus.joblog import DELIVERY_PREFIX, JobLog
from headrace.errors import BrokerError

__all__ = ["remove_orphans_for_ever"]

log = logging.getLogger(__name__)

_EVERY_S: Final = 60.0
_OLD_ENOUGH_S: Final = 60.0
_MAX_PAGES: Final = 1_000


class _Config(msgspec.Struct, frozen=True):
    filter_subject: str = ""


class _Consumer(msgspec.Struct, frozen=True):
    name: str
    created: str = ""
    num_pending: int = 0
    config: _Config = _Config()


class _Page(msgspec.Struct, frozen=True):
    total: int = 0
    consumers: list[_Consumer] | None = None


async def remove_orphans_for_ever(bus: Bus) -> None:
    """Look once a minute, until cancelled.

    The router that makes a delivery removes it after the job's end; one that died left it, and the broker keeps it for
    as long as its client listens on that inbox, which may be for days.
    """
    job_log = JobLog(bus)
    while True:
        await asyncio.sleep(_EVERY_S)
        try:
            for shard in range(bus.names.num_shards):
                await _remove_orphans(bus, job_log, bus.names.log_stream(shard))
        except BrokerError as error:
            log.info("cannot look for orphaned deliveries now: %s", error)


async def _remove_orphans(bus: Bus, job_log: JobLog, stream: str) -> None:
    offset = 0
    for _ in range(_MAX_PAGES):
        try:
            page = msgspec.json.decode(await bus.api(f"CONSUMER.LIST.{stream}", {"offset": offset}), type=_Page)
        except ApiRefused as refused:
            log.info("cannot list the consumers of %s: %s", stream, refused)
            return
        consumers = page.consumers or []
        for consumer in consumers:
            if consumer.name.startswith(DELIVERY_PREFIX) and not consumer.num_pending:
                await _remove_if_ended(bus, job_log, consumer)
        offset += len(consumers)
        if not consumers or offset >= page.total:
            return


async def _remove_if_ended(bus: Bus, job_log: JobLog, consumer: _Consumer) -> None:
    created = parse_time(consumer.created)
    found = bus.names.parse_log(consumer.config.filter_subject)
    if found is None or created is None or bus.clock.now() - created < _OLD_ENOUGH_S:
        return
    tenant, job = found
    last = await job_log.last(tenant, job)
    if last is None or last.is_terminal:
        await job_log.stop_delivery(job, consumer.name)
