"""A proposal on top of the discipline: look past the head of a queue for a warm prefix, read few prompts at a time."""

from collections.abc import Sequence

import msgspec

from headrace.discipline.affinity import num_matching

__all__ = ["Ahead", "Candidate", "choose", "ripe_in_s"]


class Ahead(msgspec.Struct, frozen=True, kw_only=True):
    """How far a worker looks, what it leaves to others, and when it stops fetching.

    It sees the first `num_ahead` requests of the queue it chose. What is warm at another worker it leaves for
    `patience_s`, about what reading the prefix would take (delay scheduling: Zaharia et al., EuroSys 2010). It fetches
    nothing while prompts of `max_unread_tokens` or more are being read, what it knows to be cached not counted, unless
    the hint names it. A head that has waited `head_after_s` is taken at least each `head_every`-th time.
    """

    num_ahead: int = 16
    patience_s: float = 0.25
    max_unread_tokens: int = 1024
    head_every: int = 8
    head_after_s: float = 1.0


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A request near the head of a queue. `is_for_other`: the router's hint names another worker."""

    hashes: Sequence[str]
    waited_s: float
    is_for_other: bool = False


def choose(ahead: Ahead, heads: Sequence[Candidate], prefixes: frozenset[str], *, num_passed: int) -> int | None:
    """Index of the request to take; None: leave them to others for now.

    The first with the longest match, else the first that nobody else is named for or that lost patience. `num_passed`
    counts this worker's fetches since one of a head. From when the request at place p has waited `head_after_s`, it
    starts after at most `head_every` · p fetches of each worker, whatever else is warm.
    """
    if heads and num_passed + 1 >= ahead.head_every and heads[0].waited_s >= ahead.head_after_s:
        return 0
    matches = [num_matching(each.hashes, prefixes) for each in heads]
    longest = max(matches, default=0)
    if longest:
        return matches.index(longest)
    free = (index for index, each in enumerate(heads) if not each.is_for_other or each.waited_s >= ahead.patience_s)
    return next(free, None)


def ripe_in_s(ahead: Ahead, heads: Sequence[Candidate]) -> float:
    """Seconds until the first of them loses patience."""
    return min(max(0.0, ahead.patience_s - each.waited_s) for each in heads)
