"""What a tree of processes has of memory: of the machine's by /proc, of GPUs' by the driver."""

from pathlib import Path
from typing import Any, Final

from headrace.hardware.gpu import process_memory
from headrace.hardware.memory import read_host_memory
from headrace.worker.engines.base import MemoryUse
from headrace.worker.engines.processes import descendants

__all__ = ["anonymous_bytes", "memory_of"]

_PROC: Final = Path("/proc")
_KIB: Final = 1024


def memory_of(pid: int, *, nvml: Any = None) -> tuple[MemoryUse, ...]:
    """Of the process and all below it; kinds that nobody tells are left out."""
    pids = [process.pid for process in descendants(pid)]
    uses = []
    used_bytes = sum(anonymous_bytes(each) for each in pids)
    if used_bytes:
        host = read_host_memory()
        free_ratio = host.free_bytes / host.total_bytes if host is not None else None
        uses.append(MemoryUse(kind="memory", used_bytes=used_bytes, free_ratio=free_ratio))
    on_gpus = process_memory(pids, nvml=nvml)
    if on_gpus is not None:
        used_bytes, free_ratio = on_gpus
        uses.append(MemoryUse(kind="GPU memory", used_bytes=used_bytes, free_ratio=free_ratio))
    return tuple(uses)


def anonymous_bytes(pid: int) -> int:
    """What the process has that is in no file, in memory or swapped out (proc(5), `status`); 0 where that is not told.

    Pages of a file, such as weights that are mapped, come and go as they are read.
    """
    try:
        lines = (_PROC / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return 0
    fields = {key: value.split()[:1] for key, _, value in (line.partition(":") for line in lines)}
    numbers = [fields.get(key) for key in ("RssAnon", "VmSwap")]
    return sum(int(number[0]) * _KIB for number in numbers if number and number[0].isdigit())
