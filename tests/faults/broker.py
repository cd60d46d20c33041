"""A broker that tests may stop or kill, and start again at the same address with the same store."""

import os
import signal
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from headrace.bus.server import BrokerInfo, EmbeddedBroker

__all__ = ["RestartableBroker"]


class RestartableBroker:
    """An embedded broker of its own; running inside the block, except between `end` and `start`."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._port = 0
        self._broker: EmbeddedBroker | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._broker is not None:
            await self._broker.__aexit__(None, None, None)

    @property
    def info(self) -> BrokerInfo:
        """Where it listens; the same after each start but for the process id."""
        assert self._broker is not None
        return self._broker.info

    async def start(self) -> None:
        """Start it, again on what it had stored."""
        broker = EmbeddedBroker(self._state_dir, port=self._port)
        await broker.__aenter__()
        self._broker = broker
        self._port = urlsplit(broker.info.url).port or 0

    async def end(self, number: signal.Signals) -> None:
        """End it by a signal."""
        broker, self._broker = self._broker, None
        assert broker is not None
        os.kill(broker.info.pid, number)
        await broker.wait()
        await broker.__aexit__(None, None, None)
