"""The KV cache of one engine: what running requests hold, and what is left of earlier ones until room is needed."""

import bisect
from collections import OrderedDict
from typing import Final

__all__ = ["KvCache"]

_Key = str | int


class KvCache:
    """Tokens held by running requests, and a cache of the rest, evicted least recently used, in whole blocks.

    A shared prefix is stored once however many running requests use it. What a request leaves behind stays cached:
    its prefix for whoever shares it, its own part only for itself, should it be preempted and come back. As vLLM does,
    the end of what was left earliest goes first.
    """

    def __init__(self, *, capacity_tokens: int, block_size: int) -> None:
        self.capacity_tokens: Final = capacity_tokens
        self._block_size = block_size
        self._idle: OrderedDict[_Key, int] = OrderedDict()
        self._num_idle = 0
        self._shared: dict[str, list[int]] = {}  # prefix in use: tokens of it that each user needs, ascending
        self.used_tokens = 0

    def cached_tokens(self, index: int, prefix: str, prefix_tokens: int, num_tokens: int) -> int:
        """Of the first `num_tokens` of a request, how many need no computing; at least the last one always does."""
        found = 0
        if prefix:
            stored = self._shared[prefix][-1] if prefix in self._shared else self._idle.get(prefix, 0)
            found = min(prefix_tokens, stored)
        if found == prefix_tokens:
            found += self._idle.get(index, 0)
        return min(found, num_tokens - 1)

    def fits(self, prefix: str, prefix_tokens: int, num_tokens: int) -> bool:
        """Whether a request of so many tokens could be stored beside the running ones."""
        return self.used_tokens + self._additional(prefix, prefix_tokens, num_tokens) <= self.capacity_tokens

    def take(self, index: int, prefix: str, prefix_tokens: int, num_tokens: int) -> None:
        """Store a request; its prefix is shared from now on."""
        self.used_tokens += self._additional(prefix, prefix_tokens, num_tokens)
        self._num_idle -= self._idle.pop(index, 0)
        if prefix:
            if prefix not in self._shared:
                left = self._idle.pop(prefix, 0)
                self._num_idle -= left
                self._shared[prefix] = []
            bisect.insort(self._shared[prefix], prefix_tokens)
        self._evict()

    def grow(self, num_tokens: int) -> None:
        """Running requests hold so many tokens more."""
        self.used_tokens += num_tokens
        self._evict()

    def release(self, index: int, prefix: str, prefix_tokens: int, num_tokens: int) -> None:
        """A request of so many tokens runs no more; what it held is cached."""
        private = num_tokens - prefix_tokens
        self.used_tokens -= private
        self._leave(index, private)
        if prefix:
            lengths = self._shared[prefix]
            stored = lengths[-1]
            lengths.remove(prefix_tokens)
            if lengths:
                self.used_tokens -= stored - lengths[-1]  # what only this one needed of it
            else:
                del self._shared[prefix]
                self.used_tokens -= stored
                self._leave(prefix, stored)
        self._evict()

    def forget(self, index: int) -> None:
        """What a request left behind was never computed: it is not cached."""
        self._num_idle -= self._idle.pop(index, 0)

    def _additional(self, prefix: str, prefix_tokens: int, num_tokens: int) -> int:
        if not prefix:
            return num_tokens
        stored = self._shared[prefix][-1] if prefix in self._shared else 0
        return num_tokens - prefix_tokens + max(0, prefix_tokens - stored)

    def _leave(self, key: _Key, num_tokens: int) -> None:
        whole = num_tokens - num_tokens % self._block_size
        if whole:
            self._idle[key] = whole
            self._num_idle += whole

    def _evict(self) -> None:
        over = self.used_tokens + self._num_idle - self.capacity_tokens
        while over > 0 and self._idle:
            key = next(iter(self._idle))
            tokens = self._idle[key]
            cut = min(tokens, -(-over // self._block_size) * self._block_size)
            if cut == tokens:
                del self._idle[key]
            else:
                self._idle[key] = tokens - cut
            self._num_idle -= cut
            over -= cut
