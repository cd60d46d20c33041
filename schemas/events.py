"""Events of the job log: what each one says, and how it looks on the wire.

Written by routers (`accepted`), workers (`started`, `delta`, `requeued`, `done`, `failed`, `expired`), monitors
(`requeued`, `failed`, `expired`) and whoever cancels (`cancelled`), always with
`Nats-Expected-Last-Subject-Sequence`, so a job's events form one chain. Read by clients from the republished inbox and
by all of them from the log. Idempotency: an append that may have been stored already is recognised by owner,
attempt, offset and count (`is_same_append`).
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

import msgspec

from headrace.schemas import subjects
from headrace.schemas.refusals import ErrorBody, Refusal

EventKind = Literal["accepted", "started", "delta", "requeued", "done", "failed", "cancelled", "expired"]
EVENT_KINDS: Final[frozenset[str]] = frozenset(get_args(EventKind))

FALLBACK: Final = "fallback"
"""The reason of a `requeued` that hands a job which never started over to another model."""

_HDR_DEAD: Final = "Headrace-Dead"


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Who runs a job: a worker's epoch (one registration) and, in `started`, what makes its liveness checkable.

    `queue_sequence` is the queue message it holds, `beat` the KV revision of its last acknowledged heartbeat when it
    claimed, `engine_run` counts the engine's starts within the epoch.
    """

    worker: str
    epoch: str
    queue_sequence: int | None = None
    beat: int = 0
    engine_run: int = 0

    def is_same(self, other: "Owner | None") -> bool:
        """Whether both are the same registration of the same worker."""
        return other is not None and (self.worker, self.epoch) == (other.worker, other.epoch)

    @property
    def registration(self) -> str:
        """What names this registration of this worker; fault ids begin with it."""
        return f"{self.worker}/{self.epoch}"

    @property
    def fault_id(self) -> str:
        """What names this owner in a `requeued` event that counts as a fault."""
        return f"{self.registration}/{self.engine_run}"


class AcceptedBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `accepted`: the queue message, jobs the discipline would start first, and the estimated wait."""

    job: str
    sequence: int | None
    position: int | None = None
    eta_s: float | None = None
    model: str = ""


class StartedBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `started`; what follows the attempt is for the rules of the log."""

    worker: str
    attempt: int
    model: str = ""
    epoch: str = ""
    sequence: int | None = None
    beat: int = 0
    engine_run: int = 0


class RequeuedBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `requeued`: the attempt that comes next; `lost` names the owner if that was a fault, `num_made` counts
    the tokens of the attempt that came to an end, where the job does not stream them.

    `model` and `sequence` name whose the job is and its queue message there: with the reason `fallback` from now on,
    else those of the attempt that came to an end, where its writer knows them.
    """

    attempt: int
    reason: str
    lost: str | None = None
    num_made: int = 0
    model: str = ""
    sequence: int | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event. `data` is the JSON body as clients see it; the other fields are its headers and what the rules need.

    `offset` is the number of tokens before it, `count` the tokens in it, `num_made` those that were made and not sent.
    `sequence` and `last_sequence` are its place in the job's chain, `ttl_s` the time to live it was stored with: set
    when read, 0 and None when about to be written.
    """

    kind: EventKind
    job: str
    attempt: int = 1
    offset: int = 0
    count: int = 0
    data: bytes = b"{}"
    owner: Owner | None = None
    lost: str | None = None
    reason: str = ""
    num_made: int = 0
    body_hash: str = ""
    model: str = ""
    queue_sequence: int | None = None
    is_dead: bool = False
    ttl_s: int = 0
    sequence: int = 0
    last_sequence: int | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether it ends the job."""
        return self.kind in ("done", "failed", "cancelled", "expired")

    def json(self) -> Any:
        """The decoded body. Raises `msgspec.DecodeError` if it is not JSON."""
        return msgspec.json.decode(self.data)

    def error(self) -> Refusal | None:
        """The error of `failed` and `expired`, as a refusal; None for other events or a body without one."""
        try:
            detail = msgspec.json.decode(self.data, type=ErrorBody).error
        except (msgspec.DecodeError, RecursionError):
            return None
        return Refusal(code=detail.code, message=detail.message, param=detail.param)

    def is_same_append(self, other: "Event") -> bool:
        """Whether `other` (read back) is this event, stored although its acknowledgement was lost.

        A `started` names its queue message too: one worker may hold two messages of a job, and only one claim won.
        """
        return (
            self.kind == other.kind
            and self.attempt == other.attempt
            and self.offset == other.offset
            and self.count == other.count
            and self.owner is not None
            and self.owner.is_same(other.owner)
            and (self.kind != "started" or self.queue_sequence == other.queue_sequence)
        )

    def headers(self) -> dict[str, str]:
        """Its headers, without the ones of NATS."""
        headers = {
            subjects.HDR_EVENT: self.kind,
            subjects.HDR_JOB: self.job,
            subjects.HDR_ATTEMPT: str(self.attempt),
            subjects.HDR_OFFSET: str(self.offset),
        }
        if self.count:
            headers[subjects.HDR_COUNT] = str(self.count)
        if self.owner is not None:
            headers[subjects.HDR_WORKER] = self.owner.worker
            headers[subjects.HDR_EPOCH] = self.owner.epoch
            if self.owner.engine_run:
                headers[subjects.HDR_ENGINE_RUN] = str(self.owner.engine_run)
        if self.body_hash:
            headers[subjects.HDR_HASH] = self.body_hash
        if self.is_dead:
            headers[_HDR_DEAD] = "1"
        return headers


def accepted(job: str, body: AcceptedBody, *, body_hash: str) -> Event:
    """The router took the job in; `body.sequence` is its queue message."""
    return Event(
        kind="accepted",
        job=job,
        data=msgspec.json.encode(body),
        body_hash=body_hash,
        model=body.model,
        queue_sequence=body.sequence,
    )


def started(job: str, owner: Owner, *, attempt: int, offset: int, body_hash: str, model: str = "") -> Event:
    """A worker claimed the job; `offset` is where it goes on."""
    body = StartedBody(
        worker=owner.worker,
        attempt=attempt,
        model=model,
        epoch=owner.epoch,
        sequence=owner.queue_sequence,
        beat=owner.beat,
        engine_run=owner.engine_run,
    )
    return Event(
        kind="started",
        job=job,
        attempt=attempt,
        offset=offset,
        data=msgspec.json.encode(body),
        owner=owner,
        body_hash=body_hash,
        model=model,
        queue_sequence=owner.queue_sequence,
    )


def delta(job: str, owner: Owner, *, attempt: int, offset: int, count: int, data: bytes) -> Event:
    """`count` tokens from `offset` on, as one OpenAI chunk."""
    return Event(kind="delta", job=job, attempt=attempt, offset=offset, count=count, data=data, owner=owner)


def requeued(
    job: str,
    *,
    attempt: int,
    offset: int,
    reason: str,
    lost: Owner | None,
    by: Owner | None = None,
    num_made: int = 0,
    model: str = "",
    queue_sequence: int | None = None,
) -> Event:
    """The job goes back to its queue; `attempt` is the next one, `lost` the owner if that was a fault, `num_made` the
    tokens that the attempt made and did not send. `queue_sequence` is the message it ran from, in `model`'s queue; to
    be given only where that is certain, since whoever has that message takes its body for the job's.

    However many see a worker or an engine die, that is one fault. A fault that its own worker reports (an engine that
    erred and lives on) counts anew with each attempt, or a job that always fails there would be tried for ever.
    """
    fault = lost.fault_id if lost is not None else None
    if fault is not None and lost is not None and lost.is_same(by):
        fault = f"{fault}/{attempt - 1}"
    body = RequeuedBody(
        attempt=attempt, reason=reason, lost=fault, num_made=num_made, model=model, sequence=queue_sequence
    )
    return Event(
        kind="requeued",
        job=job,
        attempt=attempt,
        offset=offset,
        data=msgspec.json.encode(body),
        owner=by,
        lost=fault,
        reason=reason,
        num_made=num_made,
        model=model,
        queue_sequence=queue_sequence,
    )


def handed_over(
    job: str, *, attempt: int, model: str, queue_sequence: int, body_hash: str, by: Owner | None = None
) -> Event:
    """The job, which never started, is `model`'s from now on, with the queue message that was stored there before."""
    body = RequeuedBody(attempt=attempt, reason=FALLBACK, model=model, sequence=queue_sequence)
    return Event(
        kind="requeued",
        job=job,
        attempt=attempt,
        data=msgspec.json.encode(body),
        owner=by,
        reason=FALLBACK,
        body_hash=body_hash,
        model=model,
        queue_sequence=queue_sequence,
    )


