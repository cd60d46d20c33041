"""Handing a job that did not start in time over to its fallback model: what each message is, and what a worker does."""

from typing import Any

import msgspec
import pytest

from headrace.schemas import events, jobs
from headrace.schemas.events import AcceptedBody, Event, Owner
from headrace.schemas.handover import standing
from headrace.schemas.jobs import Job
from headrace.schemas.states import JobState, fold
from headrace.schemas.subjects import JobId, Tenant
from headrace.worker.claim import Action, Situation, decide

ME = Owner(worker="me", epoch="e", queue_sequence=7, beat=1)
FIRST = Job(
    tenant=Tenant("default"),
    job=JobId("j1"),
    op="chat",
    model="first",
    body=b"{}",
    body_hash="ab",
    accepted_at=1000.0,
    queue_timeout_s=60.0,
    deadline_s=600.0,
    need_tokens=10,
    fallback="second",
    fallback_pool="long",
)
SECOND = FIRST.handed_over(1061.0)
ACCEPTED = events.accepted("j1", AcceptedBody(job="j1", sequence=3, model="first"), body_hash="ab")
OVER = events.handed_over("j1", attempt=2, model="second", queue_sequence=7, body_hash="ab")


def started(model: str, attempt: int = 1) -> Event:
    return events.started("j1", ME, attempt=attempt, offset=0, body_hash="ab", model=model)


def log(*entries: Event) -> JobState:
    return fold(
        msgspec.structs.replace(entry, sequence=number, last_sequence=number - 1)
        for number, entry in enumerate(entries, start=1)
    )


LOST = events.requeued("j1", attempt=3, offset=0, reason="owner_lost", lost=ME)


def test_the_fallback_gets_the_same_job_with_as_long_to_wait_again_and_the_same_deadline() -> None:
    assert (SECOND.model, SECOND.handed_from, SECOND.fallback, SECOND.body_hash) == ("second", "first", None, "ab")
    assert SECOND.queue_until == 1121.0
    assert SECOND.deadline_at == FIRST.deadline_at
    assert FIRST.handed_over(1590.0).queue_until == FIRST.deadline_at
    assert jobs.decode_job(SECOND.headers(), b"{}") == SECOND
    assert jobs.decode_job(FIRST.headers(), b"{}") == FIRST


def test_the_log_says_whose_it_is_and_that_it_never_started() -> None:
    state = log(ACCEPTED, OVER)
    assert (state.model, state.queue_sequence, state.attempt) == ("second", 7, 2)
    assert (state.was_started, state.is_whole, state.faults) == (False, True, frozenset())
    running = log(ACCEPTED, OVER, started("second", 2))
    assert (running.model, running.was_started) == ("second", True)


@pytest.mark.parametrize(
    ("entries", "first", "second"),
    [
        ((), "own", "pending"),
        ((ACCEPTED,), "own", "pending"),
        ((ACCEPTED, started("first")), "own", "void"),
        ((ACCEPTED, started("first"), LOST), "own", "void"),
        ((ACCEPTED, OVER), "void", "own"),
        ((OVER,), "void", "own"),
        ((ACCEPTED, OVER, started("second", 2)), "void", "own"),
        ((ACCEPTED, OVER, started("second", 2), LOST), "void", "own"),
    ],
)
def test_one_message_at_a_time_is_the_one_it_runs_from(entries: tuple[Event, ...], first: str, second: str) -> None:
    state = log(*entries)
    assert (standing(state, FIRST), standing(state, SECOND)) == (first, second)


@pytest.mark.parametrize(
    ("entries", "job", "now", "action"),
    [
        ((ACCEPTED,), FIRST, 1060.0, Action.CLAIM),
        ((ACCEPTED,), FIRST, 1061.0, Action.FALL_BACK),
        ((ACCEPTED,), msgspec.structs.replace(FIRST, fallback=None), 1061.0, Action.EXPIRE_QUEUED),
        ((ACCEPTED, started("first"), LOST), FIRST, 1061.0, Action.CLAIM),
        ((ACCEPTED, OVER), FIRST, 1061.0, Action.LEAVE),
        ((ACCEPTED, OVER), FIRST, 9999.0, Action.LEAVE),
        ((ACCEPTED,), SECOND, 1061.0, Action.TAKE_OVER),
        ((), SECOND, 1061.0, Action.TAKE_OVER),
        ((ACCEPTED,), SECOND, 1122.0, Action.EXPIRE_QUEUED),
        ((ACCEPTED,), SECOND, 1601.0, Action.FAIL_DEADLINE),
        ((ACCEPTED, started("first")), SECOND, 1061.0, Action.LEAVE),
        ((ACCEPTED, OVER), SECOND, 1121.0, Action.CLAIM),
        ((ACCEPTED, OVER), SECOND, 1122.0, Action.EXPIRE_QUEUED),
        ((ACCEPTED, OVER, started("second", 2), LOST), SECOND, 1122.0, Action.CLAIM),
    ],
)
def test_what_a_worker_does_with_either_message(
    entries: tuple[Event, ...], job: Job, now: float, action: Action
) -> None:
    state = log(*entries)
    fields: dict[str, Any] = {"deadline_at": job.deadline_at, "queue_until": job.queue_until, "log_retention_s": 3600.0}
    situation = Situation(
        state=state,
        me=ME,
        now=now,
        max_faults=3,
        fits=True,
        standing=standing(state, job),
        has_fallback=job.fallback is not None,
        **fields,
    )
    assert decide(situation).action is action
