"""The life of a job, as one table, and what a job's log says about it.

queued ──started──► running ──done──────► done
  │  ▲                 │ ──failed────► failed
  │  └────requeued─────┤ ──cancelled─► cancelled
  │                    └─expired────► expired
  └──failed | cancelled | expired──►
"""

from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from headrace.schemas.events import FALLBACK, Event, EventKind, Owner

State = Literal["queued", "running", "done", "failed", "cancelled", "expired"]

TRANSITIONS: Final[dict[tuple[State, EventKind], State]] = {
    ("queued", "accepted"): "queued",
    ("queued", "started"): "running",
    ("queued", "requeued"): "queued",
    ("queued", "failed"): "failed",
    ("queued", "cancelled"): "cancelled",
    ("queued", "expired"): "expired",
    ("running", "delta"): "running",
    ("running", "requeued"): "queued",
    ("running", "done"): "done",
    ("running", "failed"): "failed",
    ("running", "cancelled"): "cancelled",
    ("running", "expired"): "expired",
}
"""Every legal step; an event that is not here for a state never follows it in a log."""

_LANDING: Final[dict[EventKind, State]] = {event: after for (_, event), after in TRANSITIONS.items()}
"""Where each event leads; the same from every state it may follow, which a test checks."""

TERMINAL: Final[frozenset[EventKind]] = frozenset({"done", "failed", "cancelled", "expired"})


def next_state(state: State, event: EventKind) -> State | None:
    """The state after `event`; None where the table has no such step."""
    return TRANSITIONS.get((state, event))


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """The last attempt of a job that was lost: how many tokens it had made. `was_engine`: its worker outlived it."""

    num_tokens: int
    was_engine: bool


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """What a log says of its job.

    `attempt` is the attempt that runs or would run next, counted from 1. `faults` are the distinct (worker, epoch,
    engine run) lost with the job running, `last_loss` is the last of them; tokens of a later attempt that was handed
    back count there too. `owner` is who runs it, None unless running. `num_tokens` is the offset of the next token,
    `attempt_offset` of the last attempt's first one. `sequence` is the log sequence of the last event, 0 for an empty
    log: the next append expects it.
    `ttl_s` is the time to live every event of the job gets.
    `is_whole` says that nothing is missing in what was read: the chain has no gap and the tokens begin at 0.
    """

    state: State = "queued"
    attempt: int = 1
    faults: frozenset[str] = frozenset()
    owner: Owner | None = None
    last_loss: Loss | None = None
    num_tokens: int = 0
    attempt_offset: int = 0
    sequence: int = 0
    last: Event | None = None
    was_started: bool = False
    body_hash: str = ""
    model: str = ""
    ttl_s: int = 0
    queue_sequence: int | None = None
    is_whole: bool = True

    def is_suspect(self, *, max_faults: int) -> bool:
        """Whether one more fault is the last, so that it may be what its engines fail of.

        Two such jobs in one engine would die of each other's faults.
        """
        return bool(self.faults) and len(self.faults) >= max_faults - 1

    @property
    def is_terminal(self) -> bool:
        """Whether the job has ended."""
        return self.state not in ("queued", "running")


def fold(events: Iterable[Event]) -> JobState:
    """What a log says, from its events in order (a suffix that lacks tokens gives a state with `is_whole` False)."""
    state = JobState()
    for event in events:
        state = step(state, event)
    return state


def tells_all(last: Event) -> bool:
    """Whether a job's last event alone says what a claim depends on: folded, it gives the same state as the whole log.

    So it does where it is the first, and where the first attempt was requeued: that attempt began at the first token,
    and no other could have been lost. What such a state lacks is the body's hash, and that it is whole; the model and
    the queue message it names where whoever wrote the event knew them.
    """
    return last.kind == "accepted" or (last.kind == "requeued" and last.attempt == 2 and last.reason != FALLBACK)


def step(state: JobState, event: Event) -> JobState:
    """The state after a later event; `is_whole` turns False where others lie between."""
    follows = event.last_sequence is None or event.last_sequence == state.sequence
    if event.offset > state.num_tokens or (event.kind == "delta" and event.offset < state.num_tokens):
        follows = False
    attempt, faults, owner, queue_sequence = state.attempt, state.faults, state.owner, state.queue_sequence
    last_loss, attempt_offset = state.last_loss, state.attempt_offset
    if event.kind == "requeued":
        last_loss, attempt_offset = _loss_after(state, event), max(state.num_tokens, event.offset)
        attempt, owner = event.attempt, None
        queue_sequence = event.queue_sequence or queue_sequence
        if event.lost is not None:
            faults = faults | {event.lost}
    elif event.kind == "started":
        attempt, owner, attempt_offset = event.attempt, event.owner, event.offset
        queue_sequence = event.owner.queue_sequence if event.owner else queue_sequence
    elif event.kind == "accepted":
        queue_sequence = event.queue_sequence or queue_sequence
    elif event.kind in TERMINAL:
        owner = None
    else:
        attempt = event.attempt
        owner = owner or event.owner  # a delta may be read without its `started`
    num_tokens = event.offset + event.count if event.kind == "delta" else max(state.num_tokens, event.offset)
    # A suffix may begin anywhere, so a step the table does not know is taken for what it leads to.
    after = next_state(state.state, event.kind) or _LANDING[event.kind]
    return msgspec.structs.replace(
        state,
        state=after,
        attempt=attempt,
        faults=faults,
        last_loss=last_loss,
        owner=owner,
        num_tokens=num_tokens,
        attempt_offset=attempt_offset,
        sequence=event.sequence,
        last=event,
        was_started=state.was_started
        or (event.kind in ("started", "delta", "requeued", "done") and event.reason != FALLBACK),
        body_hash=event.body_hash or state.body_hash,
        model=event.model or state.model,
        ttl_s=event.ttl_s or state.ttl_s,
        queue_sequence=queue_sequence,
        is_whole=state.is_whole and follows,
    )


def _loss_after(state: JobState, event: Event) -> Loss | None:
    """The last loss after a `requeued`, by what the attempt sent and what its worker says that it made."""
    num_tokens = max(max(state.num_tokens, event.offset) - state.attempt_offset, event.num_made)
    if event.lost is not None:
        by = event.owner
        return Loss(num_tokens=num_tokens, was_engine=by is not None and event.lost.startswith(f"{by.registration}/"))
    if state.last_loss is not None and num_tokens > state.last_loss.num_tokens:
        return msgspec.structs.replace(state.last_loss, num_tokens=num_tokens)
    return state.last_loss
