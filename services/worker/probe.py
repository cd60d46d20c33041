"""A worker asks its own engine for one token, to see that it answers: before it is Ready, and while it is idle."""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable
from typing import Any, Final

from headrace import metrics
from headrace.errors import EngineBusyError, EngineError, EngineRequestError, EngineStartError
from headrace.lifecycle import Backoff, unless_stopped, wait_first
from headrace.schemas.openai import InferenceRequest, Operation
from headrace.worker.engines.base import PROBE_PREFIX, Engine
from headrace.worker.held import HeldSet

__all__ = ["Prober"]

log = logging.getLogger(__name__)

_BODIES: Final[dict[Operation, dict[str, Any]]] = {
    "completions": {"prompt": "a"},
    "chat": {"messages": [{"role": "user", "content": "a"}]},
    "embeddings": {"input": "a"},
}
"""Asked in this order until one is not refused: a model may know nothing but embeddings."""
_LAST_PRIORITY: Final = 2
_AGAIN_S: Final = 0.5
_NUM_FAILED: Final = 2
"""Probes in a row that must fail: one may meet what would have passed."""


class Prober:
    """Probes go the way of a request through the engine, and no other: no queue, no log, no tenant, no figure of what
    was served.

    One is only made while nothing is held, and is aborted the moment a message is listed, so it takes no slot and needs
    no reservation: its one block of KV cache is free again before that request has read its log.
    """

    def __init__(self, engine: Engine, *, model: str, held: HeldSet, timeout_s: float) -> None:
        self._engine = engine
        self._model = model
        self._held = held
        self._timeout_s = timeout_s
        self._operations = list(_BODIES)

    async def until_passed(self) -> None:
        """Probe an engine that has just started. Raises EngineStartError where it does not answer as one should.

        One that has no room is asked again for a while; then it counts as up, since somebody else uses it.
        """
        num_failed = 0
        waits = Backoff(first_s=_AGAIN_S, max_s=_AGAIN_S, for_s=self._timeout_s)
        while True:
            try:
                await self._ask()
                return
            except EngineRequestError as error:
                raise EngineStartError(f"the engine refuses a request for one token: {error}") from None
            except EngineBusyError as error:
                if waits.is_over:
                    log.warning("the engine was not seen to answer yet: %s", error)
                    return
            except EngineError as error:
                num_failed += 1
                if num_failed >= _NUM_FAILED:
                    raise EngineStartError(f"the engine came up, but not one token comes from it: {error}") from None
            await waits.pause()

    async def follow(self, every_s: float, *, is_up: Callable[[], bool], failed: Callable[[str], None]) -> None:
        """Probe whenever nothing was held for `every_s`, until cancelled; `failed` hears of `_NUM_FAILED` in a row."""
        num_failed = 0
        while True:
            await self._held.became_empty.wait()
            pause_s = min(every_s, _AGAIN_S) if num_failed else every_s
            if await wait_first(self._held.became_taken, timeout_s=pause_s) or not is_up():
                num_failed = 0
                continue
            try:
                if not await unless_stopped(self._ask(), self._held.became_taken):
                    self._count("yielded")
                num_failed = 0
            except (EngineBusyError, EngineRequestError):
                num_failed = 0  # an answer too
            except EngineError as error:
                num_failed += 1
                log.warning("the engine did not answer a probe: %s", error)
                if num_failed >= _NUM_FAILED and is_up():
                    num_failed = 0
                    failed(f"probe: the engine does not answer: {error}")

    async def _ask(self) -> None:
        """One probe, in the first way that is not refused. Raises `EngineError`."""
        for operation in list(self._operations):
            try:
                await self._ask_as(operation)
                self._operations = [operation]
                self._count("passed")
                return
            except EngineRequestError:
                if operation == self._operations[-1]:
                    self._count("refused")
                    raise
            except EngineBusyError:
                self._count("busy")
                raise
            except EngineError:
                self._count("failed")
                raise

    async def _ask_as(self, operation: Operation) -> None:
        request_id = f"{PROBE_PREFIX}{uuid.uuid4().hex[:12]}"  # workers may share an engine
        request = InferenceRequest(op=operation, body=_BODIES[operation], max_tokens=1, stream=True)
        try:
            async with asyncio.timeout(self._timeout_s):
                chunks = self._engine.generate(request, max_tokens=1, request_id=request_id, priority=_LAST_PRIORITY)
                async with contextlib.aclosing(chunks):
                    async for _ in chunks:
                        pass
        except TimeoutError:
            raise EngineError(f"no answer within {self._timeout_s:g} s") from None

    def _count(self, outcome: str) -> None:
        metrics.PROBES.add(metrics.model_label(self._model), outcome)
