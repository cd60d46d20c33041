"""What the engines have in common that run a server of their own: a child, and the adapter attached to it."""

import asyncio
from collections.abc import AsyncGenerator

from headrace.errors import EngineError
from headrace.schemas.chunks import EngineChunk
from headrace.schemas.openai import InferenceRequest
from headrace.worker.engines.base import EngineFacts, EngineUsage, MemoryUse, Resume
from headrace.worker.engines.child import ServerChild
from headrace.worker.engines.openai import OpenAIEngine
from headrace.worker.footprint import memory_of

__all__ = ["ServedEngine"]


class ServedEngine:
    """An engine whose server lives and dies with this process; its death is `wait_died`.

    A subclass starts both in `_launch`, and sets `_child` as soon as there is one, so that a start that fails or is
    cancelled leaves nothing behind.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._child: ServerChild | None = None
        self._attached: OpenAIEngine | None = None
        self._facts = EngineFacts(name=name)

    @property
    def facts(self) -> EngineFacts:
        """Capacity and limits; valid once started."""
        return self._facts

    @property
    def pid(self) -> int | None:
        """Process id of the child; None while there is none."""
        return self._child.pid if self._child is not None else None

    async def start(self) -> None:
        """Start the child and wait until it answers."""
        await self.stop()
        try:
            self._facts = await self._launch()
        except BaseException:
            await self.stop()
            raise

    async def count_prompt_tokens(self, request: InferenceRequest) -> int:
        """By the model's own template and tokenizer."""
        return await self._running.count_prompt_tokens(request)

    def generate(
        self,
        request: InferenceRequest,
        *,
        max_tokens: int,
        request_id: str,
        resume: Resume | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[EngineChunk, None]:
        """See `Engine.generate`."""
        return self._running.generate(
            request, max_tokens=max_tokens, request_id=request_id, resume=resume, priority=priority
        )

    async def usage(self) -> EngineUsage:
        """From the server's metrics."""
        return await self._running.usage()

    async def memory_use(self) -> tuple[MemoryUse, ...]:
        """Of the child and all below it, on the machine and on its GPUs."""
        pid = self.pid
        return await asyncio.to_thread(memory_of, pid) if pid is not None else ()

    async def check_health(self) -> None:
        """By the child's being there, and by what the server says."""
        running = self._running
        if self._child is not None:
            self._child.check_alive()
        await running.check_health()

    async def wait_died(self) -> str:
        """The child's exit code and last lines, once it has ended."""
        if self._child is None:
            return f"the server of engine {self._name} was not started"
        return await self._child.wait_died()

    async def stop(self) -> None:
        """End the child, generating or not."""
        attached, self._attached = self._attached, None
        child, self._child = self._child, None
        try:
            if attached is not None:
                await attached.stop()
        finally:
            if child is not None:
                await child.stop()

    @property
    def _running(self) -> OpenAIEngine:
        if self._attached is None:
            raise EngineError(f"the {self._name} engine is not started")
        return self._attached

    async def _launch(self) -> EngineFacts:
        """Start the child, attach to it, and return its facts. Raises `EngineStartError`."""
        raise NotImplementedError
