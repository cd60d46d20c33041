"""The machine's memory, as the system tells it."""

from pathlib import Path
from typing import Final

import msgspec

__all__ = ["Memory", "read_host_memory"]

MEMINFO: Final = Path("/proc/meminfo")
_KIB: Final = 1024


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes in all, bytes that could be had now, and whose they are; `gpu` is the UUID of one."""

    total_bytes: int
    free_bytes: int
    source: str
    gpu: str | None = None


def read_host_memory(path: Path = MEMINFO) -> Memory | None:
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
