"""Free memory that several workers of one machine promise to requests, each byte of it once."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from headrace.errors import EngineError, EngineStartError
from headrace.worker.sharedtable import JOIN_WITHIN_S, Part, SharedTable, Table

__all__ = ["SharedMemory", "Sight"]

_LOCK_WITHIN_S: Final = 0.02
_GONE_FOR_S: Final = 5.0
"""How long what a dead worker promised stays promised: its engine may not have noticed yet."""
_NEW_FOR_S: Final = 1.0
"""How long a new table promises nothing: who was in the one before looks twice a second, and is in it by then."""


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """What others have of the memory at one `version` of the table.

    `allocated_bytes` is what their requests have, and give back when they end.
    """

    version: int
    outstanding_bytes: int
    allocated_bytes: int
    num_others: int


class SharedMemory:
    """One worker's part of the memory of one device, in a table that all workers there keep in `folder`.

    At any moment, whatever the interleaving: what the requests of all workers may still allocate is at most what is
    free, as long as nobody but them takes memory. Why:

    - A request starts only after `claim`, which takes its need off what nobody was promised, under a lock.
    - What is unpromised rises only in `publish`, from a reading of free memory made after `look`, and only if no claim
      and no other publish that changed a part came between. At that reading each request that still runs had at least
      what its worker said, and each that ended cannot allocate any more. So what is outstanding is at most what the
      table says, whatever ended unseen.
    - Ends raise nothing by themselves. Their worker counts them as reserved until it published again.
    - A table that is not whole, as files were removed or torn, promises nothing until all who take part have published.

    The lock is held for a read and a write of a small file, never while a driver is asked; who cannot have it at once
    promises nothing. A worker that dies lets go of its own lock, by which others see it; what it promised is free
    `_GONE_FOR_S` later. With `is_kept` the engine keeps what requests allocated, for others, who have it by the time
    that memory is read again: then a worker's part is the most it ever had. Not for threads: one loop uses it.
    """

    def __init__(
        self, folder: Path, *, name: str, is_kept: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._is_kept = is_kept
        self._clock = clock
        self._table = SharedTable(folder, name=name, clock=clock)

    def open(self) -> None:
        """Take part, with nothing promised yet. Raises EngineStartError where the folder cannot be used."""
        try:
            self._table.open()
            with self._table.locked(within_s=JOIN_WITHIN_S):
                table = self._table.read()
                table.parts[self._table.member] = Part()
                self._table.write(table)
                self._table.enter()
        except (OSError, EngineError) as error:
            self.close()
            raise EngineStartError(f"memory cannot be shared by {self._table.folder}: {error}") from None

    def close(self) -> None:
        """Leave, with all that was promised. Safe to call twice, and before `open`."""
        self._table.leave()

    def look(self) -> Sight:
        """What others have now. Raises EngineError where the table cannot be read."""
        with self._table.locked(within_s=_LOCK_WITHIN_S):
            table = self._table.read()
        others = [part for member, part in table.parts.items() if member != self._table.member]
        return Sight(
            version=table.version,
            outstanding_bytes=sum(part.outstanding_bytes for part in others),
            allocated_bytes=sum(part.allocated_bytes for part in others if not part.share_bytes),
            num_others=len(others),
        )

    def publish(self, seen: Sight, *, free_bytes: int, promised_bytes: int, allocated_bytes: int) -> bool:
        """Tell our part, and what was free after `seen`; False, with nothing told, where others told theirs since.

        `allocated_bytes` is what those of our requests that are in `promised_bytes` surely had when memory was read.
        Raises EngineError where the table cannot be written.
        """
        with self._table.locked(within_s=_LOCK_WITHIN_S):
            table = self._table.read()
            if table.version != seen.version:
                return False
            known = table.parts.get(self._table.member, Part())
            part = Part(promised_bytes=promised_bytes, allocated_bytes=min(allocated_bytes, promised_bytes))
            if self._is_kept:
                part.promised_bytes = max(part.promised_bytes, known.promised_bytes)
                part.allocated_bytes = max(part.allocated_bytes, known.allocated_bytes)
            table.parts[self._table.member] = part
            has_changed = self._forget_the_dead(table) or part != known
            table.version += has_changed
            outstanding_bytes = sum(each.outstanding_bytes for each in table.parts.values())
            table.unpromised_bytes = free_bytes - outstanding_bytes if self._is_whole(table) else None
            self._table.write(table)
        return True

    def claim(self, need_bytes: int, *, reserved_bytes: int, reserve_bytes: int) -> bool:
        """Promise a request what it needs, if so much is unpromised beside the reserve; whether it was.

        `reserved_bytes` are those of our requests with this one. Raises EngineError where the table cannot be used.
        """
        with self._table.locked(within_s=_LOCK_WITHIN_S):
            table = self._table.read()
            part = table.parts.get(self._table.member)
            if table.unpromised_bytes is None or part is None:
                return False
            grown_bytes = max(0, reserved_bytes - part.promised_bytes) if self._is_kept else need_bytes
            if grown_bytes and table.unpromised_bytes - grown_bytes < reserve_bytes:
                return False
            part.promised_bytes += grown_bytes
            table.unpromised_bytes -= grown_bytes
            table.version += 1
            self._table.write(table)
        return True

    def _forget_the_dead(self, table: Table) -> bool:
        """Drop the parts of workers that died long enough ago; whether any part changed."""
        has_changed = False
        for member, part in list(table.parts.items()):
            if member == self._table.member or self._table.is_alive(member):
                continue
            if part.gone_at is None:
                part.gone_at, has_changed = self._clock(), True
            elif self._is_past(part.gone_at, _GONE_FOR_S):
                del table.parts[member]
                self._table.remove(member)
                has_changed = True
        return has_changed

    def _is_whole(self, table: Table) -> bool:
        """Whether all that was promised is in it."""
        if table.made_at is not None and not self._is_past(table.made_at, _NEW_FOR_S):
            return False
        table.made_at = None
        return not any(part.is_unknown for part in table.parts.values())

    def _is_past(self, at: float, seconds: float) -> bool:
        """Also where it is on another clock: the machine has started anew since."""
        return not 0 <= self._clock() - at < seconds
