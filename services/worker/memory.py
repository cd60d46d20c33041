"""Memory that an engine computes in: the machine's, or what the engine itself says is left."""

import contextlib
import time
from pathlib import Path
from typing import Final, Protocol

import msgspec

from headrace.errors import EngineError
from headrace.worker.engines.base import Engine

__all__ = [
    "EngineProbe",
    "HostMemory",
    "HostProbe",
    "Memory",
    "MemoryProbe",
    "read_host_memory",
    "shared_by",
    "shared_folder",
]

_MEMINFO: Final = Path("/proc/meminfo")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_KIB: Final = 1024
_FRESH_FOR_S: Final = 0.4


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes in all, bytes that could be had now, and whose they are; `gpu` is the UUID of one."""

    total_bytes: int
    free_bytes: int
    source: str
    gpu: str | None = None


class MemoryProbe(Protocol):
    """Where an engine that allocates as it goes takes its memory from."""

    async def read(self) -> Memory:
        """The memory now, never from a moment ago. Raises `EngineError`, naming it, where it cannot be read."""
        ...


class HostProbe:
    """The machine's memory, for engines that compute on its processors or share it (unified memory)."""

    async def read(self) -> Memory:
        """See `MemoryProbe.read`."""
        memory = read_host_memory()
        if memory is None:
            raise EngineError(f"the free memory of this machine cannot be read from {_MEMINFO}")
        return memory


class EngineProbe:
    """The memory that the engine itself tells with its usage."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def read(self) -> Memory:
        """See `MemoryProbe.read`."""
        usage = await self._engine.usage()
        if usage.memory_free_bytes is None or usage.memory_total_bytes is None:
            raise EngineError("the engine does not tell its free memory")
        return Memory(
            total_bytes=usage.memory_total_bytes, free_bytes=usage.memory_free_bytes, source=self._engine.facts.name
        )


class HostMemory:
    """The host's memory as read less than half a second ago; reading it takes as long as a message to the broker."""

    def __init__(self) -> None:
        self._read_at = -_FRESH_FOR_S
        self._memory: Memory | None = None

    def recent(self) -> Memory | None:
        """What `read_host_memory` said a moment ago."""
        now = time.monotonic()
        if now - self._read_at >= _FRESH_FOR_S:
            self._memory, self._read_at = read_host_memory(), now
        return self._memory


def read_host_memory(path: Path = _MEMINFO) -> Memory | None:
    """The host's memory (`MemTotal` and `MemAvailable` of proc(5), in KiB); None where the system does not tell."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    values = {}
    for line in lines:
        key, _, rest = line.partition(":")
        number = rest.split()[:1]
        if key in ("MemTotal", "MemAvailable") and number and number[0].isdigit():
            values[key] = int(number[0]) * _KIB
    if len(values) != 2:
        return None
    return Memory(total_bytes=values["MemTotal"], free_bytes=values["MemAvailable"], source="system")


def shared_folder(state_dir: str) -> Path:
    """Where the workers with this state directory share the memory of devices."""
    return Path(state_dir) / "memory"


def shared_by(folder: Path, memory: Memory) -> Path:
    """Where the workers that share this memory keep their table: by the GPU's UUID, or by the machine's present run."""
    if memory.source == "gpu" and memory.gpu is not None:
        return folder / memory.gpu
    with contextlib.suppress(OSError):
        return folder / f"host-{_BOOT_ID.read_text().strip()}"
    return folder / "host"
