"""Which of a job's messages is the one it runs from, where a fallback model got a second one.

A hand-over has three steps: the message is stored at the fallback, `requeued` with the reason `fallback` names it in
the log, and the first message is removed. The log alone decides: whoever meets a message of another step goes on from
there, so any of them may be interrupted. Only a job that never started is handed over.
"""

from typing import Literal

from headrace.schemas.jobs import Job
from headrace.schemas.states import JobState

__all__ = ["Standing", "standing"]

Standing = Literal["own", "pending", "void"]
"""`own`: the job runs from this message. `pending`: it will, once the log says so. `void`: it never will (again)."""


def standing(state: JobState, job: Job) -> Standing:
    """What a message, decoded as `job`, is to its job, whose log says `state`.

    Where it is `void`, the log proves that another message of the job is stored; only the log's past decides, so a
    state that is a moment old errs towards `pending` or `own`, and the next append is refused.
    """
    if job.handed_from is not None and state.model in ("", job.handed_from):
        return "void" if state.was_started else "pending"
    return "own" if state.model in ("", job.model) else "void"
