"""Appends of one running job: table W2 of the protocol, and the loop that follows it."""

import enum
from typing import Final

import msgspec

from headrace.bus.connection import Stored, Unknown
from headrace.bus.joblog import JobLog
from headrace.errors import BrokerUnavailableError, NotProvisionedError
from headrace.lifecycle import Backoff
from headrace.schemas.events import Event

__all__ = ["Appended", "Ended", "Fenced", "LogWriter", "TooLarge", "Verdict", "judge"]

_STALE_READS_FOR_S: Final = 2.0
_RETRY_FIRST_S: Final = 0.01
_RETRY_MAX_S: Final = 0.5


class Appended(msgspec.Struct, frozen=True):
    """The event is in the log."""

    sequence: int


class Ended(msgspec.Struct, frozen=True):
    """Somebody else ended the job: abort the engine, settle the message."""

    event: Event


class Fenced(msgspec.Struct, frozen=True):
    """The job is no longer ours: abort, free, forget; no ack, no NAK."""

    reason: str


class TooLarge(msgspec.Struct, frozen=True):
    """The event is larger than a message of the broker can be; it never will be stored."""

    reason: str


class Verdict(enum.Enum):
    """What the log's last event says about an append that was refused or got no answer."""

    STORED = "stored"
    REPEAT = "repeat"
    READ_AGAIN = "read_again"
    ENDED = "ended"
    FENCED = "fenced"


def judge(event: Event, *, expected: int, last: Event | None) -> Verdict:
    """Table W2: `event` was to follow sequence `expected`, and the log now ends with `last`."""
    last_sequence = last.sequence if last is not None else 0
    if last_sequence < expected:
        return Verdict.READ_AGAIN
    if last is None or last_sequence == expected:
        return Verdict.REPEAT
    if event.is_same_append(last):
        return Verdict.STORED
    if last.is_terminal:
        return Verdict.ENDED
    return Verdict.FENCED


class LogWriter:
    """Appends the events of one attempt in order, each expecting the one before.

    `sequence` is the last acknowledged one. Retries an unclear append for `retry_for_s`, which must outlast a leader
    change of the log's stream; then the job counts as lost to us.
    """

    def __init__(self, log: JobLog, tenant: str, *, sequence: int, ttl_s: float, retry_for_s: float) -> None:
        self._log = log
        self._tenant = tenant
        self.sequence = sequence
        self._ttl_s = ttl_s
        self._retry_for_s = retry_for_s

    async def append(self, event: Event) -> Appended | Ended | Fenced | TooLarge:
        """Append one event and say what came of it; a lost acknowledgement is recognised, never doubled."""
        repeats = Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S, for_s=self._retry_for_s)
        while not repeats.is_over:
            result = await self._log.append(self._tenant, event, expected=self.sequence, ttl_s=self._ttl_s)
            if isinstance(result, Stored):
                self.sequence = result.sequence
                return Appended(result.sequence)
            if not isinstance(result, Unknown) and result.is_too_large:
                return TooLarge(result.description)
            verdict, last = await self._look(event)
            if verdict is Verdict.STORED and last is not None:
                self.sequence = last.sequence
                return Appended(last.sequence)
            if verdict is Verdict.ENDED and last is not None:
                return Ended(last)
            if verdict is not Verdict.REPEAT:
                return Fenced(_WHY_FENCED[verdict])
            await repeats.pause()
        return Fenced("the broker gave no clear answer in time")

    async def _look(self, event: Event) -> tuple[Verdict, Event | None]:
        """Read the last event until it tells; an old one is read again for two seconds, an unreadable one longer."""
        stale = Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S, for_s=_STALE_READS_FOR_S)
        unread = Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S, for_s=self._retry_for_s)
        while True:
            try:
                last = await self._log.last(self._tenant, event.job)
            except (BrokerUnavailableError, NotProvisionedError):
                if unread.is_over:
                    return Verdict.FENCED, None
                await unread.pause()
                continue
            verdict = judge(event, expected=self.sequence, last=last)
            if verdict is not Verdict.READ_AGAIN or stale.is_over:
                return verdict, last
            await stale.pause()


_WHY_FENCED: Final = {
    Verdict.FENCED: "another attempt owns the job",
    Verdict.READ_AGAIN: "the log is older than what was acknowledged",
}
