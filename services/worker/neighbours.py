"""The other workers of one pool, by their heartbeats, read when somebody asks."""

import logging
import time
from typing import Final

from headrace.bus.connection import Bus
from headrace.bus.heartbeats import WorkersBucket
from headrace.discipline.placement import WorkerView, view_of
from headrace.errors import BrokerError

__all__ = ["Neighbours"]

log = logging.getLogger(__name__)

_FRESH_FOR_S: Final = 0.1


class Neighbours:
    """Lists heartbeats on demand, at most ten times a second: a worker needs them only for what does not fit here."""

    def __init__(self, bus: Bus, *, worker: str, model: str) -> None:
        self._bucket = WorkersBucket(bus)
        self._worker = worker
        self._model = model
        self._read_at = -_FRESH_FOR_S
        self._views: dict[str, list[WorkerView]] = {}

    async def of_pool(self, pool: str) -> list[WorkerView] | None:
        """The other live workers of the model in that pool; None where they cannot be read now."""
        if time.monotonic() - self._read_at >= _FRESH_FOR_S:
            try:
                seen = await self._bucket.list()
            except BrokerError as error:
                log.info("the other workers cannot be listed now: %s", error)
                return None
            self._views = {}
            for worker, each in seen.items():
                beat = each.beat
                if beat is not None and not beat.is_tombstone and beat.model == self._model and worker != self._worker:
                    self._views.setdefault(beat.pool, []).append(view_of(beat))
            self._read_at = time.monotonic()
        return self._views.get(pool, [])
