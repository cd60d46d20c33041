"""The memory of a simulated engine: a KV cache reserved at its start, or bytes taken as requests go."""

from headrace.errors import EngineError
from headrace.worker.engines.base import KvMemory
from headrace.worker.engines.sim_script import SimOptions

__all__ = ["SimMemory"]


class SimMemory:
    """KV tokens that requests hold. With the option `pool_bytes` they are bytes of a pool that others take from too.

    `others_bytes` is what those have; `held_tokens` and `peak_tokens` what requests hold, and held at most.
    """

    def __init__(self, options: SimOptions) -> None:
        self._options = options
        self._kept_tokens = 0
        self.others_bytes = 0
        self.held_tokens = 0
        self.peak_tokens = 0

    @property
    def is_allocated_as_it_goes(self) -> bool:
        """Whether it was not reserved at the start."""
        return self._options.pool_bytes is not None

    @property
    def capacity_tokens(self) -> int | None:
        """KV tokens reserved at the start, in whole blocks; None where none were."""
        options = self._options
        return None if self.is_allocated_as_it_goes else options.kv_tokens // options.block_size * options.block_size

    @property
    def kv_memory(self) -> KvMemory | None:
        """How it is allocated, if as it goes."""
        options = self._options
        if options.kv_bytes_per_token is None:
            return None
        return KvMemory(
            bytes_per_token=options.kv_bytes_per_token,
            reserve_bytes=options.memory_reserve_bytes,
            device="engine",
            is_kept=options.keeps_memory,
        )

    @property
    def usage_ratio(self) -> float | None:
        """How full the reserved KV cache is; None where none was reserved."""
        return None if self.is_allocated_as_it_goes else min(1.0, self.held_tokens / self._options.kv_tokens)

    @property
    def free_bytes(self) -> int | None:
        """What is left of the pool; None without one."""
        options = self._options
        if options.pool_bytes is None or options.kv_bytes_per_token is None:
            return None
        taken_tokens = max(self.held_tokens, self._kept_tokens)
        return max(0, options.pool_bytes - self.others_bytes - taken_tokens * options.kv_bytes_per_token)

    def has_room(self, num_tokens: int) -> bool:
        """Whether a prompt of so many tokens is taken in; an engine that allocates as it goes finds out too late."""
        return self.is_allocated_as_it_goes or self.held_tokens + num_tokens <= self._options.kv_tokens

    def hold(self, num_tokens: int) -> None:
        """Hold so many more, or less. Raises `EngineError` where a reserved cache has no more; held all the same.

        `MemoryError` where the pool has no more: the engine is lost.
        """
        options = self._options
        self.held_tokens += num_tokens
        self.peak_tokens = max(self.peak_tokens, self.held_tokens)
        if num_tokens <= 0:
            return
        if options.pool_bytes is None or options.kv_bytes_per_token is None:
            if self.held_tokens > options.kv_tokens:
                raise EngineError(f"out of KV cache: {self.held_tokens} tokens held of {options.kv_tokens}")
            return
        wanted_bytes = max(self.held_tokens, self._kept_tokens) * options.kv_bytes_per_token
        if wanted_bytes > options.pool_bytes - self.others_bytes:
            raise MemoryError(f"out of memory: {wanted_bytes} bytes of KV cache in a pool of {options.pool_bytes}")
        if options.keeps_memory:
            self._kept_tokens = max(self._kept_tokens, self.held_tokens)

    def clear(self) -> None:
        """The process is gone, and with it what it kept."""
        self._kept_tokens = 0
