"""Memory that an engine computes in: the machine's, or what the engine itself says is left."""

import contextlib
import time
from pathlib import Path
from typing import Final, Protocol

from headrace.errors import EngineError
from headrace.hardware.memory import MEMINFO, Memory, read_host_memory
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

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_FRESH_FOR_S: Final = 0.4


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
            raise EngineError(f"the free memory of this machine cannot be read from {MEMINFO}")
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
