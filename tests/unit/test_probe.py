"""A worker's requests to its own engine: what passes, what fails, and that they keep nobody waiting."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from headrace.errors import EngineBusyError, EngineError, EngineRequestError, EngineStartError
from headrace.schemas.chunks import EngineChunk
from headrace.schemas.openai import InferenceRequest
from headrace.schemas.refusals import Refusal
from headrace.worker.engines.base import PROBE_PREFIX
from headrace.worker.engines.sim import SimEngine
from headrace.worker.engines.sim_script import SimOptions
from headrace.worker.held import Held, HeldSet
from headrace.worker.probe import Prober


class Engine(SimEngine):
    """Answers as `says`: an exception, an event to wait for, or None for a token."""

    def __init__(self, *says: Any) -> None:
        super().__init__("m", SimOptions())
        self.says = list(says)
        self.asked: list[tuple[str, int]] = []
        self.ids: set[str] = set()
        self.num_given_up = 0

    async def generate(
        self, request: InferenceRequest, *, max_tokens: int, request_id: str, resume: Any = None, priority: int = 0
    ) -> AsyncGenerator[EngineChunk, None]:
        self.asked.append((request.op, max_tokens))
        self.ids.add(request_id)
        said = self.says.pop(0) if self.says else None
        if isinstance(said, Exception):
            raise said
        try:
            if isinstance(said, asyncio.Event):
                await said.wait()
            yield EngineChunk()
        except (asyncio.CancelledError, GeneratorExit):
            self.num_given_up += 1
            raise


def refused() -> EngineRequestError:
    return EngineRequestError(Refusal(code="invalid_value", message="no such thing"))


def held_set() -> HeldSet:
    return HeldSet(lambda: 0)


def prober(engine: Engine, held: HeldSet | None = None, *, timeout_s: float = 5.0) -> Prober:
    return Prober(engine, model="m", held=held if held is not None else held_set(), timeout_s=timeout_s)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_one_token_is_asked_for_under_an_id_that_no_job_has() -> None:
    engine = Engine()
    await prober(engine).until_passed()
    assert engine.asked == [("completions", 1)]
    assert all(each.startswith(PROBE_PREFIX) for each in engine.ids)


async def test_a_model_that_knows_no_completions_is_asked_otherwise_and_from_then_on() -> None:
    engine = Engine(refused(), refused())
    asks = prober(engine)
    await asks.until_passed()
    await asks.until_passed()
    assert [operation for operation, _ in engine.asked] == ["completions", "chat", "embeddings", "embeddings"]


async def test_one_that_refuses_everything_does_not_start() -> None:
    with pytest.raises(EngineStartError, match="refuses a request for one token: no such thing"):
        await prober(Engine(refused(), refused(), refused())).until_passed()


async def test_one_failure_may_be_chance_and_two_are_not() -> None:
    await prober(Engine(EngineError("once"))).until_passed()
    with pytest.raises(EngineStartError, match="not one token comes from it: HTTP 401"):
        await prober(Engine(EngineError("HTTP 401"), EngineError("HTTP 401"))).until_passed()


async def test_one_that_is_full_is_asked_again_and_counts_as_up_in_the_end() -> None:
    engine = Engine(EngineBusyError("full"))
    await prober(engine).until_passed()
    assert len(engine.asked) == 2
    await prober(Engine(*[EngineBusyError("full")] * 9), timeout_s=0.6).until_passed()


async def test_one_that_says_nothing_fails_in_time() -> None:
    never = asyncio.Event()
    engine = Engine(never, never)
    with pytest.raises(EngineStartError, match=r"no answer within 0\.1 s"):
        await prober(engine, timeout_s=0.1).until_passed()
    assert engine.num_given_up == 2


async def test_an_idle_one_is_probed_and_two_failures_in_a_row_are_told() -> None:
    engine = Engine(EngineError("no"), None, refused(), EngineBusyError("full"), EngineError("no"), EngineError("no"))
    told: list[str] = []
    following = asyncio.create_task(prober(engine).follow(0.01, is_up=lambda: True, failed=told.append))
    await until(lambda: bool(told))
    following.cancel()
    assert told == ["probe: the engine does not answer: no"]
    assert not engine.says


async def test_nobody_waits_for_a_probe() -> None:
    engine, held = Engine(asyncio.Event(), asyncio.Event()), held_set()
    told: list[str] = []
    following = asyncio.create_task(prober(engine, held).follow(0.01, is_up=lambda: True, failed=told.append))
    request = Held(_Delivery(), _Job())  # type: ignore[arg-type]
    for number in (1, 2):
        await until(lambda: len(engine.asked) == number)  # noqa: B023  # waited for at once
        held.add(request)
        await until(lambda: engine.num_given_up == number)  # noqa: B023  # waited for at once
        await asyncio.sleep(0.05)
        assert len(engine.asked) == number  # none while it is held
        held.remove(request)
    following.cancel()
    assert told == []


async def test_one_that_is_down_is_not_probed() -> None:
    engine = Engine()
    following = asyncio.create_task(prober(engine).follow(0.01, is_up=lambda: False, failed=lambda _: None))
    await asyncio.sleep(0.1)
    following.cancel()
    assert engine.asked == []


class _Delivery:
    sequence = 1


class _Job:
    tenant = "t"
    job = "j"
    need_tokens = 1
