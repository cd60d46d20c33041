"""Where a worker's capacity comes from: the engine's word, the user's, or free memory, which is kept measured."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.discipline.capacity import MeasuredCapacity
from headrace.errors import EngineError, EngineStartError
from headrace.hardware.gpu import find_gpu
from headrace.lifecycle import wait_first
from headrace.schemas.workers import CapacitySource
from headrace.worker.engines.base import Engine, KvMemory
from headrace.worker.execution import Execution
from headrace.worker.held import Held, HeldSet
from headrace.worker.ledger import Ledger
from headrace.worker.memory import EngineProbe, HostMemory, HostProbe, Memory, MemoryProbe, shared_by
from headrace.worker.sharing import SharedMemory, Sight

__all__ = ["DEFAULT_RESERVE", "KvCapacity", "Looked", "make_probe"]

log = logging.getLogger(__name__)

DEFAULT_RESERVE: Final = 0.1
"""Share of all memory that is left free where no reserve is told: an engine needs more than keys and values."""
_EVERY_S: Final = 0.5
_SETTLE_S: Final = 0.1
"""How long after a request's end the memory is read again: its engine gives it back by then."""
_TIMEOUT_S: Final = 2.0
_MAX_MEASURES: Final = 4


class KvCapacity:
    """Gives the ledger its capacity. What was told goes before what the engine says; both go before free memory, which
    says nothing of an engine that took its own at its start. What an engine said holds until it has started again.

    `source` is None where nobody tells; then only slots bound what runs. While free memory cannot be read, nobody
    starts. Where workers on one device keep their tables in the same `shared_folder`, none is given what another has
    promised; None: there is no other.
    """

    def __init__(
        self,
        ledger: Ledger,
        held: HeldSet,
        *,
        told_tokens: int | None,
        name: str = "worker",
        shared_folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._held = held
        self._told_tokens = told_tokens
        self._name = name
        self._shared_folder = shared_folder
        self._clock = clock
        self._num_others = 0
        self._shared: SharedMemory | None = None
        self._host = HostMemory()
        self._probe: MemoryProbe | None = None
        self._memory: Memory | None = None
        self._is_readable = True
        self._was_refused = False
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
        self.close()
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

    def close(self) -> None:
        """Give others what was promised here. Safe to call twice."""
        shared, self._shared = self._shared, None
        self._ledger.claim = lambda need_tokens: True
        if shared is not None:
            shared.close()

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
            was_refused, self._was_refused = self._was_refused, False
            await self._measure(self._probe, measured)
            if unseen_tokens or was_refused or measured.tokens != tokens:
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
        self._block_size, self._probe = block_size, probe
        if self._shared_folder is not None and kv.device != "engine":
            self._shared = SharedMemory(
                shared_by(self._shared_folder, memory), name=self._name, is_kept=kv.is_kept, clock=self._clock
            )
            self._shared.open()
        self._ledger.measured, self._ledger.claim, self._ledger.on_release = measured, self._claim, self._released.set
        try:
            await self._measure(probe, measured)
            self._require_fit(measured)
        except BaseException:
            self.close()
            raise
        log.info(
            "free memory (%s) carries %d KV tokens of %d bytes, %d bytes left free",
            memory.source, measured.tokens, measured.bytes_per_token, measured.reserve_bytes,
        )  # fmt: skip

    def _require_fit(self, measured: MeasuredCapacity) -> None:
        """Raises EngineStartError where not one block fits, even if all that others' requests hold were free."""
        memory, seen = self._memory, self._shared.look() if self._shared is not None else None
        if memory is None or not self._is_readable:
            raise EngineStartError("the free memory of its device cannot be read")
        block_bytes = measured.bytes_per_token * self._block_size
        others_bytes = seen.allocated_bytes if seen is not None else 0
        if memory.free_bytes + others_bytes - measured.reserve_bytes < block_bytes:
            raise EngineStartError(
                f"the model does not fit: {memory.gpu or memory.source} has {memory.free_bytes} of "
                f"{memory.total_bytes} bytes free, {measured.reserve_bytes} are to be left free, and "
                f"{self._block_size} tokens take {block_bytes}"
            )

    def _warn_if_less(self, measured: MeasuredCapacity) -> None:
        if measured.tokens < measured.peak_tokens // 2 and not self._has_warned and not self._num_others:
            self._has_warned = True
            log.warning(
                "nothing runs, but free memory carries %d KV tokens where it carried %d: others have it, or the engine "
                "keeps what requests allocated (then tell: keeps_memory)",
                measured.tokens, measured.peak_tokens,
            )  # fmt: skip

    async def _measure(self, probe: MemoryProbe, measured: MeasuredCapacity) -> None:
        """Once more for each time that others promised something meanwhile, so that all is of one moment."""
        for _ in range(_MAX_MEASURES):
            try:
                looked = self.look(measured)
                memory = await _read(probe)
                self._is_readable = True
            except EngineError as error:
                self._note_unreadable(measured, error)
                return
            if self.note(measured, looked, memory):
                return

    def look(self, measured: MeasuredCapacity) -> "Looked":
        """What runs, looked at before memory is: what it allocates meanwhile is counted as free by neither."""
        seen = self._shared.look() if self._shared is not None else None
        self._num_others = seen.num_others if seen is not None else 0
        allocated: dict[Held, int] = {}
        pending_tokens = 0
        for held in self._held:
            if held.execution is not None and (need_tokens := self._ledger.need_of(held)) is not None:
                most = min(need_tokens, self._allocated_tokens(held.execution))
                allocated[held] = most if held.execution.has_read_prompt else 0
                pending_tokens += most - allocated[held]
        return Looked(
            seen=seen, allocated=allocated, pending_tokens=pending_tokens, unseen_tokens=measured.unseen_tokens
        )

    def note(self, measured: MeasuredCapacity, looked: "Looked", memory: Memory) -> bool:
        """Take in memory as read after `looked`; False where others changed their part of it since."""
        self._memory = memory
        allocated_tokens = sum(tokens for held, tokens in looked.allocated.items() if held in self._ledger)
        free_bytes = memory.free_bytes - (looked.seen.outstanding_bytes if looked.seen is not None else 0)
        measured.note(
            free_bytes,
            num_running=self._ledger.num_running,
            allocated_tokens=allocated_tokens,
            pending_tokens=looked.pending_tokens,
            unseen_tokens=measured.unseen_tokens - looked.unseen_tokens,
            now_s=self._clock(),
        )
        if self._shared is None or looked.seen is None:
            return True
        return self._shared.publish(
            looked.seen,
            free_bytes=memory.free_bytes,
            promised_bytes=self._ledger.reserved_tokens * measured.bytes_per_token,
            allocated_bytes=allocated_tokens * measured.bytes_per_token,
        )

    def _note_unreadable(self, measured: MeasuredCapacity, error: EngineError) -> None:
        if self._is_readable:
            log.error("%s; nothing more starts until it can", error)
        self._is_readable = False
        measured.note(
            0,
            num_running=self._ledger.num_running,
            allocated_tokens=0,
            unseen_tokens=measured.unseen_tokens,
            now_s=self._clock(),
        )

    def _claim(self, need_tokens: int) -> bool:
        measured = self._ledger.measured
        if self._shared is None or measured is None:
            return True
        try:
            is_ours = self._shared.claim(
                need_tokens * measured.bytes_per_token,
                reserved_bytes=(self._ledger.reserved_tokens + need_tokens) * measured.bytes_per_token,
                reserve_bytes=measured.reserve_bytes,
            )
        except EngineError as error:
            log.warning("nothing starts now: %s", error)
            is_ours = False
        if not is_ours:
            self._was_refused = True
            self._released.set()
        return is_ours

    def _allocated_tokens(self, execution: Execution) -> int:
        """Its KV tokens by what came from the engine, which may be further. Of the last token there are none yet.

        Where an answer has many choices, this is the least that their blocks can be.
        """
        num_choices = execution.claimed.request.n
        num_tokens = num_choices * execution.claimed.num_prompt_tokens + max(0, execution.num_tokens - num_choices)
        return -(-num_tokens // self._block_size) * self._block_size


class Looked(msgspec.Struct, frozen=True, kw_only=True):
    """What our requests had, and others, just before memory is read."""

    seen: Sight | None
    allocated: dict[Held, int]
    pending_tokens: int
    unseen_tokens: int


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
