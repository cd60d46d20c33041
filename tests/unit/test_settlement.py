"""What a job that ended gives back of what it paid: never more than that, and nothing that it used."""

import json

import pytest

from headrace.router.limits import Permit
from headrace.router.settlement import Paid, unused
from headrace.schemas import events
from headrace.schemas.events import Event, Owner
from headrace.schemas.refusals import Refusal
from headrace.schemas.states import JobState
from headrace.schemas.usage import Used

OWNER = Owner(worker="w", epoch="e")
NEVER = JobState()
STARTED = JobState(was_started=True)
ALL, NOTHING = Used(1, 130), Used()


def paid(*, is_streaming: bool = True) -> Paid:
    """For a prompt of 30 tokens and 100 new ones."""
    return Paid("j", Permit("a", 7, Used(1, 130)), 100, is_streaming)


def done(answer: bytes) -> Event:
    return events.done("j", OWNER, attempt=1, offset=0, data=answer, body_hash="h")


def ended(kind: str, code: str | None = None) -> Event:
    error = Refusal(code=code, message="m") if code is not None else None
    return events.ended(kind, "j", attempt=1, offset=0, error=error)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_streaming", [True, False])
def test_an_answer_gives_back_the_tokens_that_it_could_have_had_more(is_streaming: bool) -> None:
    usage = {"prompt_tokens": 30, "completion_tokens": 12, "total_tokens": 42}
    answer = done(json.dumps({"object": "chat.completion", "usage": usage}).encode())
    assert unused(paid(is_streaming=is_streaming), answer, NEVER) == Used(0, 88)


@pytest.mark.parametrize(
    "answer",
    [b"", b"{}", b"[]", b'{"usage":null}', b'{"usage":{"prompt_tokens":3}}', b'{"usage":{"completion_tokens":900}}'],
)
def test_an_answer_that_does_not_tell_gives_back_nothing(answer: bytes) -> None:
    assert unused(paid(), done(answer), NEVER) == NOTHING


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize(
    "end",
    [ended("cancelled"), ended("expired", "queue_timeout"), ended("failed", "deadline_exceeded"), ended("failed")],
)
def test_what_no_worker_started_gives_back_all(end: Event, is_streaming: bool) -> None:
    assert unused(paid(is_streaming=is_streaming), end, NEVER) == ALL


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_failure_before_the_first_token_gives_back_all(is_streaming: bool) -> None:
    assert unused(paid(is_streaming=is_streaming), ended("failed", "engine_error"), STARTED) == ALL


@pytest.mark.parametrize(
    ("end", "num_tokens", "expected"),
    [
        (ended("cancelled"), 0, Used(1, 100)),  # its prompt was read
        (ended("cancelled"), 40, Used(0, 60)),
        (ended("cancelled"), 100, NOTHING),
        (ended("cancelled"), 140, NOTHING),
        (ended("failed", "deadline_exceeded"), 0, Used(1, 100)),
        (ended("failed", "deadline_exceeded"), 40, Used(0, 60)),
        (ended("failed", "not_resumable"), 40, Used(0, 60)),
    ],
)
def test_a_stream_that_was_cut_off_gives_back_what_was_not_generated(
    end: Event, num_tokens: int, expected: Used
) -> None:
    state = JobState(was_started=True, num_tokens=num_tokens)
    assert unused(paid(), end, state) == expected


@pytest.mark.parametrize("end", [ended("cancelled"), ended("failed", "deadline_exceeded")])
def test_of_an_answer_that_was_cut_off_nobody_knows_what_it_used(end: Event) -> None:
    assert unused(paid(is_streaming=False), end, STARTED) == NOTHING
