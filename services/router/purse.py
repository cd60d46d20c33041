"""A router's share of a tenant's limits a minute: pure rules over what was taken from the shared record.

A router takes a bite for the half second it is in, spends it, and gives back what is left. While a limit is low a bite
is one request, so that no router sits on what another one needs.
"""

from typing import Final

import msgspec

from headrace.schemas.usage import Rates, Usage, Used, slot_of

__all__ = ["Bite", "Purse", "plan_bite"]

_BITES_PER_MINUTE: Final = 600
"""Writes of the shared record a tenant causes at most, about: a bite is this part of a limit, at least the request."""


class Purse(msgspec.Struct, frozen=True):
    """Permits taken for slot `at` and not yet spent; `owed` are those of earlier slots, to be given back."""

    at: int = 0
    left: Used = Used()
    owed: tuple[tuple[int, Used], ...] = ()

    def moved_to(self, at: int) -> "Purse":
        """In a later slot: what is left of the one before is owed."""
        if at == self.at:
            return self
        return Purse(at, Used(), self._owing(self.at, self.left))

    def spent(self, wanted: Used, rates: Rates) -> "Purse | None":
        """After paying for one request; None where it does not suffice."""
        if (rates.requests is not None and self.left.requests < wanted.requests) or (
            rates.tokens is not None and self.left.tokens < wanted.tokens
        ):
            return None
        left = Used(max(0, self.left.requests - wanted.requests), max(0, self.left.tokens - wanted.tokens))
        return Purse(self.at, left, self.owed)

    def refunded(self, at: int, amount: Used) -> "Purse":
        """After a request that was paid for in slot `at` was refused for another reason."""
        if at == self.at:
            return Purse(self.at, self.left + amount, self.owed)
        return Purse(self.at, self.left, self._owing(at, amount))

    def _owing(self, at: int, amount: Used) -> tuple[tuple[int, Used], ...]:
        return (*self.owed, (at, amount)) if amount != Used() else self.owed


class Bite(msgspec.Struct, frozen=True):
    """The record to write, and the purse once it is written."""

    usage: Usage
    purse: Purse


def plan_bite(usage: Usage, purse: Purse, rates: Rates, wanted: Used, *, waiting: Used, now: float) -> Bite | float:
    """What to take so that `wanted` can be paid, or the seconds until the record has room for it.

    Takes what others of this router wait for along (`waiting`), as far as there is room. Gives back what is owed.
    `purse` must be in the slot of `now`.
    """
    for at, amount in purse.owed:
        usage = usage.changed(at, -amount.requests, -amount.tokens, now=now)
    missing = Used(max(0, wanted.requests - purse.left.requests), max(0, wanted.tokens - purse.left.tokens))
    if not (usage.used(now) + missing).fits(rates):
        return usage.wait_s(missing, rates, now=now)
    used = usage.used(now)
    requests = _size(rates.requests, used.requests, missing.requests, waiting.requests)
    tokens = _size(rates.tokens, used.tokens, missing.tokens, waiting.tokens)
    at = slot_of(now)
    return Bite(usage.changed(at, requests, tokens, now=now), Purse(at, purse.left + Used(requests, tokens)))


def _size(limit: int | None, used: int, missing: int, waiting: int) -> int:
    if limit is None:
        return missing  # counted for people to see, bounded by nothing
    return max(missing, min(limit - used, max(missing + waiting, limit // _BITES_PER_MINUTE)))
