"""Dead letters: jobs that cost too many workers, kept with their request."""

from collections.abc import Iterable
from typing import Final

from headrace.bus.connection import Bus, Stored, Unknown
from headrace.errors import BrokerUnavailableError
from headrace.schemas import subjects
from headrace.schemas.jobs import Job

__all__ = ["write_dead_letter"]

_HDR_REASON: Final = "Headrace-Reason"
_HDR_FAULTS: Final = "Headrace-Faults"
_MAX_FAULTS_CHARS: Final = 500


async def write_dead_letter(bus: Bus, job: Job, *, reason: str, attempts: int, faults: Iterable[str]) -> None:
    """Store the job's request under its own subject; once, however often it is tried.

    Raises BrokerUnavailableError where that is not certain; the queue message must then stay.
    """
    headers = job.headers() | {
        _HDR_REASON: reason,
        subjects.HDR_ATTEMPT: str(attempts),
        _HDR_FAULTS: ",".join(sorted(faults))[:_MAX_FAULTS_CHARS],
        subjects.HDR_EXPECTED_LAST_SUBJECT_SEQUENCE: "0",
    }
    result = await bus.store(bus.names.dead(job.tenant, job.model, job.job), job.body, headers=headers)
    if isinstance(result, Stored) or (not isinstance(result, Unknown) and result.is_lost_race):
        return
    why = result.reason if isinstance(result, Unknown) else result.description
    raise BrokerUnavailableError(f"the dead letter of job {job.job} is not stored: {why}")
