"""An engine with deterministic tokens, each a point where others may go first, and with scripted faults."""

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from headrace.errors import EngineBusyError, EngineError
from headrace.schemas.chunks import ChoiceDelta, EngineChunk, Usage
from headrace.schemas.openai import InferenceRequest
from headrace.worker.engines.base import PROBE_PREFIX, EngineFacts, EngineUsage, MemoryUse, Resume

if TYPE_CHECKING:
    from tests.simulation.world import Part, World

__all__ = ["StubEngine", "token"]


def token(job: str, number: int) -> str:
    """The text of one token of a job's answer; it names both, so that mixing and repeating show."""
    return f"{job}:{number} "


class StubEngine:
    """Deterministic tokens, each a point where others may go first, and faults as scripted."""

    def __init__(self, world: "World", part: "Part") -> None:
        self._world, self._part = world, part
        self.part = part
        self._died = asyncio.Event()
        self._hung = asyncio.Event()
        self._hung.set()
        self.running: dict[tuple[str, int], int] = {}
        self.made: dict[tuple[str, int], int] = {}
        self.failing = 0
        self.busy = 0
        self.is_dead = False

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts(name="stub", max_num_seqs=self._world.scenario.max_concurrency, max_model_len=10_000)

    async def start(self) -> None:
        await asyncio.sleep(self._world.uniform(0.001, 0.3))
        self.is_dead = False
        self._died.clear()
        self._hung.set()

    async def count_prompt_tokens(self, request: InferenceRequest) -> int:
        await asyncio.sleep(0)
        prompt = request.body["prompt"]
        return len(prompt) if isinstance(prompt, list) else 3

    async def usage(self) -> EngineUsage:
        return EngineUsage(num_running=len(self.running))

    async def memory_use(self) -> tuple[MemoryUse, ...]:
        return ()

    async def check_health(self) -> None:
        await asyncio.sleep(0)
        if self.is_dead:
            raise EngineError("dead")

    async def wait_died(self) -> str:
        await self._died.wait()
        return "the engine died"

    async def stop(self) -> None:
        await asyncio.sleep(0)

    def die(self) -> None:
        self.is_dead = True
        self._died.set()

    def hang(self) -> None:
        self._hung.clear()

    def go_on(self) -> None:
        self._hung.set()

    async def generate(
        self,
        request: InferenceRequest,
        *,
        max_tokens: int,
        request_id: str,
        resume: Resume | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[EngineChunk, None]:
        world = self._world
        if request_id.startswith(PROBE_PREFIX):
            yield await self._probed()
            return
        job, _, attempt = request_id.rpartition("-")
        key = (job, int(attempt))
        first = resume.num_tokens if resume is not None else 0
        if resume is not None and resume.text != "".join(token(job, each) for each in range(first)):
            world.check.fail(f"RESUME: {job} goes on after {resume.text!r}")
        if self.busy and world.is_faulty:
            self.busy -= 1
            raise EngineBusyError("no room")
        world.check.engine_began(job, int(attempt), self._part)
        self.running[key] = self.running.get(key, 0) + 1
        self.made[key] = 0
        world.check.company_kept(self)
        if sum(self.running.values()) > world.scenario.max_concurrency:
            world.check.fail(f"OVERCOMMIT: {self._part.name} computes {self.running} at once")
        used = sum(number * world.scenario.need_tokens(each) for (each, _), number in self.running.items())
        if self._part.kv_tokens is not None and used > self._part.kv_tokens:
            world.check.fail(f"OVERCOMMIT: {self._part.name} has {self._part.kv_tokens} tokens, {used} are needed")
        try:
            for number in range(first, first + max_tokens):
                await asyncio.sleep(min(world.expovariate(world.scenario.token_s), 3.0))
                await self._hung.wait()
                if job == f"j{world.scenario.poison}":
                    world.engine_dies(self)
                if self.is_dead:
                    raise EngineError("the engine died")
                if self.failing and world.is_faulty:
                    self.failing -= 1
                    world.check.engine_faults.add((self._part.name, job))
                    raise EngineError("scripted")
                self.made[key] += 1
                yield EngineChunk(choices=(ChoiceDelta(text=token(job, number), num_tokens=1),))
            usage = Usage(prompt_tokens=3, completion_tokens=max_tokens, total_tokens=3 + max_tokens)
            yield EngineChunk(choices=(ChoiceDelta(finish_reason="length"),), usage=usage)
        finally:
            self.running[key] -= 1

    async def _probed(self) -> EngineChunk:
        await asyncio.sleep(0)
        await self._hung.wait()
        if self.is_dead:
            raise EngineError("the engine died")
        usage = Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2)
        return EngineChunk(choices=(ChoiceDelta(text="a", num_tokens=1, finish_reason="length"),), usage=usage)
