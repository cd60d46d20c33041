"""Dead letters: jobs that cost too many workers, kept with their request until somebody removes them."""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
from nats.aio.msg import Msg

from headrace.bus.batchget import batch_get
from headrace.bus.clock import parse_time
from headrace.bus.connection import (
    ERR_MESSAGE_NOT_FOUND,
    ERR_SEQUENCE_NOT_FOUND,
    ERR_STREAM_NOT_FOUND,
    ApiRefused,
    Bus,
    Stored,
    Unknown,
)
from headrace.errors import BrokerUnavailableError, NotProvisionedError
from headrace.schemas import subjects
from headrace.schemas.jobs import Job, decode_job
from headrace.schemas.subjects import LANES, Lane, QueueName

__all__ = ["DeadLetter", "DeadLetters", "write_dead_letter"]

_HDR_REASON: Final = "Headrace-Reason"
_HDR_FAULTS: Final = "Headrace-Faults"
_MAX_FAULTS_CHARS: Final = 500


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """One job that was given up. `job.body` is its request; `faults` name what it cost, as worker/epoch/engine run.

    `died_at` is unix seconds by the broker's clock. `pool` and `lane` are None where the letter does not say.
    """

    sequence: int
    died_at: float
    reason: str
    attempts: int
    faults: tuple[str, ...]
    job: Job
    pool: str | None = None
    lane: Lane | None = None


class _State(msgspec.Struct, frozen=True):
    first_seq: int = 0
    last_seq: int = 0
    subjects: dict[str, int] | None = None


class _Info(msgspec.Struct, frozen=True):
    state: _State = _State()


class DeadLetters:
    """Reads the dead letters of a deployment, and removes single ones. A removed one is gone for good."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._stream = bus.names.dead_stream

    async def newest(self, *, limit: int, tenant: str | None = None, model: str | None = None) -> list[DeadLetter]:
        """The newest that match, oldest of them first. Raises NotProvisionedError, BrokerUnavailableError."""
        subject = self._bus.names.dead_filter(tenant=tenant, model=model)
        state = (await self._info(subject)).state
        window = limit
        while True:
            start = max(state.first_seq, state.last_seq - window + 1)
            messages = await batch_get(self._bus, self._stream, subject, from_sequence=start, up_to=state.last_seq)
            if len(messages) >= limit or start <= state.first_seq:
                return [letter for message in messages[-limit:] if (letter := _decode(message)) is not None]
            window *= 4

    async def count(self, *, tenant: str | None = None, model: str | None = None) -> int:
        """How many match."""
        found = (await self._info(self._bus.names.dead_filter(tenant=tenant, model=model))).state.subjects or {}
        return sum(found.values())

    async def find(self, job: str, *, tenant: str, model: str | None = None) -> list[DeadLetter]:
        """Those of one job of a tenant: one, unless several models had a job of that id."""
        subject = self._bus.names.dead_filter(tenant=tenant, model=model, job=job)
        state = (await self._info(subject)).state
        messages = await batch_get(self._bus, self._stream, subject, from_sequence=state.first_seq)
        return [letter for message in messages if (letter := _decode(message)) is not None]

    async def remove(self, letter: DeadLetter) -> bool:
        """Delete it; False if it was gone."""
        try:
            await self._bus.api(f"STREAM.MSG.DELETE.{self._stream}", {"seq": letter.sequence, "no_erase": True})
        except ApiRefused as refused:
            if refused.err_code in (ERR_MESSAGE_NOT_FOUND, ERR_SEQUENCE_NOT_FOUND):
                return False
            raise BrokerUnavailableError(f"the dead letter of job {letter.job.job} stays: {refused}") from None
        return True

    async def _info(self, subject: str) -> _Info:
        try:
            data = await self._bus.api(f"STREAM.INFO.{self._stream}", {"subjects_filter": subject})
        except ApiRefused as refused:
            if refused.err_code == ERR_STREAM_NOT_FOUND:
                raise NotProvisionedError(f"there is no stream {self._stream}; run `headrace provision`") from None
            raise BrokerUnavailableError(f"{self._stream}: {refused}") from None
        return msgspec.json.decode(data, type=_Info)


async def write_dead_letter(
    bus: Bus, job: Job, *, reason: str, attempts: int, faults: Iterable[str], queue: QueueName | None = None
) -> None:
    """Store the job's request under its own subject; once, however often it is tried.

    `queue` is where it waited. Raises BrokerUnavailableError where the outcome is not certain; the queue message must
    then stay.
    """
    headers = job.headers() | {
        _HDR_REASON: reason,
        subjects.HDR_ATTEMPT: str(attempts),
        _HDR_FAULTS: ",".join(sorted(faults))[:_MAX_FAULTS_CHARS],
        subjects.HDR_EXPECTED_LAST_SUBJECT_SEQUENCE: "0",
    }
    if queue is not None:
        headers |= {subjects.HDR_POOL: queue.pool, subjects.HDR_PRIORITY: queue.lane}
    result = await bus.store(bus.names.dead(job.tenant, job.model, job.job), job.body, headers=headers)
    if isinstance(result, Stored) or (not isinstance(result, Unknown) and result.is_lost_race):
        return
    why = result.reason if isinstance(result, Unknown) else result.description
    raise BrokerUnavailableError(f"the dead letter of job {job.job} is not stored: {why}")


def _decode(message: Msg) -> DeadLetter | None:
    """None for a message that is no dead letter of ours."""
    headers: Mapping[str, str] = message.headers or {}
    job = decode_job(headers, message.data)
    if job is None:
        return None
    attempts = headers.get(subjects.HDR_ATTEMPT, "")
    return DeadLetter(
        sequence=int(headers[subjects.HDR_SEQUENCE]),
        died_at=parse_time(headers.get(subjects.HDR_TIMESTAMP, "")) or 0.0,
        reason=headers.get(_HDR_REASON, ""),
        attempts=int(attempts) if attempts.isascii() and attempts.isdigit() else 0,
        faults=tuple(fault for fault in headers.get(_HDR_FAULTS, "").split(",") if fault),
        job=job,
        pool=headers.get(subjects.HDR_POOL),
        lane=next((lane for lane in LANES if lane == headers.get(subjects.HDR_PRIORITY)), None),
    )
