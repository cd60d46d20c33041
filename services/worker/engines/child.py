"""An inference server that runs as our child: started, waited for, and gone with us."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from signal import SIGKILL, Signals
from typing import Final, TypeVar

from headrace.errors import EngineError, EngineStartError
from headrace.lifecycle import ChildProcess

__all__ = ["ServerChild", "free_port"]

_NUM_LAST_LINES: Final = 8

_T = TypeVar("_T")


def free_port() -> int:
    """A port of loopback that nobody listens on now; another program may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerChild:
    """One run of a server. Errors name it, say how it ended, and show what it printed last."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        name: str,
        env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
        stop_timeout_s: float = 2.0,
        death_signal: Signals = SIGKILL,
    ) -> None:
        self._name = name
        self._is_started = False
        self._process = ChildProcess(
            argv, name=name, env=env, on_line=on_line, stop_timeout_s=stop_timeout_s, death_signal=death_signal
        )

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    async def start(self) -> None:
        """Start it; nothing is known yet of how it does. Raises `EngineStartError` where it cannot be run at all."""
        try:
            await self._process.__aenter__()
        except OSError as error:
            raise EngineStartError(f"the {self._name} cannot be started: {error}") from None
        self._is_started = True

    async def until(self, ready: Awaitable[_T], *, timeout_s: float) -> _T:
        """Wait for what tells that it is ready. Raises `EngineStartError` where it ends or the time is over first."""
        waiting = asyncio.ensure_future(ready)
        dying = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait({waiting, dying}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return await waiting
            if dying.done():
                raise EngineStartError(self._death(dying.result()))
        finally:
            waiting.cancel()
            dying.cancel()
            await asyncio.gather(waiting, dying, return_exceptions=True)
        tail = self._process.tail()
        raise EngineStartError(f"the {self._name} was not ready after {timeout_s:g} s" + (f":\n{tail}" if tail else ""))

    def check_alive(self) -> None:
        """Raises `EngineError` once it has ended."""
        if self._process.returncode is not None:
            raise EngineError(self._death(self._process.returncode))

    async def wait_died(self) -> str:
        """How it ended, and its last lines."""
        return self._death(await self._process.wait())

    async def stop(self) -> None:
        """End it, and its process group. Safe where it was never started."""
        if self._is_started:
            await self._process.stop()

    def _death(self, code: int) -> str:
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        tail = "\n".join(self._process.tail().splitlines()[-_NUM_LAST_LINES:])
        return f"the {self._name} {how}:\n{tail}" if tail else f"the {self._name} {how}"
