"""KV tokens that memory carries, measured, for an engine that allocates as it goes."""

from collections import deque
from typing import Final

__all__ = ["RISE_S", "MeasuredCapacity", "bytes_per_token", "capacity_tokens"]

RISE_S: Final = 2.0
"""How long more memory must have been free before the capacity rises above what it was."""
_DEAD_BAND: Final = 64
"""While requests run, a rise by less than one part in so many of the largest capacity waits until none runs."""


def bytes_per_token(*, layers: int, kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Bytes of one token's keys and values (hence the 2), as a transformer's configuration gives the factors."""
    return 2 * layers * kv_heads * head_dim * dtype_bytes


def capacity_tokens(
    *, free_bytes: int, reserve_bytes: int, bytes_per_token: int, allocated_tokens: int, block_size: int = 1
) -> int:
    """What our requests hold already and what free memory less the reserve carries beside it, in whole blocks.

    Free memory falls as much as `allocated_tokens` rises, so their sum stands still while nobody else takes any. Where
    the reserve is broken into, it is less than what they hold; never below 0.
    """
    carried_tokens = (free_bytes - reserve_bytes) // bytes_per_token
    return max(0, allocated_tokens + carried_tokens) // block_size * block_size


class MeasuredCapacity:
    """The capacity by what was measured last. With it, the needs of all that run and start fit into memory.

    Two things no measurement shows. A request that ended may have given its memory back or not: all it needed counts
    as taken until the next measurement (`unseen_tokens`). One that reads its prompt may have allocated any part of it:
    that counts as none, so the capacity is less by as much meanwhile.

    It falls at once, and below what is reserved if others take that much: then nobody starts, and nobody is stopped.
    It rises after `RISE_S`, so that noise does not make it flutter. Where the engine keeps what requests allocated
    (`is_kept`), the most they ever had counts as allocated, up to what is missing of the most that was ever free. What
    is missing since the last measurement is taken for that of requests that ended since, up to their needs.
    """

    def __init__(self, *, bytes_per_token: int, reserve_bytes: int, block_size: int = 1, is_kept: bool = False) -> None:
        self.bytes_per_token = bytes_per_token
        self.reserve_bytes = reserve_bytes
        self._block_size = block_size
        self._is_kept = is_kept
        self._kept_tokens = 0
        self._free_tokens = 0
        self._most_free_tokens = 0
        self._samples: deque[tuple[float, int]] = deque()
        self._level_tokens: int | None = None
        self._sure_tokens = 0
        self.unseen_tokens = 0
        self.peak_tokens = 0

    @property
    def tokens(self) -> int:
        """KV tokens, what runs now included; 0 before the first measurement."""
        return min(self._level_tokens or 0, self._sure_tokens)

    def note(
        self,
        free_bytes: int,
        *,
        num_running: int,
        allocated_tokens: int,
        pending_tokens: int = 0,
        unseen_tokens: int = 0,
        now_s: float,
    ) -> None:
        """Take in a measurement.

        `allocated_tokens` are what the requests that hold a reservation surely had when the memory was read,
        `pending_tokens` what they may have had beyond that; `unseen_tokens` were released since it was read.
        """
        held_tokens = self._held_tokens(free_bytes, allocated_tokens, self.unseen_tokens - unseen_tokens)
        self._sure_tokens = self._capacity(free_bytes, held_tokens)
        self.unseen_tokens = unseen_tokens
        self._samples.append((now_s, self._capacity(free_bytes, held_tokens + pending_tokens)))
        while self._samples[0][0] < now_s - RISE_S:
            self._samples.popleft()
        floor = min(tokens for _, tokens in self._samples)
        level = self._level_tokens
        if level is None or floor < level or not num_running or floor - level > self.peak_tokens // _DEAD_BAND:
            self._level_tokens = floor
        self.peak_tokens = max(self.peak_tokens, self.tokens)

    def release(self, need_tokens: int) -> None:
        """A request that needed so many ended."""
        self.unseen_tokens += need_tokens

    def _held_tokens(self, free_bytes: int, allocated_tokens: int, ended_tokens: int) -> int:
        if not self._is_kept:
            return allocated_tokens
        free_tokens = (free_bytes - self.reserve_bytes) // self.bytes_per_token
        grown_tokens = min(ended_tokens, max(0, self._free_tokens - free_tokens))
        self._kept_tokens = max(allocated_tokens, self._kept_tokens + grown_tokens)
        self._free_tokens = free_tokens
        self._most_free_tokens = max(self._most_free_tokens, free_tokens)
        return max(allocated_tokens, min(self._kept_tokens, self._most_free_tokens - free_tokens))

    def _capacity(self, free_bytes: int, allocated_tokens: int) -> int:
        return capacity_tokens(
            free_bytes=free_bytes,
            reserve_bytes=self.reserve_bytes,
            bytes_per_token=self.bytes_per_token,
            allocated_tokens=allocated_tokens,
            block_size=self._block_size,
        )
