"""Prefix affinity: who has a conversation's beginning in its cache already. A hint, never an assignment."""

import base64
import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

from headrace.discipline.placement import WorkerView

__all__ = [
    "BLOCK_CHARS",
    "MAX_BLOCKS",
    "MAX_LOAD_GAP",
    "RecentPrefixes",
    "landmarks",
    "num_matching",
    "preferred",
    "prefix_hashes",
]

BLOCK_CHARS: Final = 1024
MAX_BLOCKS: Final = 16
MAX_LOAD_GAP: Final = 0.5
"""How much fuller than the least loaded worker, as a ratio of slots or memory, a preferred one may be."""
_MAX_RECENT: Final = 256
_HASH_BYTES: Final = 8
_END = "\x00\x00"
_ESCAPED = "\x00\x01"


def prefix_hashes(texts: Sequence[str]) -> tuple[str, ...]:
    """One hash for each whole block of 1,024 characters at the conversation's beginning, at most 16.

    `texts` are its parts in order, roles among them. The hashes are a chain: the n-th stands for all of the first n
    blocks, so two conversations have equal leading hashes where their beginnings are equal, and nowhere else. The
    parts' bounds count. URL-safe, 11 characters each (8 bytes of BLAKE2b).
    """
    beginning = _beginning(texts)
    hashes: list[str] = []
    digest = b""
    for start in range(0, len(beginning) - BLOCK_CHARS + 1, BLOCK_CHARS):
        block = beginning[start : start + BLOCK_CHARS].encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(digest + block, digest_size=_HASH_BYTES).digest()
        hashes.append(base64.urlsafe_b64encode(digest).decode().rstrip("="))
    return tuple(hashes)


def num_matching(hashes: Sequence[str], prefixes: frozenset[str]) -> int:
    """Leading blocks that a worker which served `prefixes` has seen; the last hash found stands for all before it."""
    return next((number for number in range(len(hashes), 0, -1) if hashes[number - 1] in prefixes), 0)


def preferred(hashes: Sequence[str], workers: Sequence[WorkerView], need_tokens: int) -> str | None:
    """The worker with the longest match that would start it now and is not far above the least loaded.

    Not far: its load ratio is at most `MAX_LOAD_GAP` above the least of all ready workers, so a popular prefix heats
    one worker no further than that. Among equals the least loaded, then by name. None without a match.
    """
    least = min((each.load_ratio for each in workers if each.state == "Ready"), default=0.0)
    matches = [
        (-number, each.load_ratio, each.worker)
        for each in workers
        if each.would_start(need_tokens)
        and each.load_ratio <= least + MAX_LOAD_GAP
        and (number := num_matching(hashes, each.prefixes))
    ]
    return min(matches)[2] if matches else None


def landmarks(hashes: Sequence[str]) -> list[str]:
    """The hashes at depths 1, 2, 4, 8 and 16: what a worker remembers of a request it served.

    A chain's hash stands for all blocks before it, so these find a match to within half its depth, and a bounded list
    remembers three times as many conversations as with all 16.
    """
    return [each for depth, each in enumerate(hashes, start=1) if depth & (depth - 1) == 0]


class RecentPrefixes:
    """The hashes a worker served last, at most `size`; the ones served longest ago are dropped.

    Of one conversation the later blocks are dropped first: the earlier ones are shared with more.
    """

    def __init__(self, *, size: int = _MAX_RECENT) -> None:
        self._size = size
        self._hashes: OrderedDict[str, None] = OrderedDict()

    def note(self, hashes: Sequence[str]) -> None:
        """A conversation with these hashes was served."""
        for each in reversed(hashes):
            self._hashes[each] = None
            self._hashes.move_to_end(each)
        while len(self._hashes) > self._size:
            self._hashes.popitem(last=False)

    def __iter__(self) -> Iterator[str]:
        """From the one served longest ago to the last."""
        return iter(self._hashes)

    def __len__(self) -> int:
        return len(self._hashes)


def _beginning(texts: Sequence[str]) -> str:
    """The characters that are hashed: each text, with an end that no text can contain."""
    limit = BLOCK_CHARS * MAX_BLOCKS
    parts: list[str] = []
    size = 0
    for text in texts:
        if size >= limit:
            break
        part = text[:limit].replace("\x00", _ESCAPED) + _END
        parts.append(part)
        size += len(part)
    return "".join(parts)[:limit]
