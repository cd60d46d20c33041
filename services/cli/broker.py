"""The embedded broker kept running: started again on the same port when it ends by itself."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from headrace.bus.members import OPERATOR
from headrace.bus.securing import SecureDirectory
from headrace.bus.server import BrokerInfo, EmbeddedBroker
from headrace.errors import BrokerUnavailableError
from headrace.lifecycle import wait_first

__all__ = ["SupervisedBroker"]

log = logging.getLogger(__name__)

_PAUSE_S: Final = 0.5


class SupervisedBroker:
    """An `EmbeddedBroker` that comes back. Port 0 is chosen once and kept, so clients find it again.

    With a `directory` only its users may connect.
    """

    def __init__(self, state_dir: Path, *, port: int, directory: SecureDirectory | None = None) -> None:
        self._state_dir = state_dir
        self._port = port
        self._directory = directory
        self._stop = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[BrokerInfo]:
        """Ready inside the block, gone after it. Raises what `EmbeddedBroker` raises where it does not start."""
        async with contextlib.AsyncExitStack() as first_start:
            # The first start is ours, so that its errors are raised here and not in an exception group.
            broker = await first_start.enter_async_context(self._broker())
            self._port = urlsplit(broker.info.url).port or self._port
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep(broker, first_start.pop_all()), name="broker")
                try:
                    yield broker.info
                finally:
                    self._stop.set()

    def _broker(self) -> EmbeddedBroker:
        directory = self._directory
        return EmbeddedBroker(
            self._state_dir,
            port=self._port,
            accounts=directory.accounts if directory is not None else None,
            operator_credentials=directory.file_of(OPERATOR) if directory is not None else None,
        )

    async def _keep(self, broker: EmbeddedBroker, running: contextlib.AsyncExitStack) -> None:
        while True:
            async with running:
                if await self._ended_by_itself(broker):
                    log.error("nats-server ended by itself; starting it again")
            while not self._stop.is_set():
                running = contextlib.AsyncExitStack()
                try:
                    broker = await running.enter_async_context(self._broker())
                    break
                except BrokerUnavailableError as error:
                    log.error("the broker does not start: %s", error)
                    await wait_first(self._stop, timeout_s=_PAUSE_S)
            else:
                return

    async def _ended_by_itself(self, broker: EmbeddedBroker) -> bool:
        ended = asyncio.ensure_future(broker.wait())
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
            return not self._stop.is_set()
        finally:
            for task in (ended, stopping):
                task.cancel()
            await asyncio.gather(ended, stopping, return_exceptions=True)
