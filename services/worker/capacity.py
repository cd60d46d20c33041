"""Where a worker's capacity comes from: the engine's word, the user's, or free memory, which is kept measured."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from headrace.discipline.capacity import MeasuredCapacity
from headrace.errors import EngineError
from headrace.lifecycle import wait_first
from headrace.schemas.workers import CapacitySource
from headrace.worker.engines.base import Engine, KvMemory
from headrace.worker.execution import Execution
from headrace.worker.gpu import find_gpu
from headrace.worker.held import Held, HeldSet
from headrace.worker.ledger import Ledger
from headrace.worker.memory import EngineProbe, HostMemory, HostProbe, Memory, MemoryProbe

__all__ = ["DEFAULT_RESERVE", "KvCapacity", "make_probe"]

log = logging.getLogger(__name__)

DEFAULT_RESERVE: Final = 0.1
"""Share of all memory that is left free where no reserve is told: an engine needs more than keys and values."""
_EVERY_S: Final = 0.5
_SETTLE_S: Final = 0.1
"""How long after a request's end the memory is read again: its engine gives it back by then."""
_TIMEOUT_S: Final = 2.0


class KvCapacity:
    """Gives the ledger its capacity. What was told goes before what the engine says; both go before free memory, which
    says nothing of an engine that took its own at its start. What an engine said holds until it has started again.

    `source` is None where nobody tells; then only slots bound what runs. While free memory cannot be read, nobody
    starts.
    """

    def __init__(self, ledger: Ledger, held: HeldSet, *, told_tokens: int | None) -> None:
        self._ledger = ledger
        self._held = held
        self._told_tokens = told_tokens
        self._host = HostMemory()
        self._probe: MemoryProbe | None = None
        self._memory: Memory | None = None
        self._is_readable = True
        self._has_warned = False
        self._block_size = 1
        self._released = asyncio.Event()
        self.source: CapacitySource | None = "told" if told_tokens is not None else None

    def as_beat(self) -> dict[str, Any]:
        """Its fields of the heartbeat. The memory is what the capacity is measured in, else the machine's."""
        memory = self._host.recent() if self._probe is None else self._memory
        measured = self._ledger.measured
        return {
            "kv_capacity_tokens": self._ledger.capacity_tokens or 0,
            "kv_capacity_source": self.source,
            "kv_capacity_peak_tokens": measured.peak_tokens if measured is not None else None,
            "gpu": memory.gpu if memory is not None else None,
            "memory_total_bytes": memory.total_bytes if memory is not None else None,
            "memory_free_bytes": memory.free_bytes if memory is not None else None,
            "memory_reserved_bytes": measured.reserve_bytes if measured is not None else None,
            "memory_source": memory.source if memory is not None else None,
        }

    async def adopt(self, engine: Engine) -> None:
        """Take over what a started engine says, and measure. Raises `EngineError` where that cannot be done."""
        facts = engine.facts
        known_tokens = self._told_tokens or facts.kv_capacity_tokens
        if known_tokens is None and facts.kv_memory is not None:
            await self._begin(engine, facts.kv_memory, block_size=facts.block_size)
            self.source = "memory"
            return
        if facts.kv_memory is not None:
            log.warning("the capacity is known (%d KV tokens), so free memory is not looked at", known_tokens)
        self._probe = self._ledger.measured = None
        self._ledger.capacity_tokens = known_tokens
        is_told = self._told_tokens is not None or facts.is_capacity_told
        self.source = None if known_tokens is None else "told" if is_told else "engine"

    async def follow(self, *, is_up: Callable[[], bool], changed: Callable[[], None]) -> None:
        """Measure twice a second, and soon after a request ended, until cancelled."""
        while True:
            if await wait_first(self._released, timeout_s=_EVERY_S):
                await asyncio.sleep(_SETTLE_S)
                self._released.clear()
            measured = self._ledger.measured
            if measured is None or self._probe is None or not is_up():
                continue
            tokens, unseen_tokens = measured.tokens, measured.unseen_tokens
            await self._measure(self._probe, measured)
            if unseen_tokens or measured.tokens != tokens:
                changed()
            elif not self._ledger.num_running:
                self._warn_if_less(measured)

    async def _begin(self, engine: Engine, kv: KvMemory, *, block_size: int) -> None:
        probe = await asyncio.to_thread(make_probe, kv.device, engine)
        memory = await _read(probe)
        told_bytes = kv.reserve_bytes
        reserve_bytes = told_bytes if told_bytes is not None else int(memory.total_bytes * DEFAULT_RESERVE)
        measured = MeasuredCapacity(
            bytes_per_token=kv.bytes_per_token,
            reserve_bytes=reserve_bytes,
            block_size=block_size,
            is_kept=kv.is_kept,
        )
        measured.note(
            memory.free_bytes, num_running=self._ledger.num_running, allocated_tokens=0, now_s=time.monotonic()
        )
        self._block_size, self._memory = block_size, memory
        self._probe, self._ledger.measured, self._ledger.on_release = probe, measured, self._released.set
        log.info(
            "free memory (%s) carries %d KV tokens of %d bytes, %d bytes left free",
            memory.source, measured.tokens, measured.bytes_per_token, measured.reserve_bytes,
        )  # fmt: skip

    def _warn_if_less(self, measured: MeasuredCapacity) -> None:
        if measured.tokens < measured.peak_tokens // 2 and not self._has_warned:
            self._has_warned = True
            log.warning(
                "nothing runs, but free memory carries %d KV tokens where it carried %d: others have it, or the engine "
                "keeps what requests allocated (then tell: keeps_memory)",
                measured.tokens, measured.peak_tokens,
            )  # fmt: skip

    async def _measure(self, probe: MemoryProbe, measured: MeasuredCapacity) -> None:
        """What runs is looked at before memory is: what it allocates meanwhile is counted as free by neither."""
        unseen_tokens = measured.unseen_tokens
        allocated: dict[Held, int] = {}
        pending_tokens = 0
        for held in self._held:
            if held.execution is not None and (need_tokens := self._ledger.need_of(held)) is not None:
                most = min(need_tokens, self._allocated_tokens(held.execution))
                allocated[held] = most if held.execution.has_read_prompt else 0
                pending_tokens += most - allocated[held]
        try:
            self._memory = await _read(probe)
            free_bytes = self._memory.free_bytes
            self._is_readable = True
        except EngineError as error:
            free_bytes = 0
            if self._is_readable:
                log.error("%s; nothing more starts until it can", error)
            self._is_readable = False
        measured.note(
            free_bytes,
            num_running=self._ledger.num_running,
            allocated_tokens=sum(tokens for held, tokens in allocated.items() if held in self._ledger),
            pending_tokens=pending_tokens if self._is_readable else 0,
            unseen_tokens=measured.unseen_tokens - unseen_tokens,
            now_s=time.monotonic(),
        )

    def _allocated_tokens(self, execution: Execution) -> int:
        """Its KV tokens by what came from the engine, which may be further. Of the last token there are none yet.

        Where an answer has many choices, this is the least that their blocks can be.
        """
        num_choices = execution.claimed.request.n
        num_tokens = num_choices * execution.claimed.num_prompt_tokens + max(0, execution.num_tokens - num_choices)
        return -(-num_tokens // self._block_size) * self._block_size


def make_probe(device: str, engine: Engine) -> MemoryProbe:
    """What tells the free memory of `device`, as `KvMemory` names it."""
    if device == "engine":
        return EngineProbe(engine)
    return HostProbe() if device == "host" else find_gpu(device)


async def _read(probe: MemoryProbe) -> Memory:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await probe.read()
    except TimeoutError:
        raise EngineError(f"free memory was not told within {_TIMEOUT_S:g} s") from None
