"""The engine's own figures, which correct the ledger: nothing more starts while its memory is full, or it is silent."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from headrace.discipline.room import Room
from headrace.errors import EngineError
from headrace.worker.engines.base import Engine

__all__ = ["HIGH_WATER", "LOW_WATER", "SILENT_S", "Watermarks", "effective_concurrency"]

log = logging.getLogger(__name__)

HIGH_WATER: Final = 0.95
LOW_WATER: Final = 0.85
"""Shares of the engine's KV cache in use."""
_EVERY_S: Final = 0.5
_TIMEOUT_S: Final = 2.0
SILENT_S: Final = 3.0
"""For how long an engine with work may compute nothing before it gets no more; it may only be a very long step."""
_MAX_UNREADABLE: Final = 20
"""Readings missed in a row (10 s or more) after which the last one says nothing any more."""


class Watermarks:
    """Whether the engine is above its high-water mark, and was not below the low one since.

    The ledger promises memory to the last token, so a full engine means that it uses more than it was asked for. An
    engine that does not tell its usage is never above. `is_silent`: it has work and has computed nothing for
    `SILENT_S`.
    """

    def __init__(self) -> None:
        self.is_above = False
        self.is_silent = False
        self._num_preemptions: int | None = None

    @property
    def reason(self) -> str:
        """Why nothing more starts; empty if that is not so."""
        if self.is_silent:
            return f"the engine has work and has computed nothing for more than {SILENT_S:g} s"
        return "the engine's KV cache is full" if self.is_above else ""

    def note_silence(self, silent_s: float) -> bool:
        """Take in for how long the engine has computed nothing; whether the answer changed."""
        was_silent, self.is_silent = self.is_silent, silent_s >= SILENT_S
        return self.is_silent != was_silent

    def note(self, kv_usage_ratio: float | None) -> bool:
        """Take in what the engine says; whether the answer changed."""
        was_above = self.is_above
        if kv_usage_ratio is None or kv_usage_ratio <= LOW_WATER:
            self.is_above = False
        elif kv_usage_ratio >= HIGH_WATER:
            self.is_above = True
        return self.is_above != was_above

    def note_preemptions(self, number: int | None) -> int:
        """Take in how many the engine counted since its start; how many there are more than last time."""
        known, self._num_preemptions = self._num_preemptions, number
        return max(0, number - known) if number is not None and known is not None else 0

    async def follow(self, engine: Engine, *, is_up: Callable[[], bool], changed: Callable[[], None]) -> None:
        """Ask the engine twice a second, until cancelled.

        What cannot be read changes nothing at first, but a mark that nobody could ever leave again would stop the
        worker for good: after `_MAX_UNREADABLE` in a row the engine counts as one that does not tell.
        """
        num_unreadable = 0
        while True:
            await asyncio.sleep(_EVERY_S)
            if not is_up():
                continue
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    usage = await engine.usage()
            except (EngineError, TimeoutError) as error:
                log.debug("the engine's usage cannot be read: %s", error)
                num_unreadable += 1
                if num_unreadable == _MAX_UNREADABLE and self.note(None):
                    log.warning("the engine's usage cannot be read any more (%s); %s", error, _SAYING[False])
                    changed()
                continue
            num_unreadable = 0
            if num_more := self.note_preemptions(usage.num_preemptions):
                log.warning(
                    "the engine preempted %d requests: others ask it too, or it holds less than it says", num_more
                )
            if self.note_silence(usage.silent_s):
                log.warning("%s", self.reason if self.is_silent else "the engine computes again")
                changed()
            if self.note(usage.kv_usage_ratio):
                ratio = usage.kv_usage_ratio or 0.0
                log.warning("the engine's KV cache is %.0f %% full; %s", 100 * ratio, _SAYING[self.is_above])
                changed()


def effective_concurrency(room: Room, *, usual_need_tokens: float) -> int:
    """Requests of the usual size that memory lets run at once, of the `max_concurrency` that was asked for.

    At least 1, for the usual size may be more than there is. Above the high-water mark: what runs now.
    """
    if room.is_above_high_water:
        return min(room.num_running, room.max_concurrency)
    if room.capacity_tokens is None:
        return room.max_concurrency
    return max(1, min(room.max_concurrency, int(room.capacity_tokens // max(1.0, usual_need_tokens))))


_SAYING: Final = {True: "nothing more starts until it is below the low-water mark", False: "taking requests again"}
