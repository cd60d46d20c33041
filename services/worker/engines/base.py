"""The seam between a worker and whatever computes tokens."""

from collections.abc import AsyncGenerator
from typing import Final, Protocol

import msgspec

from headrace.schemas.chunks import EngineChunk
from headrace.schemas.openai import InferenceRequest

PROBE_PREFIX: Final = "headrace:probe-"
"""How request ids of probes begin. No job's does, as no job's id has a colon."""


class KvMemory(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine that allocates as it goes takes memory for its KV cache.

    `device` is where it allocates: `host`, a GPU (`gpu.find_gpu`), or `engine` where only its own usage tells.
    `reserve_bytes` are left free; None: a tenth of all. `is_kept`: what requests allocated stays the engine's when they
    end, for others.
    """

    bytes_per_token: int
    device: str
    reserve_bytes: int | None = None
    is_kept: bool = False


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a started engine can hold. Token counts are KV-cache tokens; None where the engine does not tell.

    `is_capacity_told`: the capacity is the word of whoever started the worker. `kv_memory` is None for an engine that
    reserved its memory at its start, and where nobody tells.
    """

    name: str
    version: str = ""
    kv_capacity_tokens: int | None = None
    is_capacity_told: bool = False
    kv_memory: KvMemory | None = None
    block_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    port: int | None = None


class EngineUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's own live figures; they only correct the worker's ledger, they never admit.

    The memory figures are of one that allocates as it goes and knows what it could still have. `num_preemptions` is
    what the engine counted since its start: requests whose memory was taken for others. `silent_s` is for how long it
    has not computed a step though it has work, as far as that can be seen from its figures.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int | None = None
    silent_s: float = 0.0
    kv_usage_ratio: float | None = None
    memory_free_bytes: int | None = None
    memory_total_bytes: int | None = None


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine's own processes have of one kind of memory (`memory`, `GPU memory`), and how much of all of that
    kind is free, as a share; None where that is not known.
    """

    kind: str
    used_bytes: int
    free_ratio: float | None = None


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """What earlier attempts already sent of choice 0; the engine goes on after it.

    `has_reasoning`: part of it was no text of the answer, so `token_ids` say more than `text`.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    has_reasoning: bool = False


class Engine(Protocol):
    """An inference engine: started, any number of requests, stopped; it may then be started again.

    `generate` yields chunks in order and ends only after every choice had a finish_reason other than `abort`;
    the last chunk, and no other, has `usage`. Closing the generator (`aclose`, or cancelling the task that drains
    it) aborts the request in the engine. It raises `EngineRequestError` when the request itself is refused,
    `EngineBusyError` when there is no room now, and `EngineError` for everything that is the engine's fault, a
    stream cut short included. No text of a piece holds part of a stop string or of a character, and the token ids
    of what was yielded stand for exactly the text of what was yielded.
    """

    @property
    def facts(self) -> EngineFacts:
        """Capacity and limits; valid once started."""
        ...

    async def start(self) -> None:
        """Return once it can really answer. Raises `EngineStartError`."""
        ...

    async def count_prompt_tokens(self, request: InferenceRequest) -> int:
        """Exact number of prompt tokens, chat template included, by the engine's own tokenizer where it has one."""
        ...

    def generate(
        self,
        request: InferenceRequest,
        *,
        max_tokens: int,
        request_id: str,
        resume: Resume | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[EngineChunk, None]:
        """Run one request; `max_tokens` new tokens at most (what is left of it, on resume).

        A chunk with nothing in it is a sign of life, such as progress in reading a long prompt. A stop string is never
        in the text, not even in part. A resumed answer goes on after `resume.text` and repeats neither it nor the
        role; its usage is this attempt's alone. `EngineRequestError` with `not_resumable` where it cannot go on.

        Where the engine has requests wait, those of the lowest `priority` come first, and are preempted last; one that
        knows no priorities takes no notice.
        """
        ...

    async def usage(self) -> EngineUsage:
        """Live figures. Raises `EngineError` when they cannot be read."""
        ...

    async def memory_use(self) -> tuple[MemoryUse, ...]:
        """What its processes have now, nothing where that is not known. Raises `EngineError` if it cannot be read."""
        ...

    async def check_health(self) -> None:
        """Return if it can serve. Raises `EngineError` with the reason if not."""
        ...

    async def wait_died(self) -> str:
        """Return with the reason once the engine is gone for good; never returns while it lives."""
        ...

    async def stop(self) -> None:
        """Abort what runs and leave no process behind. Safe to call twice, and before `start`."""
        ...
