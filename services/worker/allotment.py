"""Memory of a device that an engine takes at its start and keeps: known to the others there before it has it."""

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from headrace.errors import EngineError, EngineStartError
from headrace.worker.memory import Memory
from headrace.worker.sharedtable import JOIN_WITHIN_S, Part, SharedTable, name_of

__all__ = ["Allotment", "gib"]

_LOCK_WITHIN_S: Final = 0.02


class Allotment:
    """One worker's share of a device, in the table of all workers there (`sharing.SharedMemory`).

    Until `settle`, workers that measure free memory count it as still to come; from then on free memory shows it.
    """

    def __init__(self, folder: Path, *, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._table = SharedTable(folder, name=name, clock=clock)
        self._part = Part()

    def take(self, share_bytes: int, memory: Memory, *, device: str, advice: str) -> None:
        """Have it, of memory as it was just read.

        Raises EngineStartError, which names the other workers and ends in `advice`, where it and the shares of others
        who live are more than there is, or where what is free was promised to requests of others.
        """
        self._part = Part(promised_bytes=share_bytes, share_bytes=share_bytes)
        try:
            self._table.open()
            with self._table.locked(within_s=JOIN_WITHIN_S):
                table = self._table.read()
                others = {member: part for member, part in table.parts.items() if self._table.is_alive(member)}
                if why := _why_not(share_bytes, memory, others):
                    raise EngineStartError(f"{device} is shared: {why}; {advice}")
                table.parts[self._table.member] = self._part
                if table.unpromised_bytes is not None:
                    table.unpromised_bytes -= share_bytes
                table.version += 1
                self._table.write(table)
                self._table.enter()
        except EngineStartError:
            self.release()
            raise
        except (OSError, EngineError) as error:
            self.release()
            raise EngineStartError(f"memory cannot be shared by {self._table.folder}: {error}") from None

    def settle(self) -> None:
        """The engine has allocated it."""
        self._part = msgspec.structs.replace(self._part, allocated_bytes=self._part.promised_bytes)
        self.keep()

    def keep(self) -> None:
        """Tell our part again where the table has another, such as none, since it was removed. To be called often."""
        with contextlib.suppress(EngineError), self._table.locked(within_s=_LOCK_WITHIN_S):
            table = self._table.read()
            if table.parts.get(self._table.member) != self._part:
                table.parts[self._table.member] = self._part
                table.version += 1
                self._table.write(table)

    def release(self) -> None:
        """Leave it to others. Safe to call twice, and before `take`."""
        self._table.leave()


def _why_not(share_bytes: int, memory: Memory, others: Mapping[str, Part]) -> str:
    shares = [(name_of(member), part.share_bytes) for member, part in others.items() if part.share_bytes]
    if shares and _sum(shares) + share_bytes > memory.total_bytes:
        return f"{_told(shares, 'has')} of its {gib(memory.total_bytes)}, and {gib(share_bytes)} more are wanted"
    promised = [
        (name_of(member), part.outstanding_bytes)
        for member, part in others.items()
        if part.outstanding_bytes and not part.share_bytes
    ]
    if promised and _sum(promised) + share_bytes > memory.free_bytes:
        return (
            f"{_told(promised, 'has promised its requests')} of the {gib(memory.free_bytes)} that are free, "
            f"and {gib(share_bytes)} are wanted"
        )
    return ""


def _sum(sizes: list[tuple[str, int]]) -> int:
    return sum(size for _, size in sizes)


def _told(sizes: list[tuple[str, int]], what: str) -> str:
    return " and ".join(f"worker {name} {what} {gib(size)}" for name, size in sizes)


def gib(num_bytes: int) -> str:
    """As people know the memory of a GPU."""
    return f"{num_bytes / (1 << 30):.1f} GiB"
