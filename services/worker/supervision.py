"""Keeps a worker's engine up: starts it, notices that it fails or hangs, and starts it again."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from headrace.errors import EngineError
from headrace.lifecycle import Backoff
from headrace.schemas.workers import WorkerState
from headrace.worker.engines.base import Engine
from headrace.worker.enginewatch import EngineFailure, until_engine_fails
from headrace.worker.gate import Gate
from headrace.worker.held import HeldSet

__all__ = ["SayState", "Supervisor"]

log = logging.getLogger(__name__)

_RESTART_FIRST_S: Final = 0.5
_RESTART_MAX_S: Final = 30.0
_WATCH_EVERY_S: Final = 0.25
_OWN_PAUSE_S: Final = 1.0


class SayState(Protocol):
    """Puts a state and its reason in the heartbeat, and has the puller look at it."""

    def __call__(self, state: WorkerState, reason: str = "") -> None:
        """`reason` is for people."""


class Supervisor:
    """One per worker. `engine_run` counts the times that the engine was started again.

    `adopt` takes over what a started engine says of itself, and raises EngineError where that cannot be used.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        held: HeldSet,
        gate: Gate,
        stall_s: float,
        adopt: Callable[[], Awaitable[None]],
        say: SayState,
    ) -> None:
        self._engine = engine
        self._held = held
        self._gate = gate
        self._stall_s = stall_s
        self._adopt = adopt
        self._say = say
        self._hangs = asyncio.Event()
        self.engine_run = 0

    async def start(self) -> None:
        """Start the engine for the first time. Raises EngineStartError where it does not come up."""
        await self._engine.start()

    async def run(self) -> None:
        """Start the engine again whenever it fails, until cancelled."""
        while True:
            reason, why = await until_engine_fails(self._engine, self._hangs, stall_s=self._stall_s)
            log.error("the engine failed: %s", why)
            await self._restart(reason, why)
            self._hangs.clear()

    async def _restart(self, reason: EngineFailure, why: str) -> None:
        self._say("Failed", why)
        self._gate.pause()
        for execution in self._held.executions():
            execution.stop(reason)
        await self._engine.stop()
        backoff = Backoff(first_s=_RESTART_FIRST_S, max_s=_RESTART_MAX_S)
        while True:
            await backoff.pause()
            try:
                await self.start()
                await self._adopt()
            except EngineError as error:
                log.error("the engine does not start: %s", error)
                await self._engine.stop()
                self._say("Failed", str(error))
                continue
            break
        self.engine_run += 1
        self._gate.marks.note_silence(0.0)
        self._gate.resume()
        self._say("Ready")

    async def watch(self) -> None:
        """End what made no progress for the stall limit, until cancelled; a healthy-looking engine can hang.

        Where nothing else made progress either, it is the engine that hangs, not one request: it is restarted.
        """
        stall_s = self._stall_s
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(min(_WATCH_EVERY_S, stall_s / 4))
            now = time.monotonic()
            executions = self._held.executions()
            if now - slept_at > _OWN_PAUSE_S:  # it was us that stood still, not the engine
                for execution in executions:
                    execution.last_progress = now
                continue
            stalled = [execution for execution in executions if now - execution.last_progress > stall_s]
            for execution in stalled:
                log.error("job %s: no token for %.1f s", execution.claimed.job.job, stall_s)
                execution.stop("stalled")
            if stalled and all(now - execution.last_progress > stall_s / 2 for execution in executions):
                self._hangs.set()
