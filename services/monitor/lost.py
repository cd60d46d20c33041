"""The workers a monitor saw go, kept for a while to be shown."""

import time
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from headrace.monitor.changes import Change
from headrace.schemas.overview import Ending, GoneWorker

__all__ = ["LostWorkers"]

_KEEP_S: Final = 600.0
_MAX_KEPT: Final = 256
"""Beyond that the oldest is forgotten first."""


class LostWorkers:
    """Who went in the last ten minutes, with the model it served, which the bucket no longer tells."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._gone: dict[str, tuple[float, GoneWorker]] = {}

    def take(self, change: Change) -> None:
        """Remember who went; forget who is back."""
        self._gone.pop(change.worker, None)
        if change.before is not None and change.now is None:
            ending: Ending = "left" if change.kind == "left" else "expired"
            gone = GoneWorker(id=change.worker, ending=ending, age_s=0.0, model=change.before.model)
            self._gone[change.worker] = (self._clock(), gone)
            if len(self._gone) > _MAX_KEPT:
                del self._gone[next(iter(self._gone))]

    def merged_with(self, others: Iterable[GoneWorker]) -> tuple[GoneWorker, ...]:
        """What is remembered and what the bucket still shows, last gone first."""
        now = self._clock()
        self._gone = {worker: entry for worker, entry in self._gone.items() if now - entry[0] <= _KEEP_S}
        merged = {
            worker: msgspec.structs.replace(gone, age_s=round(now - since, 3))
            for worker, (since, gone) in self._gone.items()
        }
        for other in others:
            known = merged.get(other.id)
            merged[other.id] = msgspec.structs.replace(other, model=other.model or (known.model if known else ""))
        return tuple(sorted(merged.values(), key=lambda each: each.age_s))
