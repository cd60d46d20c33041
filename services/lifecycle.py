"""How a process starts and stops: one stop event, bounded shutdown, and children that are never orphaned."""

import asyncio
import contextlib
import ctypes
import logging
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Final, Self

__all__ = ["Backoff", "ChildProcess", "stop_event", "unless_stopped", "wait_first"]

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
_SAME_SIGNAL_S: Final = 0.3
_NUM_TAIL_LINES: Final = 60
_LAST_OUTPUT_S: Final = 0.5
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@contextlib.asynccontextmanager
async def stop_event(
    signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
) -> AsyncIterator[asyncio.Event]:
    """The process's one stop event: the first signal sets it, a second exits at once with 128 + its number."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    installed = tuple(signals)

    first_at = -math.inf

    def on_signal(number: int) -> None:
        # One Ctrl-C may arrive twice: a child that is just being forked shares our wake-up pipe until it executes.
        nonlocal first_at
        now = time.monotonic()
        if not event.is_set():
            first_at = now
            event.set()
        elif now - first_at > _SAME_SIGNAL_S:
            os._exit(128 + number)

    for number in installed:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield event
    finally:
        for number in installed:
            loop.remove_signal_handler(number)


async def wait_first(*events: asyncio.Event, timeout_s: float | None = None) -> bool:
    """Wait until one of the events is set; False if `timeout_s` passed first. Leaves no task behind."""
    if any(event.is_set() for event in events):
        return True
    waiters = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        done, _ = await asyncio.wait(waiters, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiters:
            waiter.cancel()
        await asyncio.gather(*waiters, return_exceptions=True)
    return bool(done)


async def unless_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Do some work; False if it was cancelled because `stop` was set first. Raises what the work raises."""
    working = asyncio.ensure_future(work)
    ended = asyncio.Event()
    working.add_done_callback(lambda _: ended.set())
    try:
        await wait_first(stop, ended)
    finally:
        working.cancel()
        await asyncio.wait((working,))
        if not working.cancelled():
            working.exception()  # taken note of, also where we are cancelled ourselves
    if working.cancelled():
        return False
    await working
    return True


class Backoff:
    """Pauses that double from `first_s` to `max_s`; `is_over` once `for_s` seconds have passed since it was made."""

    def __init__(self, *, first_s: float, max_s: float, for_s: float = math.inf) -> None:
        self._next_s = first_s
        self._max_s = max_s
        self._until = time.monotonic() + for_s

    @property
    def is_over(self) -> bool:
        """Whether it is time to give up."""
        return time.monotonic() >= self._until

    async def pause(self) -> None:
        """Wait the next pause."""
        await asyncio.sleep(self._next_s)
        self._next_s = min(self._next_s * 2, self._max_s)


def _die_with_parent(parent_pid: int, death_signal: int) -> Callable[[], None]:
    """A function for the child, between fork and exec: the kernel signals it when its parent dies, however it dies."""

    def prepare() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, death_signal)
            if os.getppid() != parent_pid:  # the parent died before the line above took effect
                os._exit(1)

    return prepare


class ChildProcess:
    """A child in its own process group that dies with us and is killed, group and all, if it does not stop in time.

    Its output goes to `on_line` line by line and the last lines are kept for error messages. On Linux the kernel
    sends `death_signal` to the child when the thread that started it ends, so start children from the main thread.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        name: str,
        env: Mapping[str, str] | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
        stop_timeout_s: float = 5.0,
        death_signal: signal.Signals = signal.SIGKILL,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self._argv = list(argv)
        self._env = dict(env) if env is not None else None
        self._stop_signal = stop_signal
        self._stop_timeout_s = stop_timeout_s
        self._death_signal = death_signal
        self._on_line = on_line
        self._tail: deque[str] = deque(maxlen=_NUM_TAIL_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._is_stopped = False

    async def __aenter__(self) -> Self:
        # A pipe of our own: asyncio's would make `wait` last until every descendant that inherited it has ended.
        read_end, write_end = os.pipe()
        output = os.fdopen(read_end, "rb", 0)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                env=self._env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent(os.getpid(), self._death_signal),
            )
        except BaseException:
            output.close()
            raise
        finally:
            os.close(write_end)
        self._reader = asyncio.create_task(self._read_output(output), name=f"output of {self.name}")
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def pid(self) -> int:
        """Process id, also the id of its process group."""
        return self._running.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._running.returncode

    def tail(self) -> str:
        """The last lines it printed."""
        return "\n".join(self._tail)

    async def wait(self) -> int:
        """Wait for its end, and for what it printed last; returns the exit code."""
        code = await self._running.wait()
        await self._until_output_ends()
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the child alone; nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._running.send_signal(number)

    async def stop(self) -> None:
        """Ask it to stop, wait the stop timeout, then kill its whole group. Safe to call twice."""
        process = self._running
        try:
            if process.returncode is None:
                self.send_signal(self._stop_signal)
                try:
                    async with asyncio.timeout(self._stop_timeout_s):
                        await process.wait()
                except TimeoutError:
                    log.warning("%s did not stop in %.1f s; killing it", self.name, self._stop_timeout_s)
        finally:
            if not self._is_stopped:  # once: the number may be somebody else's group later
                self._is_stopped = True
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            await self._until_output_ends()
            if self._reader is not None:
                self._reader.cancel()
                await asyncio.gather(self._reader, return_exceptions=True)

    @property
    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process

    async def _until_output_ends(self) -> None:
        """Bounded, since a descendant outside the group may hold the pipe open."""
        if self._reader is not None:
            await asyncio.wait((self._reader,), timeout=_LAST_OUTPUT_S)

    async def _read_output(self, output: IO[bytes]) -> None:
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), output
        )
        try:
            await self._read_lines(stream)
        finally:
            transport.close()

    async def _read_lines(self, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                raw = await stream.readline()
            except ValueError:  # a line beyond the buffer's limit: dropped, the next is read
                continue
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            self._tail.append(line)
            if self._on_line is not None:
                try:
                    self._on_line(line)
                except Exception:  # whoever listens must not stop the reading: a full pipe stops the child
                    log.exception("a line of %s was not taken", self.name)
