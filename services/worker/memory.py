"""Memory of the machine an engine without a GPU computes on."""

import time
from pathlib import Path
from typing import Final

import msgspec

__all__ = ["HostMemory", "Memory", "read_host_memory"]

_MEMINFO: Final = Path("/proc/meminfo")
_KIB: Final = 1024
_FRESH_FOR_S: Final = 0.4


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes in all, bytes that could be had now, and whose they are."""

    total_bytes: int
    free_bytes: int
    source: str


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
