"""The child process of the `vllm` engine: it runs `vllm serve` and outlives none of its processes.

`python -m headrace.worker.engines.vllm_guard PROGRAM …` runs the program and ends as it does. A vLLM server is several
processes, and those of its engine core go on, memory and all, when the server is killed. So the guard takes in every
orphan below it, and kills all that is left when one of these happens: the server ends, the worker dies (the kernel
sends us SIGTERM then), or we are told to stop. Only SIGKILL of worker and guard at once leaves an engine core behind.
The guard imports nothing of vLLM, and needs Linux for its promise.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

from headrace.worker.engines.processes import descendants

__all__ = ["main"]

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_LOOK_S: Final = 0.5
_GRACE_S: Final = 2.0
"""How long the server may take to end by itself when it is told to stop."""
_KILL_S: Final = 5.0
_KILL_AGAIN_S: Final = 0.01
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


def main(argv: list[str] | None = None) -> int:
    """Run the program until it ends or a signal comes; the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    worker = os.getppid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        server = subprocess.Popen(  # there are no threads here
            argv,
            stdin=subprocess.DEVNULL,
            preexec_fn=_prepared(os.getpid()),  # noqa: PLW1509
        )
    except OSError as error:
        print(f"{argv[0] if argv else 'nothing'} cannot be run: {error}", flush=True)
        return 127
    try:
        return _watch(server, worker)
    finally:
        _kill_all()


def _watch(server: "subprocess.Popen[bytes]", worker: int) -> int:
    """Until it ends, or a signal comes."""
    while True:
        told = signal.sigtimedwait(_SIGNALS, _LOOK_S)
        if told is not None and told.si_signo != signal.SIGCHLD:
            if os.getppid() == worker:
                _end(server)
            return 128 + told.si_signo
        if (code := server.poll()) is not None:
            return 128 - code if code < 0 else code
        if told is not None:
            _reap(server.pid)


def _end(server: "subprocess.Popen[bytes]") -> None:
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(_GRACE_S)


def _kill_all() -> None:
    """Kill what is below us, stopped or not, until there is nothing."""
    until = time.monotonic() + _KILL_S
    while time.monotonic() < until:
        left = [each.pid for each in descendants(os.getpid())[1:] if not each.has_ended]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _reap(None)
        time.sleep(_KILL_AGAIN_S)


def _reap(server: int | None) -> None:
    """Take note of orphans that ended; of the server only `Popen` may."""
    for process in descendants(os.getpid())[1:]:
        if process.has_ended and process.parent == os.getpid() and process.pid != server:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def _prepared(guard: int) -> Callable[[], None]:
    """A function for the server, between fork and exec: it dies with us, and hears signals again."""

    def prepare() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    return prepare


def _prctl(option: int, value: int) -> None:
    if _libc is not None:
        _libc.prctl(option, value)


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

if __name__ == "__main__":
    sys.exit(main())
