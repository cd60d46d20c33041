"""A reader's place in a job's chain of events: what comes next, what came already, what is missing."""

import enum

from headrace.schemas.events import Event

__all__ = ["Chain", "Link"]


class Link(enum.Enum):
    """How an event relates to what was read before."""

    NEXT = "next"
    """It follows: take it."""
    KNOWN = "known"
    """It was read already: skip it."""
    GAP = "gap"
    """Something before it is missing: read the log."""
    LOST = "lost"
    """It is from the log, and yet tokens before it are missing: they have expired or were purged."""


class Chain:
    """The last event read, by sequence, and the tokens read, by offset. Never lets a hole or a repetition through."""

    def __init__(self) -> None:
        self.sequence = 0
        self.num_tokens = 0

    def link(self, event: Event, *, is_from_log: bool) -> Link:
        """Judge an event. From the log, in order, what is missing before it is gone; live, it may only be late."""
        if event.sequence <= self.sequence:
            return Link.KNOWN
        if not is_from_log and event.last_sequence != self.sequence:
            return Link.GAP
        if event.kind == "delta" and event.offset != self.num_tokens:
            return Link.LOST
        if event.kind == "done" and event.offset > self.num_tokens:
            return Link.LOST
        return Link.NEXT

    def take(self, event: Event) -> None:
        """Move on past an event."""
        self.sequence = event.sequence
        if event.kind == "delta":
            self.num_tokens = event.offset + event.count