def done(job: str, owner: Owner, *, attempt: int, offset: int, data: bytes, body_hash: str) -> Event:
    """The whole answer, as an OpenAI response object; `offset` is the number of tokens sent."""
    return Event(kind="done", job=job, attempt=attempt, offset=offset, data=data, owner=owner, body_hash=body_hash)


def ended(
    kind: Literal["failed", "cancelled", "expired"],
    job: str,
    *,
    attempt: int,
    offset: int,
    error: Refusal | None,
    body_hash: str = "",
    owner: Owner | None = None,
    is_dead: bool = False,
) -> Event:
    """A terminal event other than `done`. `is_dead`: a dead letter goes with it."""
    data = msgspec.json.encode(error.body()) if error is not None else b"{}"
    return Event(
        kind=kind,
        job=job,
        attempt=attempt,
        offset=offset,
        data=data,
        owner=owner,
        body_hash=body_hash,
        is_dead=is_dead,
    )


def decode(headers: Mapping[str, str] | None, data: bytes, *, sequence: int, last_sequence: int | None) -> Event | None:
    """An event as read; None for a message that is not one (readers skip those)."""
    if headers is None:
        return None
    kind = headers.get(subjects.HDR_EVENT, "")
    if kind not in EVENT_KINDS:
        return None
    try:
        event = Event(
            kind=kind,  # type: ignore[arg-type]  # checked against EVENT_KINDS above
            job=headers[subjects.HDR_JOB],
            attempt=int(headers.get(subjects.HDR_ATTEMPT, "1")),
            offset=int(headers.get(subjects.HDR_OFFSET, "0")),
            count=int(headers.get(subjects.HDR_COUNT, "0")),
            data=data,
            owner=_owner(headers),
            body_hash=headers.get(subjects.HDR_HASH, ""),
            is_dead=_HDR_DEAD in headers,
            ttl_s=int(headers.get(subjects.HDR_TTL, "0")),
            sequence=sequence,
            last_sequence=last_sequence,
        )
        return _with_body(event)
    except (KeyError, ValueError, msgspec.DecodeError, RecursionError):
        return None


def _owner(headers: Mapping[str, str]) -> Owner | None:
    worker, epoch = headers.get(subjects.HDR_WORKER), headers.get(subjects.HDR_EPOCH)
    if worker is None or epoch is None:
        return None
    return Owner(worker=worker, epoch=epoch, engine_run=int(headers.get(subjects.HDR_ENGINE_RUN, "0")))


def _with_body(event: Event) -> Event:
    if event.kind == "accepted":
        body = msgspec.json.decode(event.data, type=AcceptedBody)
        return msgspec.structs.replace(event, queue_sequence=body.sequence, model=body.model)
    if event.kind == "started":
        start = msgspec.json.decode(event.data, type=StartedBody)
        owner = Owner(
            worker=start.worker,
            epoch=start.epoch,
            queue_sequence=start.sequence,
            beat=start.beat,
            engine_run=start.engine_run,
        )
        return msgspec.structs.replace(event, owner=owner, queue_sequence=start.sequence, model=start.model)
    if event.kind == "requeued":
        back = msgspec.json.decode(event.data, type=RequeuedBody)
        return msgspec.structs.replace(
            event,
            attempt=back.attempt,
            lost=back.lost,
            reason=back.reason,
            num_made=back.num_made,
            model=back.model,
            queue_sequence=back.sequence,
        )
    return event
