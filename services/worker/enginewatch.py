"""When an engine counts as failed: it ended, it hangs, or its health check failed some times in a row."""

import asyncio
from typing import Final, Literal

from headrace.errors import EngineError
from headrace.worker.engines.base import Engine

__all__ = ["EngineFailure", "until_engine_fails", "why_unhealthy"]

_HEALTH_EVERY_S: Final = 1.0
_HEALTH_TIMEOUT_S: Final = 2.0
_NUM_UNHEALTHY: Final = 3

EngineFailure = Literal["engine_died", "stalled"]


async def until_engine_fails(engine: Engine, hangs: asyncio.Event, *, stall_s: float) -> tuple[EngineFailure, str]:
    """Return with what happened and why; `hangs` is set by whoever sees that no request makes progress."""
    num_bad = 0
    async with asyncio.TaskGroup() as group:
        dying = group.create_task(engine.wait_died(), name="engine death")
        hanging = group.create_task(hangs.wait(), name="engine hang")
        try:
            while True:
                done, _ = await asyncio.wait(
                    [dying, hanging], timeout=_HEALTH_EVERY_S, return_when=asyncio.FIRST_COMPLETED
                )
                if dying in done:
                    return "engine_died", dying.result()
                if hanging in done:
                    return "stalled", f"no request made progress for {stall_s:g} s"
                num_bad = num_bad + 1 if (why := await why_unhealthy(engine)) else 0
                if num_bad >= _NUM_UNHEALTHY:
                    return "engine_died", why
        finally:
            dying.cancel()
            hanging.cancel()


async def why_unhealthy(engine: Engine) -> str:
    """Why the engine does not pass its health check; empty if it does."""
    try:
        async with asyncio.timeout(_HEALTH_TIMEOUT_S):
            await engine.check_health()
    except TimeoutError:
        return f"its health check did not answer within {_HEALTH_TIMEOUT_S:g} s"
    except EngineError as error:
        return str(error) or "its health check failed"
    return ""
