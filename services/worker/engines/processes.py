"""The processes below one of ours, as /proc shows them; none where there is no /proc."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["Process", "descendants", "process_of"]

_PROC: Final = Path("/proc")


class Process(NamedTuple):
    """One process (proc(5), `stat`). `name` is at most 15 bytes, and what the process calls itself."""

    pid: int
    parent: int
    name: str
    state: str

    @property
    def is_stopped(self) -> bool:
        """By a signal or a debugger: it computes nothing until somebody lets it go on."""
        return self.state in ("T", "t")

    @property
    def has_ended(self) -> bool:
        """It is only there until its parent asks how it ended."""
        return self.state in ("Z", "X", "x")


def process_of(pid: int) -> Process | None:
    """That process; None if it is gone."""
    try:
        line = (_PROC / str(pid) / "stat").read_bytes().decode(errors="replace")
    except OSError:
        return None
    # The name may hold spaces and parentheses of its own; what follows the last one is numbers.
    head, _, rest = line.rpartition(")")
    _, _, name = head.partition("(")
    state, parent = rest.split()[:2]
    return Process(pid, int(parent), name, state)


def descendants(pid: int) -> list[Process]:
    """The process itself, its children, theirs, and so on; of a process that is gone, nothing."""
    by_parent: dict[int, list[Process]] = {}
    found: list[Process] = []
    for process in _all():
        by_parent.setdefault(process.parent, []).append(process)
        if process.pid == pid:
            found.append(process)
    for process in found:  # grows as we go
        found += by_parent.get(process.pid, ())
    return found


def _all() -> Iterator[Process]:
    try:
        pids = [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]
    except OSError:
        return
    for pid in pids:
        if (process := process_of(pid)) is not None:
            yield process
