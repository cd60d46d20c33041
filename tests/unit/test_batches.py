"""Batches: their states, their lines, and the window of those under way."""

import asyncio
import json
from typing import Any

import pytest

from headrace.batch import Window
from headrace.schemas.batch_lines import (
    BatchRequest,
    LineCheck,
    answered,
    read_request_line,
    refused,
    unanswered,
)
from headrace.schemas.batches import BATCH_ENDED, BATCH_MOVES, BatchRecord, batch_object, job_of_line, moved
from headrace.schemas.refusals import Refusal
from headrace.schemas.subjects import Tenant, is_job_id

RECORD = BatchRecord(
    id="batch_1",
    tenant=Tenant("default"),
    endpoint="/v1/completions",
    input_file_id="file-1",
    completion_window="24h",
    created_at=10,
    expires_at=86_410,
)
REQUEST = BatchRequest(number=7, custom_id='c"7', url="/v1/completions", model="m", body=b"{}")


def line(**changes: Any) -> bytes:
    whole = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "hi"}}
    return json.dumps({**whole, **changes}).encode()


def test_every_state_can_be_reached_and_every_other_leads_to_an_end() -> None:
    reached, todo = {"validating"}, ["validating"]
    while todo:
        for after in BATCH_MOVES[todo.pop()] - reached:  # type: ignore[index]
            reached.add(after)
            todo.append(after)
    assert reached == set(BATCH_MOVES)
    assert {"completed", "failed", "expired", "cancelled"} == BATCH_ENDED


def test_a_step_that_is_not_in_the_table_is_an_error() -> None:
    going = moved(RECORD, "in_progress", now=12.7)
    assert going.at == {"in_progress": 12}
    with pytest.raises(ValueError, match="in_progress to completed"):
        moved(going, "completed", now=13)


def test_a_batch_in_openais_form() -> None:
    shown = batch_object(moved(RECORD, "in_progress", now=12.7, total=3))
    assert shown["in_progress_at"] == 12
    assert shown["completed_at"] is None
    assert "validating_at" not in shown
    assert shown["errors"] is None
    assert shown["request_counts"] == {"total": 3, "completed": 0, "failed": 0}


def test_names_of_jobs_are_job_ids_and_differ() -> None:
    batch = f"batch_{'f' * 32}"
    names = [job_of_line(batch, line, number) for line in (1, 11, 1_000_000) for number in (0, 1, 99_999)]
    assert len(set(names)) == len(names)
    assert all(map(is_job_id, names))


def test_a_line_becomes_a_request_that_does_not_stream() -> None:
    request = read_request_line(3, line())
    assert isinstance(request, BatchRequest)
    assert (request.number, request.custom_id, request.op, request.model) == (3, "a", "completions", "m")
    assert json.loads(request.body) == {"model": "m", "prompt": "hi", "stream": False}
    embeddings = read_request_line(1, line(url="/v1/embeddings", body={"model": "m", "input": "x"}))
    assert isinstance(embeddings, BatchRequest)
    assert json.loads(embeddings.body) == {"model": "m", "input": "x"}
    assert read_request_line(3, line()) == request  # byte for byte: it is what a job is known by


def test_a_file_has_a_limit_of_lines() -> None:
    check = LineCheck(max_lines=2)
    taken = [check.take(number, line(custom_id=str(number))) for number in (1, 2, 3)]
    assert isinstance(taken[-1], Refusal)
    assert taken[-1].message == "Line 3: A file has at most 2 requests."


def test_messages_never_repeat_the_input() -> None:
    for bad in (
        line(custom_id=["secret"]),
        line(url="/secret"),
        line(method="secret"),
        line(body={"model": "\x00secret"}),
    ):
        refusal = read_request_line(1, bad)
        assert isinstance(refusal, Refusal)
        assert "secret" not in refusal.message


def test_lines_of_results() -> None:
    good = answered(REQUEST, batch="batch_1", job="j", response=b'{"a": \n 1}')
    assert b"\n" not in good.data
    assert json.loads(good.data) == {
        "id": "batch_req_1_7",
        "custom_id": 'c"7',
        "response": {"status_code": 200, "request_id": "j", "body": {"a": 1}},
        "error": None,
    }
    bad = refused(REQUEST, batch="batch_1", job="j", refusal=Refusal(code="model_not_found", message="no"))
    assert bad.is_failed
    assert json.loads(bad.data)["response"]["status_code"] == 404
    left = unanswered(REQUEST, batch="batch_1", code="batch_expired", message="late")
    assert json.loads(left.data)["error"] == {"code": "batch_expired", "message": "late"}


async def test_a_window_lets_so_many_in_and_the_next_when_one_leaves() -> None:
    window = Window(2)
    await window.enter()
    await window.enter()
    third = asyncio.create_task(window.enter())
    await asyncio.sleep(0)
    assert not third.done()
    window.leave()
    await asyncio.wait_for(third, 1)


async def test_a_window_shrinks_once_for_many_refusals_and_grows_again() -> None:
    window = Window(10)
    for _ in range(5):
        window.refused()
    assert window.limit == 7.0
    for _ in range(7):
        window.answered()
    assert 7.5 < window.limit <= 8.0
    for _ in range(100):
        window.answered()
    assert window.limit == 10.0


async def test_a_window_holds_so_many_bytes_and_one_line_of_any_size() -> None:
    window = Window(10)
    await asyncio.wait_for(window.enter(100_000_000), 1)
    second = asyncio.create_task(window.enter(10))
    await asyncio.sleep(0)
    assert not second.done()
    window.leave(100_000_000)
    await asyncio.wait_for(second, 1)
    await asyncio.wait_for(window.enter(1_000_000), 1)


async def test_no_more_refused_lines_ask_again_at_once_than_the_window_has_room_for() -> None:
    window = Window(4)
    for _ in range(4):
        await window.enter()
    window.limit = 2.0
    lines = [asyncio.create_task(window.again(0.0)) for _ in range(4)]
    asking = await asyncio.wait_for(_first_done(lines), 1)
    assert len(asking) == max(1, int(window.limit))
    window.leave()
    await asyncio.wait_for(_first_done([each for each in lines if each not in asking]), 1)


async def _first_done(tasks: list[asyncio.Task[None]]) -> list[asyncio.Task[None]]:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for _ in range(10):
        await asyncio.sleep(0)
    return [task for task in tasks if task.done()]


async def test_after_a_refusal_nobody_asks_again_before_its_time_unless_there_was_an_answer() -> None:
    window = Window(4)
    for _ in range(3):
        await window.enter()
    early = asyncio.create_task(window.again(0.0))
    await asyncio.sleep(0)
    late = asyncio.create_task(window.again(30.0))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not early.done()
    window.answered()
    await asyncio.wait_for(early, 1)
    late.cancel()
