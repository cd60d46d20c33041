"""What to do with a fetched message: table W1 of the protocol, as one pure function."""

import enum

import msgspec

from headrace.schemas.events import Owner
from headrace.schemas.handover import Standing
from headrace.schemas.states import JobState
from headrace.schemas.workers import SeenBeat, has_died, is_owner_alive

__all__ = ["Action", "Decision", "Situation", "decide"]


class Action(enum.Enum):
    """One row of the table."""

    ACK = "ack"
    """The job ended: settle the message (after the dead letter, if the end was one)."""
    FAIL_DEADLINE = "fail_deadline"
    """Append `failed(deadline_exceeded)`, then settle."""
    LEAVE = "leave"
    """The job runs from another message, of another model: settle this one, it is no longer the job's."""
    TAKE_OVER = "take_over"
    """The job's first model did not start it in time: append `requeued(fallback)` for this message, then look again."""
    FALL_BACK = "fall_back"
    """Hand over to the fallback: store its message, append `requeued(fallback)`, then look again."""
    EXPIRE_QUEUED = "expire_queued"
    """Append `expired(queue_timeout)`, then settle."""
    RUN = "run"
    """Our own `started` is in the log already (its acknowledgement was lost): run it."""
    IGNORE = "ignore"
    """We run it already; this delivery changes nothing."""
    DROP = "drop"
    """A live worker runs it. No ack (it would lose the job), no NAK (it would spin)."""
    REQUEUE = "requeue"
    """Append `requeued` for the owner that is gone, then look again."""
    DEAD_LETTER = "dead_letter"
    """Faults exhausted: append `failed(job_failed)`, write the dead letter, settle."""
    HOLD = "hold"
    """It does not fit now: keep it listed and renewed until it does, or hand it back."""
    CLAIM = "claim"
    """Append `started` expecting what was read."""


class Decision(msgspec.Struct, frozen=True):
    """A row, and for `REQUEUE` the owner that counts as a fault (None where nobody died)."""

    action: Action
    lost: Owner | None = None


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the decision depends on. Times are unix seconds.

    `me` is this registration as it would claim now; `owner_seen` the heartbeat of the log's owner, read after the log,
    where that is somebody else; `is_running_here` whether this process runs the job now, or is about to, from another
    of its messages.
    """

    state: JobState
    me: Owner
    now: float
    deadline_at: float
    queue_until: float
    log_retention_s: float
    max_faults: int
    fits: bool
    is_running_here: bool = False
    is_another_body: bool = False
    standing: Standing = "own"
    has_fallback: bool = False
    owner_seen: SeenBeat | None = None


def decide(s: Situation) -> Decision:
    """The row that applies; rows are tried in the table's order."""
    if s.state.is_terminal:
        return Decision(Action.ACK)
    if s.is_another_body:
        return Decision(Action.DROP)  # another request under a used id; it is settled when the job has ended
    if s.standing == "void":
        return Decision(Action.LEAVE)
    if s.state.last is None and s.now > s.deadline_at + s.log_retention_s:
        return Decision(Action.ACK)  # its log has expired: a stale message must never run a finished job again
    if s.now > s.deadline_at:
        return Decision(Action.FAIL_DEADLINE)
    if not s.state.was_started and s.now > s.queue_until:
        return Decision(Action.FALL_BACK if s.has_fallback else Action.EXPIRE_QUEUED)
    if s.standing == "pending":
        return Decision(Action.TAKE_OVER)
    if s.state.owner is not None:
        return _owned(s, s.state.owner)
    if len(s.state.faults) >= s.max_faults:
        return Decision(Action.DEAD_LETTER)
    return Decision(Action.CLAIM if s.fits else Action.HOLD)


def _owned(s: Situation, owner: Owner) -> Decision:
    if owner.is_same(s.me):
        if s.is_running_here:
            return Decision(Action.IGNORE)
        is_this_message = owner.queue_sequence == s.me.queue_sequence
        if is_this_message and s.state.last is not None and s.state.last.kind == "started":
            return Decision(Action.RUN)
        return Decision(Action.REQUEUE)
    if is_owner_alive(owner, s.owner_seen):
        return Decision(Action.DROP)
    return Decision(Action.REQUEUE, lost=owner if has_died(owner, s.owner_seen) else None)
