"""Ends of jobs that nobody chose, worded in one place: whoever meets a hopeless job ends it the same way."""

from headrace.schemas import events
from headrace.schemas.events import Event, Owner
from headrace.schemas.jobs import Job
from headrace.schemas.refusals import Refusal
from headrace.schemas.states import JobState

__all__ = ["deadline_exceeded", "end_of", "faults_exhausted", "queue_timeout"]


def deadline_exceeded(job: Job) -> Refusal:
    """The job's deadline has passed."""
    return Refusal(code="deadline_exceeded", message=f"the deadline of {job.deadline_s:g} s has passed")


def queue_timeout(job: Job) -> Refusal:
    """The job did not start in time."""
    return Refusal(code="queue_timeout", message=f"the request did not start within {job.queue_timeout_s:g} s")


def faults_exhausted(state: JobState) -> Refusal:
    """The job cost too many workers or engines."""
    return Refusal(
        code="job_failed",
        message=f"the job was given up after {len(state.faults)} workers or engines failed while running it",
    )


def end_of(state: JobState, job: Job, refusal: Refusal, *, owner: Owner | None = None, is_dead: bool = False) -> Event:
    """The terminal event that a refusal makes of a job: `expired` for a queue timeout, else `failed`."""
    return events.ended(
        "expired" if refusal.code == "queue_timeout" else "failed",
        job.job,
        attempt=state.attempt,
        offset=state.num_tokens,
        error=refusal,
        body_hash=job.body_hash,
        owner=owner,
        is_dead=is_dead,
    )
