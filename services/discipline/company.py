"""Who may run beside whom: a request that may be what its engines fail of takes nobody with it to a third start."""

import enum
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from headrace.schemas.states import JobState, Loss

__all__ = ["GRACE_S", "NOBODY", "TURN_S", "Asking", "Guest", "Standing", "admissible", "guest_of", "is_welcome"]

GRACE_S: Final = 0.1
"""What one on probation waits in any case: those lost with it that had made tokens go on first."""
TURN_S: Final = 0.5
"""From then on those that lost their workers pass together: many may have been lost before their first token."""
CLEARED_PATIENCE_S: Final = 2.0
LOST_WORKER_PATIENCE_S: Final = 5.0
LOST_ENGINE_PATIENCE_S: Final = 30.0
_ENOUGH_OF_WORKER: Final = 1
"""Tokens in the attempt that was lost with its worker, from which on a request counts as innocent."""
_ENOUGH_OF_ENGINE: Final = 2
"""The same where the engine failed and its worker lived on: a prefill and a decode step went well."""


class Standing(enum.Enum):
    """What is held against a request. Only FRESH has no fault."""

    FRESH = "fresh"
    CLEARED = "cleared"
    """It had made tokens in the attempt that was lost last."""
    UNPROVEN = "unproven"
    """It had not, and has not come further than that in this attempt: it is on probation."""
    PROVEN = "proven"
    """It was on probation in this attempt, and has come further."""


class Guest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as its company sees it.

    `is_suspect`: one more fault is its last. `was_engine`: its worker outlived the engine that failed with it last.
    `proof_tokens` of this attempt end its probation. `patience_s` is how long it waits for better company, at most.
    """

    standing: Standing = Standing.FRESH
    is_suspect: bool = False
    was_engine: bool = False
    proof_tokens: int = 0
    patience_s: float = 0.0

    @property
    def has_fault(self) -> bool:
        """Whether a worker or an engine was lost with it."""
        return self.standing is not Standing.FRESH

    @property
    def is_unproven(self) -> bool:
        """Whether it is on probation."""
        return self.standing is Standing.UNPROVEN

    @property
    def takes_turns(self) -> bool:
        """Whether it is on probation, and never beside another: it is not just one of those a lost worker ran."""
        return self.is_unproven and (self.was_engine or self.is_suspect)

    def after(self, num_tokens: int) -> "Guest":
        """The same request once it has made so many tokens in this attempt."""
        if not self.is_unproven or num_tokens < self.proof_tokens:
            return self
        return msgspec.structs.replace(self, standing=Standing.PROVEN)


NOBODY: Final = Guest()
"""A request that nothing is held against."""


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """A guest at the door of an engine: how long it has waited there, and its place in the queue's stream."""

    guest: Guest
    waited_s: float = 0.0
    sequence: int = 0


def guest_of(state: JobState, *, max_faults: int) -> Guest:
    """What a job's log holds against it, before its next attempt."""
    if state.last_loss is None:
        return NOBODY
    is_unproven = state.last_loss.num_tokens < _enough(state.last_loss)
    patience_s = LOST_ENGINE_PATIENCE_S if state.last_loss.was_engine else LOST_WORKER_PATIENCE_S
    return Guest(
        standing=Standing.UNPROVEN if is_unproven else Standing.CLEARED,
        is_suspect=state.is_suspect(max_faults=max_faults),
        was_engine=state.last_loss.was_engine,
        proof_tokens=state.last_loss.num_tokens + 1 if is_unproven else 0,
        patience_s=patience_s if is_unproven else CLEARED_PATIENCE_S,
    )


def admissible(inside: Iterable[Guest], asking: Sequence[Asking]) -> list[int]:
    """Indexes of those that may start now beside `inside` and each other, those on probation behind the others.

    Whatever anybody's patience: never two suspects, and no unproven one beside another, but for those that lost their
    workers, from `TURN_S` on. Until its patience is at an end, an unproven one starts beside nobody that was cleared
    and beside no suspect, an unproven suspect beside nobody that has a fault, and nobody that has a fault starts beside
    an unproven one. One that has no fault starts beside anybody. Of several on probation the youngest is first: the
    last to start is more often than not what an engine failed of.
    """
    company = list(inside)
    chosen: list[int] = []
    known = [index for index, each in enumerate(asking) if not each.guest.is_unproven]
    on_probation = [index for index, each in enumerate(asking) if each.guest.is_unproven]
    for index in (*known, *sorted(on_probation, key=lambda index: -asking[index].sequence)):
        if _may_start(asking[index], company):
            chosen.append(index)
            company.append(asking[index].guest)
    return chosen


def is_welcome(guest: Guest, *, num_faulted: int, num_unproven: int) -> bool:
    """Whether a worker would start it at once, by what its heartbeat says: requests with a fault that it holds, and
    those of them that run on probation.
    """
    if not guest.has_fault:
        return True
    return num_faulted == 0 if guest.is_unproven or guest.is_suspect else num_unproven == 0


def _may_start(asking: Asking, company: Sequence[Guest]) -> bool:
    guest = asking.guest
    if not guest.has_fault:
        return True
    if guest.is_suspect and any(other.is_suspect for other in company):
        return False
    unproven = [other for other in company if other.is_unproven]
    has_patience = asking.waited_s < guest.patience_s
    if not guest.is_unproven:
        return not (unproven and has_patience)
    if asking.waited_s < (TURN_S if unproven else GRACE_S):
        return False
    if unproven and any(one.takes_turns for one in (guest, *unproven)):
        return False
    return not (has_patience and any(_is_endangered(other, by=guest) for other in company))


def _is_endangered(other: Guest, *, by: Guest) -> bool:
    """Whether it would be hurt more than need be, were `by` what its engines fail of."""
    if by.is_suspect:
        return other.has_fault
    return other.standing is Standing.CLEARED or other.is_suspect


def _enough(loss: Loss) -> int:
    return _ENOUGH_OF_ENGINE if loss.was_engine else _ENOUGH_OF_WORKER
