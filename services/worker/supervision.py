"""Keeps a worker's engine up: starts it and sees that it answers, starts it again when it fails, hangs or is sick."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import msgspec

from headrace import metrics
from headrace.discipline.health import MAX_RESTARTS, RESTARTS_WITHIN_S, Remedy, remedy
from headrace.errors import EngineError
from headrace.lifecycle import Backoff
from headrace.schemas.workers import Ailment, WorkerHealth, WorkerState
from headrace.worker.engines.base import Engine
from headrace.worker.enginewatch import EngineFailure, until_engine_fails, why_unhealthy
from headrace.worker.gate import Gate
from headrace.worker.held import HeldSet
from headrace.worker.probe import Prober
from headrace.worker.wellbeing import Wellbeing

__all__ = ["SayState", "Supervisor"]

log = logging.getLogger(__name__)

_RESTART_FIRST_S: Final = 0.5
_RESTART_MAX_S: Final = 30.0
_WATCH_EVERY_S: Final = 0.25
_OWN_PAUSE_S: Final = 1.0
_LOOK_S: Final = 0.05
_ALONE_EVERY_S: Final = 5.0
_NUM_ALONE: Final = 3
"""Looks in a row by which one that was left out must see nobody else: others may be between two engine runs."""
_SETTLE_S: Final = 15.0
"""What executions that were stopped get to say so in their jobs' logs."""


class SayState(Protocol):
    """Puts a state and its reason in the heartbeat, and has the puller look at it."""

    def __call__(self, state: WorkerState, reason: str = "") -> None:
        """`reason` is for people."""


class _Illness(msgspec.Struct, frozen=True):
    ailment: Ailment
    reason: str


class Supervisor:
    """One per worker. `engine_run` counts the times that the engine was started again.

    `adopt` takes over what a started engine says of itself, and raises EngineError where that cannot be used.
    `has_peers` says whether another worker of the pool is up; None where that is not known now.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        model: str,
        held: HeldSet,
        gate: Gate,
        wellbeing: Wellbeing,
        prober: Prober,
        stall_s: float,
        grace_s: float,
        adopt: Callable[[], Awaitable[None]],
        say: SayState,
        has_peers: Callable[[], Awaitable[bool | None]],
    ) -> None:
        self._engine = engine
        self._model = model
        self._held = held
        self._gate = gate
        self._wellbeing = wellbeing
        self._prober = prober
        self._stall_s = stall_s
        self._grace_s = grace_s
        self._adopt = adopt
        self._say = say
        self._has_peers = has_peers
        self._hangs = asyncio.Event()
        self._illness: _Illness | None = None
        self._fell_ill = asyncio.Event()
        self._restarted_at: deque[float] = deque(maxlen=MAX_RESTARTS)
        self._num_restarts = 0
        self._last_restart = ""
        self._is_left_out = False
        self.engine_run = 0

    @property
    def health(self) -> WorkerHealth:
        """As the heartbeat has it."""
        return self._wellbeing.report(
            restarts=self._num_restarts, last_restart=self._last_restart, is_left_out=self._is_left_out
        )

    async def start(self) -> None:
        """Start the engine and see that it answers. Raises EngineStartError where it does not."""
        await self._engine.start()
        await self._prober.until_passed()

    def note_illness(self, ailment: Ailment, reason: str) -> None:
        """Somebody found the present engine run sick; one finding at a time counts."""
        if self._illness is None and not self._is_left_out:
            self._illness = _Illness(ailment, reason)
            self._fell_ill.set()

    async def settle_doubt(self) -> None:
        """After a request that the engine failed, and `Gate.doubt`: trust it again once it passes its health check, or
        is being replaced.

        What began on an engine that just died would be charged with a death that it had no part in.
        """
        try:
            while not self._gate.is_paused and await why_unhealthy(self._engine):
                await asyncio.sleep(_LOOK_S)
        finally:
            self._gate.trust()

    async def run(self) -> None:
        """Start the engine again whenever it fails or is sick, until cancelled.

        Once it is left out only if nobody else of its pool is up: two that were left out at once each had the other.
        """
        while True:
            if self._is_left_out:
                await self._until_alone()
                log.warning("nobody else of the pool is up; the engine is started again")
                self._is_left_out = False
                await self._start_again()
            async with asyncio.TaskGroup() as group:
                failing = group.create_task(
                    until_engine_fails(self._engine, self._hangs, stall_s=self._stall_s), name="engine failure"
                )
                falling_ill = group.create_task(self._fell_ill.wait(), name="illness")
                await asyncio.wait([failing, falling_ill], return_when=asyncio.FIRST_COMPLETED)
                failure = failing.result() if failing.done() else None
                failing.cancel()
                falling_ill.cancel()
            if failure is not None:
                reason, why = failure
                log.error("the engine failed: %s", why)
                await self._replace_failed(reason, why)
            elif self._illness is not None:
                await self._treat(self._illness)
            self._hangs.clear()
            self._fell_ill.clear()
            self._illness = None

    async def _replace_failed(self, reason: EngineFailure, why: str) -> None:
        self._say("Failed", why)
        self._gate.pause("engine")
        for execution in self._held.executions():
            execution.stop(reason)
        await self._start_again()

    async def _treat(self, illness: _Illness) -> None:
        now = time.monotonic()
        what = remedy(illness.ailment, self._restarted_at, now=now, has_peers=bool(await self._has_peers()))
        if what is Remedy.KEEP:
            log.error("%s; %d restarts did not help, and nobody else is up", illness.reason, MAX_RESTARTS)
            self._wellbeing.start_anew(self.engine_run)
            return
        log.error("the worker is taken out: %s", illness.reason)
        if illness.ailment == "probe":  # it answers nothing, so nothing is gained by waiting
            self._say("Failed", illness.reason)
            self._gate.pause("engine")
            for execution in self._held.executions():
                execution.stop("engine_died")
        else:
            await self._drain(illness.reason)
        self._last_restart = illness.reason
        if what is Remedy.LEAVE_OUT:
            self._is_left_out = True
            why = f"left out after {MAX_RESTARTS} restarts in {RESTARTS_WITHIN_S / 60:.0f} min: {illness.reason}"
            log.error("%s", why)
            self._say("Failed", why)
            await self._engine.stop()
            return
        metrics.RESTARTS.add(metrics.model_label(self._model), illness.ailment)
        self._restarted_at.append(now)
        self._num_restarts += 1
        self._say("Failed", illness.reason)
        await self._start_again()

    async def _until_alone(self) -> None:
        num_alone = 0
        while num_alone < _NUM_ALONE:
            await asyncio.sleep(_ALONE_EVERY_S)
            num_alone = num_alone + 1 if await self._has_peers() is False else 0

    async def _drain(self, why: str) -> None:
        """Take nothing more, finish what fits in the grace period, and hand the rest back, which is no fault of it."""
        self._say("Draining", why)
        self._gate.pause("engine")
        grace = Backoff(first_s=_LOOK_S, max_s=_LOOK_S, for_s=self._grace_s)
        settling = Backoff(first_s=_LOOK_S, max_s=_LOOK_S, for_s=self._grace_s + _SETTLE_S)
        while self._gate.room.num_running and not settling.is_over:
            if grace.is_over:
                for execution in self._held.executions():
                    execution.stop("drain")
            await settling.pause()

    async def _start_again(self) -> None:
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
        self._wellbeing.start_anew(self.engine_run)
        self._gate.marks.note_silence(0.0)
        self._gate.resume("engine")
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
