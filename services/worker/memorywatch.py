"""Looks at what an engine's processes have of memory, and says when it only grows."""

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Final

from headrace.discipline.growth import MemorySample, growth_of
from headrace.errors import EngineError
from headrace.worker.engines.base import Engine
from headrace.worker.held import HeldSet
from headrace.worker.wellbeing import Wellbeing

__all__ = ["MemoryWatch"]

log = logging.getLogger(__name__)

_EVERY_S: Final = 5.0
_TIMEOUT_S: Final = 5.0
_MAX_SAMPLES: Final = 720
"""An hour's, for what grows slowly."""


class MemoryWatch:
    """Keeps the last samples of each kind of memory of the present engine run."""

    def __init__(
        self,
        engine: Engine,
        *,
        held: HeldSet,
        wellbeing: Wellbeing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._held = held
        self._wellbeing = wellbeing
        self._clock = clock
        self._engine_run = 0
        self._samples: dict[str, deque[MemorySample]] = {}

    async def follow(self, every_s: float, *, is_up: Callable[[], bool], grows: Callable[[str], None]) -> None:
        """Look every `every_s`, or 5 s if that is less, until cancelled; `grows` is told how much, at each look that
        shows it.
        """
        while True:
            await asyncio.sleep(min(every_s, _EVERY_S))
            if is_up() and (growth := await self.look()) and is_up():
                grows(growth)

    async def look(self) -> str:
        """Take one sample of each kind; what the last of them show, for people, empty where that is nothing."""
        engine_run, num_served, is_idle = self._wellbeing.engine_run, self._wellbeing.num_served, not len(self._held)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                uses = await self._engine.memory_use()
        except (EngineError, TimeoutError) as error:
            log.debug("what the engine has of memory cannot be read: %s", error)
            return ""
        if engine_run != self._wellbeing.engine_run:
            return ""
        if engine_run != self._engine_run or not self._samples:
            self._engine_run = engine_run
            self._samples = defaultdict(lambda: deque(maxlen=_MAX_SAMPLES))
        for use in uses:
            self._samples[use.kind].append(
                MemorySample(
                    at_s=self._clock(),
                    used_bytes=use.used_bytes,
                    num_served=num_served,
                    is_idle=is_idle and not len(self._held),
                    free_ratio=use.free_ratio,
                )
            )
        grown = ((kind, growth_of(list(samples))) for kind, samples in self._samples.items())
        return "; ".join(f"{kind} grows: {growth}" for kind, growth in grown if growth)
