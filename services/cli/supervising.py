"""A child process kept running: started again when it ends by itself, stopped when told."""

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from headrace.lifecycle import ChildProcess, wait_first

__all__ = ["Supervised"]

log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.25
_MAX_PAUSE_S: Final = 10.0
_HEALTHY_AFTER_S: Final = 10.0
"""A child that lived this long failed for a new reason: its pauses begin anew."""


class Supervised:
    """One child under a name. `run` keeps it running; `first_end` is set when it ended by itself for the first time,
    `ended` when no child runs any more, and none will.

    Until `is_proven` is set, an end is taken for a failure to start that starting again would only repeat.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stop_timeout_s: float,
        death_signal: signal.Signals,
        on_line: Callable[[str, str], None],
    ) -> None:
        self.name = name
        self.stop = asyncio.Event()
        self.first_end = asyncio.Event()
        self.ended = asyncio.Event()
        self.is_proven = False
        self.last_words = ""
        self.exit_code: int | None = None
        self._argv = argv
        self._env = env
        self._stop_timeout_s = stop_timeout_s
        self._death_signal = death_signal
        self._on_line = on_line
        self._child: ChildProcess | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child that runs now."""
        return self._child.pid if self._child is not None else None

    def send_signal(self, number: signal.Signals) -> None:
        """Send the child a signal; nothing if none runs now."""
        if self._child is not None:
            self._child.send_signal(number)

    def kill(self) -> None:
        """Kill the child, and start it no more."""
        self.send_signal(signal.SIGKILL)
        self.stop.set()

    async def run(self) -> None:
        """Keep it running until `stop` is set, then stop it; no child is left when this returns or raises."""
        try:
            await self._run_until_stopped()
        finally:
            self.ended.set()

    async def _run_until_stopped(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self.stop.is_set():
            since = time.monotonic()
            await self._run_once()
            if self.stop.is_set():
                return
            self.first_end.set()
            if not self.is_proven:
                await self.stop.wait()
                return
            has_failed = self.exit_code != 0 and time.monotonic() - since <= _HEALTHY_AFTER_S  # 0: it was told to drain
            pause_s = min(pause_s * 2, _MAX_PAUSE_S) if has_failed else _FIRST_PAUSE_S
            log.warning("%s ended with exit code %s; starting it again in %.2g s", self.name, self.exit_code, pause_s)
            await wait_first(self.stop, timeout_s=pause_s)

    async def _run_once(self) -> None:
        child = ChildProcess(
            self._argv,
            name=self.name,
            env=self._env,
            stop_timeout_s=self._stop_timeout_s,
            death_signal=self._death_signal,
            on_line=lambda line: self._on_line(self.name, line),
        )
        async with child:
            self._child = child
            ended = asyncio.ensure_future(child.wait())
            stopping = asyncio.ensure_future(self.stop.wait())
            try:
                await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
                ended.cancel()
                await asyncio.gather(ended, stopping, return_exceptions=True)
                self.exit_code = child.returncode
        self._child = None
        self.last_words = next((line for line in reversed(child.tail().splitlines()) if line.strip()), "")
