"""Free memory that several workers of one machine promise to requests, each byte of it once."""

import contextlib
import fcntl
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from headrace.errors import EngineError, EngineStartError

__all__ = ["SharedMemory", "Sight"]

_LOCK_WITHIN_S: Final = 0.02
_JOIN_WITHIN_S: Final = 1.0
_LOCK_PAUSE_S: Final = 0.0005
_MAX_TABLE_BYTES: Final = 1 << 20
_REMOVE_IT: Final = "stop the workers that share it and remove it"
_GONE_FOR_S: Final = 5.0
"""How long what a dead worker promised stays promised: its engine may not have noticed yet."""


class _Part(msgspec.Struct):
    """One worker's: bytes promised to its requests, and those of them that its engine surely has allocated."""

    promised_bytes: int = 0
    allocated_bytes: int = 0
    gone_at: float | None = None

    @property
    def outstanding_bytes(self) -> int:
        return max(0, self.promised_bytes - self.allocated_bytes)


class _Table(msgspec.Struct):
    """`unpromised_bytes`: what was free when somebody looked last, less all that was outstanding then or came since."""

    version: int = 0
    unpromised_bytes: int | None = None
    parts: dict[str, _Part] = {}


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """What others have of the memory at one `version` of the table."""

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

    The lock is held for a read and a write of a small file, never while a driver is asked; who cannot have it at once
    promises nothing. A worker that dies lets go of its own lock, by which others see it; what it promised is free
    `_GONE_FOR_S` later. With `is_kept` the engine keeps what requests allocated, for others, who have it by the time
    that memory is read again: then a worker's part is the most it ever had. Not for threads: one loop uses it.
    """

    def __init__(
        self, folder: Path, *, name: str, is_kept: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._member = f"{name}-{uuid.uuid4().hex[:8]}"
        self._is_kept = is_kept
        self._clock = clock
        self._lock: int | None = None
        self._alive: int | None = None

    def open(self) -> None:
        """Take part, with nothing promised yet. Raises EngineStartError where the folder cannot be used."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _opened(self._folder / "lock")
            with self._locked(within_s=_JOIN_WITHIN_S):
                self._alive = _opened(self._own_file(self._member))
                fcntl.flock(self._alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
                table = self._read()
                table.parts[self._member] = _Part()
                self._write(table)
        except (OSError, EngineError) as error:
            self.close()
            raise EngineStartError(f"memory cannot be shared by {self._folder}: {error}") from None

    def close(self) -> None:
        """Leave, with all that was promised. Safe to call twice, and before `open`."""
        if self._lock is None:
            return
        with contextlib.suppress(OSError, EngineError), self._locked(within_s=_JOIN_WITHIN_S):
            table = self._read()
            table.parts.pop(self._member, None)
            table.version += 1
            self._write(table)
            self._own_file(self._member).unlink(missing_ok=True)
        for descriptor in (self._alive, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._lock = self._alive = None

    def look(self) -> Sight:
        """What others have now. Raises EngineError where the table cannot be read."""
        with self._locked():
            table = self._read()
        others = [part for member, part in table.parts.items() if member != self._member]
        return Sight(
            version=table.version,
            outstanding_bytes=sum(part.outstanding_bytes for part in others),
            allocated_bytes=sum(part.allocated_bytes for part in others),
            num_others=len(others),
        )

    def publish(self, seen: Sight, *, free_bytes: int, promised_bytes: int, allocated_bytes: int) -> bool:
        """Tell our part, and what was free after `seen`; False, with nothing told, where others told theirs since.

        `allocated_bytes` is what those of our requests that are in `promised_bytes` surely had when memory was read.
        Raises EngineError where the table cannot be written.
        """
        with self._locked():
            table = self._read()
            if table.version != seen.version:
                return False
            known = table.parts.get(self._member, _Part())
            part = _Part(promised_bytes=promised_bytes, allocated_bytes=min(allocated_bytes, promised_bytes))
            if self._is_kept:
                part.promised_bytes = max(part.promised_bytes, known.promised_bytes)
                part.allocated_bytes = max(part.allocated_bytes, known.allocated_bytes)
            table.parts[self._member] = part
            has_changed = self._forget_the_dead(table) or part != known
            table.version += has_changed
            outstanding_bytes = sum(each.outstanding_bytes for each in table.parts.values())
            table.unpromised_bytes = free_bytes - outstanding_bytes
            self._write(table)
        return True

    def claim(self, need_bytes: int, *, reserved_bytes: int, reserve_bytes: int) -> bool:
        """Promise a request what it needs, if so much is unpromised beside the reserve; whether it was.

        `reserved_bytes` are those of our requests with this one. Raises EngineError where the table cannot be used.
        """
        with self._locked():
            table = self._read()
            part = table.parts.get(self._member)
            if table.unpromised_bytes is None or part is None:
                return False
            grown_bytes = max(0, reserved_bytes - part.promised_bytes) if self._is_kept else need_bytes
            if grown_bytes and table.unpromised_bytes - grown_bytes < reserve_bytes:
                return False
            part.promised_bytes += grown_bytes
            table.unpromised_bytes -= grown_bytes
            table.version += 1
            self._write(table)
        return True

    def _forget_the_dead(self, table: _Table) -> bool:
        """Drop the parts of workers that died long enough ago; whether any part changed."""
        has_changed = False
        for member, part in list(table.parts.items()):
            if member == self._member or self._lives(member):
                continue
            now = self._clock()
            if part.gone_at is None:
                part.gone_at, has_changed = now, True
            elif not 0 <= now - part.gone_at < _GONE_FOR_S:  # before it: the machine has started anew since
                del table.parts[member]
                self._own_file(member).unlink(missing_ok=True)
                has_changed = True
        return has_changed

    def _lives(self, member: str) -> bool:
        try:
            descriptor = os.open(self._own_file(member), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    @contextlib.contextmanager
    def _locked(self, *, within_s: float = _LOCK_WITHIN_S) -> Iterator[None]:
        if self._lock is None:
            raise EngineError(f"no part in {self._folder} was taken")
        until = time.monotonic() + within_s
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise EngineError(f"another worker keeps {self._folder} locked") from None
                time.sleep(_LOCK_PAUSE_S)
        try:
            yield
        except OSError as error:
            raise EngineError(f"{self._folder} cannot be used: {error.strerror}") from None
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _read(self) -> _Table:
        path = self._folder / "table.json"
        try:
            known = path.stat()
            if not stat.S_ISREG(known.st_mode) or known.st_size > _MAX_TABLE_BYTES:
                raise EngineError(f"{path} cannot be read: it is no file of ours; {_REMOVE_IT}")
            table = msgspec.json.decode(path.read_bytes(), type=_Table)
        except FileNotFoundError:
            return _Table()
        except (msgspec.DecodeError, RecursionError) as error:
            raise EngineError(f"{path} cannot be read: {error}; {_REMOVE_IT}") from None
        if any(not member or "/" in member or "\0" in member for member in table.parts):
            raise EngineError(f"{path} cannot be read: it names no workers of ours; {_REMOVE_IT}")
        return table

    def _write(self, table: _Table) -> None:
        """As a whole or not at all, whenever we are killed."""
        new = self._folder / "table.new"
        new.write_bytes(msgspec.json.encode(table))
        new.replace(self._folder / "table.json")

    def _own_file(self, member: str) -> Path:
        return self._folder / f"{member}.alive"


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
