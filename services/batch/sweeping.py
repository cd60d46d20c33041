"""What processes that died left in the object store: parts of files, and whole ones that nobody was told of."""

import asyncio
import logging
import random
from typing import Final

from headrace.batch.files import object_name
from headrace.bus.batches import BatchRecords
from headrace.bus.connection import Bus
from headrace.bus.objects import WRITER_RESTS_S, Objects
from headrace.errors import BrokerError
from headrace.schemas.subjects import is_job_id, is_name

__all__ = ["LEFT_ALONE_S", "sweep", "sweep_for_ever"]

log = logging.getLogger(__name__)

LEFT_ALONE_S: Final = 2 * WRITER_RESTS_S
"""What nobody wrote to for so long has no writer any more: one that comes late gives up in half that time."""

_EVERY_S: Final = 3600.0


async def sweep_for_ever(bus: Bus) -> None:
    """Sweep about once an hour, until cancelled. That several processes do so does no harm."""
    while True:
        await asyncio.sleep(_EVERY_S * random.uniform(0.5, 1.5))
        try:
            await sweep(bus, now=bus.clock.now())
        except BrokerError as error:
            log.info("files that were left behind cannot be looked for now: %s", error)
        except Exception:  # the edge of a task that must go on
            log.exception("looking for files that were left behind failed")


async def sweep(bus: Bus, *, now: float) -> int:
    """Remove what was left alone, seen from `now` by the broker's clock; how many objects. Raises BrokerError.

    Chunks are listed before the objects they may belong to: one that is committed meanwhile is found there.
    """
    objects, records = Objects(bus, bus.names.files_store), BatchRecords(bus)
    nuids = await objects.nuids()
    left, num_removed = [], 0
    async for each in objects.each():
        nuids.discard(each.info.nuid)
        if now - each.stored_at > LEFT_ALONE_S:
            left.append(each.info.name)
    for name in left:
        tenant, _, file = name.partition("/")
        is_ours = is_name(tenant) and is_job_id(file) and name == object_name(tenant, file)
        if is_ours and await records.file(tenant, file) is None:
            await objects.remove(name)
            num_removed += 1
    for nuid in nuids:
        stored_at = await objects.last_chunk_at(nuid)
        if stored_at is not None and now - stored_at > LEFT_ALONE_S:
            await objects.purge(objects.chunk_subject(nuid))
            num_removed += 1
    if num_removed:
        log.info("%d files that were left behind are removed", num_removed)
    return num_removed
