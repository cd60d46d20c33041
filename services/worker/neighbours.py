"""The other workers that may run a pool's requests, by their heartbeats, read when somebody asks."""

import asyncio
import logging
import math
import time
from collections.abc import Iterable
from typing import Final

from headrace.bus.connection import Bus
from headrace.bus.heartbeats import WorkersBucket
from headrace.discipline.placement import WorkerView, view_of
from headrace.errors import BrokerError

__all__ = ["Neighbours"]

log = logging.getLogger(__name__)

_FRESH_FOR_S: Final = 0.1


class Neighbours:
    """Lists heartbeats on demand, at most ten times a second: a worker needs them only for what does not start here."""

    def __init__(self, bus: Bus, *, worker: str, model: str) -> None:
        self._bucket = WorkersBucket(bus)
        self._worker = worker
        self._model = model
        self._read_at = -math.inf
        self._reading = asyncio.Lock()
        self._views: dict[str, list[WorkerView]] = {}

    async def of_pools(self, pools: Iterable[str], *, max_age_s: float = _FRESH_FOR_S) -> list[WorkerView] | None:
        """The other live workers of the model in those pools; None where they cannot be read now."""
        async with self._reading:
            if time.monotonic() - self._read_at >= max_age_s and not await self._read():
                return None
        return [view for pool in pools for view in self._views.get(pool, ())]

    async def _read(self) -> bool:
        try:
            seen = await self._bucket.list()
        except BrokerError as error:
            log.info("the other workers cannot be listed now: %s", error)
            return False
        self._views = {}
        for worker, each in seen.items():
            beat = each.beat
            if beat is not None and not beat.is_tombstone and beat.model == self._model and worker != self._worker:
                self._views.setdefault(beat.pool, []).append(view_of(beat, prefixes=beat.prefixes))
        self._read_at = time.monotonic()
        return True
