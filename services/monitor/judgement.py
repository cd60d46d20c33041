"""What a monitor does about a message whose holder is gone: table M, as pure functions."""

import enum
from typing import Final

import msgspec

from headrace.schemas.endings import deadline_exceeded, end_of, queue_timeout
from headrace.schemas.events import Event, Owner
from headrace.schemas.jobs import Job
from headrace.schemas.states import JobState
from headrace.schemas.workers import Heartbeat, SeenBeat, has_died, is_owner_alive

__all__ = ["Remedied", "Remedy", "judge_listed", "judge_time", "judge_unlisted", "overdue_after_s"]

_MISSED_BEATS: Final = 3.5


class Remedy(enum.Enum):
    """What to do with one message."""

    NOTHING = "nothing"
    """The job ended, or somebody else has it."""
    REQUEUE = "requeue"
    """Append `requeued(lost)`, then NAK on its holder's behalf and wake."""
    HAND_BACK = "hand_back"
    """It never started, or is requeued already: NAK and wake only."""


class Remedied(msgspec.Struct, frozen=True):
    """A remedy, and the owner that was lost where there is one."""

    remedy: Remedy
    lost: Owner | None = None


def judge_listed(state: JobState, *, worker: str, epoch: str) -> Remedied:
    """A message that a worker listed whose registration (`epoch`) is known to be gone."""
    if state.is_terminal:
        return Remedied(Remedy.NOTHING)
    if state.owner is None:
        return Remedied(Remedy.HAND_BACK)
    if (state.owner.worker, state.owner.epoch) == (worker, epoch):
        return Remedied(Remedy.REQUEUE, lost=state.owner)
    return Remedied(Remedy.NOTHING)


def judge_unlisted(state: JobState, *, owner_seen: SeenBeat | None) -> Remedied:
    """A message in flight that no live worker has listed for two beats since it was delivered."""
    if state.is_terminal:
        return Remedied(Remedy.NOTHING)
    if state.owner is None:
        return Remedied(Remedy.HAND_BACK)
    if is_owner_alive(state.owner, owner_seen):
        return Remedied(Remedy.NOTHING)
    return Remedied(Remedy.REQUEUE, lost=state.owner if has_died(state.owner, owner_seen) else None)


def judge_time(state: JobState, job: Job, *, now: float) -> Event | None:
    """The terminal event a job is due at `now` (unix seconds): past its deadline, or past its queue timeout and never
    started. None where it may go on.
    """
    if state.is_terminal:
        return None
    if now > job.deadline_at:
        return end_of(state, job, deadline_exceeded(job))
    if not state.was_started and now > job.queue_until:
        return end_of(state, job, queue_timeout(job))
    return None


def overdue_after_s(beat: Heartbeat, *, ttl_s: float) -> float:
    """Seconds without a beat, by the monitor's own clock, after which a worker counts as dead.

    Three and a half of its own intervals, so that three lost beats are survived; its TTL at most.
    """
    return min(ttl_s, _MISSED_BEATS * beat.interval_s)
