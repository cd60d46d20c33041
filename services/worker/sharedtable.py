"""The files by which workers of one machine share the memory of a device: a table, its lock, and who takes part."""

import contextlib
import fcntl
import logging
import os
import secrets
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from headrace.errors import EngineError

__all__ = ["JOIN_WITHIN_S", "Part", "SharedTable", "Table", "name_of"]

log = logging.getLogger(__name__)

JOIN_WITHIN_S: Final = 1.0
"""How long who joins or leaves waits for the lock."""
_LOCK_PAUSE_S: Final = 0.0005
_MAX_REMOVED: Final = 3
_MAX_TABLE_BYTES: Final = 1 << 20
_REMOVE_IT: Final = "stop the workers that share it and remove it"
_ALIVE: Final = ".alive"


class Part(msgspec.Struct):
    """One worker's: bytes promised to its requests, and those of them that its engine surely has allocated.

    Of one whose engine takes its memory at its start, both are about that, and `share_bytes` says how much it is.
    `gone_at` is when others saw it dead. `is_unknown`: it takes part, and what it told was lost with the table.
    """

    promised_bytes: int = 0
    allocated_bytes: int = 0
    share_bytes: int = 0
    gone_at: float | None = None
    is_unknown: bool = False

    @property
    def outstanding_bytes(self) -> int:
        """What its engine may still allocate for what it was promised."""
        return max(0, self.promised_bytes - self.allocated_bytes)


class Table(msgspec.Struct):
    """`unpromised_bytes`: what was free when somebody looked last, less all that was outstanding then or came since.

    None while that is not known. `version` begins anywhere, so that no table is taken for one that was lost; `made_at`
    is when that happened, until it no longer matters.
    """

    version: int = 0
    unpromised_bytes: int | None = None
    made_at: float | None = None
    parts: dict[str, Part] = {}


class SharedTable:
    """A hold on the table in `folder`, of the worker called `name`; as `member` it takes part once.

    Who takes part has a file of its own there, locked while it lives.

    The files may be removed at any time, and a crash of the machine may tear the table. Who takes part is in every
    table that is read, an unknown part if need be; and whoever has the lock has put back what is missing of its own.
    """

    def __init__(self, folder: Path, *, name: str, clock: Callable[[], float]) -> None:
        self.folder = folder
        self.member = f"{name}-{uuid.uuid4().hex[:8]}"
        self._clock = clock
        self._lock: int | None = None
        self._alive: int | None = None

    def open(self) -> None:
        """Be able to lock the table. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _opened(self.folder / "lock")

    def enter(self) -> None:
        """Take part, inside the lock, with a part in the table already: what has a file and no part is unknown."""
        self._alive = _opened_alone(self._file_of(self.member))

    def leave(self) -> None:
        """Take our part out, where that can be done, and let go of all. Safe to call twice, and before `open`."""
        if self._lock is None:
            return
        with contextlib.suppress(OSError, EngineError), self.locked(within_s=JOIN_WITHIN_S):
            table = self.read()
            table.parts.pop(self.member, None)
            table.version += 1
            self.write(table)
            self.remove(self.member)
        for descriptor in (self._alive, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._lock = self._alive = None

    @contextlib.contextmanager
    def locked(self, *, within_s: float) -> Iterator[None]:
        """Nobody else reads or writes inside. Raises EngineError without the lock, or where a file cannot be used."""
        if self._lock is None:
            raise EngineError(f"no part in {self.folder} was taken")
        try:
            try:
                self._take_lock(within_s=within_s)
                self._put_back()
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)
        except OSError as error:
            raise EngineError(f"{self.folder} cannot be used: {error.strerror}") from None

    def read(self) -> Table:
        """The table, or a new one where there is none; inside the lock. Raises EngineError for what is no table."""
        table = self._decoded()
        is_new = table is None
        if table is None:
            table = Table(version=secrets.randbits(48), made_at=self._clock())
        members = (path.name.removesuffix(_ALIVE) for path in self.folder.glob(f"*{_ALIVE}"))
        lost = {member: Part(is_unknown=True) for member in members if member not in table.parts}
        if is_new or lost:
            table.parts |= lost
            table.unpromised_bytes = None
            self.write(table)
        return table

    def write(self, table: Table) -> None:
        """As a whole or not at all, whenever we are killed; inside the lock."""
        new = self.folder / "table.new"
        new.write_bytes(msgspec.json.encode(table))
        new.replace(self.folder / "table.json")

    def is_alive(self, member: str) -> bool:
        """Whether the process that took part under this name is there."""
        try:
            descriptor = os.open(self._file_of(member), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def remove(self, member: str) -> None:
        """It takes part no longer."""
        self._file_of(member).unlink(missing_ok=True)

    def _take_lock(self, *, within_s: float) -> None:
        """Have the lock that is in the folder now."""
        assert self._lock is not None
        until = time.monotonic() + within_s
        num_removed = 0
        while not (_has_locked(self._lock) and _is_at(self._lock, self.folder / "lock")):
            if _is_at(self._lock, self.folder / "lock"):
                if time.monotonic() >= until:
                    raise EngineError(f"another worker keeps {self.folder} locked")
                time.sleep(_LOCK_PAUSE_S)
                continue
            num_removed += 1
            if num_removed > _MAX_REMOVED:
                raise EngineError(f"the lock in {self.folder} is removed again and again")
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            removed, self._lock = self._lock, _opened(self.folder / "lock")
            os.close(removed)

    def _put_back(self) -> None:
        """Have our own file in the folder."""
        if self._alive is not None and not _is_at(self._alive, self._file_of(self.member)):
            log.warning("files in %s were removed under running workers; they are put back", self.folder)
            removed, self._alive = self._alive, _opened_alone(self._file_of(self.member))
            os.close(removed)

    def _decoded(self) -> Table | None:
        """None where the file is not there, or torn: as we have the lock, nobody is writing it any more."""
        path = self.folder / "table.json"
        try:
            known = path.stat()
            if not stat.S_ISREG(known.st_mode) or known.st_size > _MAX_TABLE_BYTES:
                raise EngineError(f"{path} cannot be read: it is no file of ours; {_REMOVE_IT}")
            table = msgspec.json.decode(path.read_bytes(), type=Table)
        except FileNotFoundError:
            return None
        except (msgspec.ValidationError, RecursionError) as error:
            raise EngineError(f"{path} cannot be read: {error}; {_REMOVE_IT}") from None
        except msgspec.DecodeError as error:
            log.warning("%s is torn and made anew (%s); nothing starts until all workers are in it again", path, error)
            return None
        if any(not member or "/" in member or "\0" in member for member in table.parts):
            raise EngineError(f"{path} cannot be read: it names no workers of ours; {_REMOVE_IT}")
        return table

    def _file_of(self, member: str) -> Path:
        return self.folder / f"{member}{_ALIVE}"


def name_of(member: str) -> str:
    """The worker's own name."""
    return member.rpartition("-")[0]


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _opened_alone(path: Path) -> int:
    """Opened, with a lock that the kernel takes from us when we die."""
    descriptor = _opened(path)
    if not _has_locked(descriptor):
        os.close(descriptor)
        raise EngineError(f"another worker has {path}")
    return descriptor


def _has_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
