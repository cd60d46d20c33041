"""A proposal on top of the discipline: look past the head of a queue for a warm prefix, read one prompt at a time."""

from collections.abc import Sequence

import msgspec

from headrace.discipline.affinity import num_matching

__all__ = ["Ahead", "warmest"]


class Ahead(msgspec.Struct, frozen=True, kw_only=True):
    """How far a worker looks, and when it stops fetching.

    It sees the first `num_ahead` requests of the queue it chose and takes the one with the longest match, but at
    least each `head_every`-th time the head. It fetches nothing while prompts of `max_unread_tokens` or more are being
    read, what it knows to be cached not counted, unless the hint names it.
    """

    num_ahead: int = 16
    head_every: int = 8
    max_unread_tokens: int = 1024


def warmest(waiting: Sequence[Sequence[str]], prefixes: frozenset[str], *, is_heads_turn: bool) -> int:
    """Index of the request to take: the first of those with the longest match; the head without a match or at its turn.

    With the head's turn each n-th time, the request at place p of a queue starts after at most n · p fetches of each
    worker, whatever else is warm.
    """
    if is_heads_turn:
        return 0
    return min(range(len(waiting)), key=lambda index: (-num_matching(waiting[index], prefixes), index))
