"""CPU time of processes, from Linux's /proc; None elsewhere."""

import os
import time
from pathlib import Path
from typing import Final

import msgspec

__all__ = ["Usage", "cpu_seconds", "usage"]

_UTIME: Final = 11
"""Fields after the command's name in /proc/<pid>/stat; proc(5) counts from 1 and has the pid and the name first."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds of processes by name so far, and when that was read, on the monotonic clock."""

    at: float
    cpu_s: dict[str, float | None]

    def since(self, before: "Usage") -> dict[str, float | None]:
        """CPU seconds between two readings; None where either is not known."""
        spent: dict[str, float | None] = {}
        for name, now in self.cpu_s.items():
            then = before.cpu_s.get(name)
            spent[name] = now - then if now is not None and then is not None else None
        return spent


def usage(pids: dict[str, int | None]) -> Usage:
    """Read all of them now."""
    return Usage(
        at=time.monotonic(),
        cpu_s={name: cpu_seconds(pid) if pid is not None else None for name, pid in pids.items()},
    )


def cpu_seconds(pid: int) -> float | None:
    """User and system time of a process so far, to a clock tick (10 ms as a rule); its children do not count."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return (int(fields[_UTIME]) + int(fields[_UTIME + 1])) / os.sysconf("SC_CLK_TCK")
