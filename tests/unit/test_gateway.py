"""What the gateway decides without a network: requests as read, frames as written, what is open."""

import asyncio
import contextlib
import json
import socket
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.types import Message

from headrace.client import Delta, Done
from headrace.client.events import from_event
from headrace.errors import BrokerUnavailableError, ConfigError, RequestError
from headrace.gateway.errors import as_response, refusal_of
from headrace.gateway.lifecycle import listening
from headrace.gateway.requests import Asked, read_request
from headrace.gateway.sse import Frames, error_frames, waiting_comment
from headrace.gateway.watching import Gone, OpenRequests
from headrace.schemas.events import Event
from headrace.schemas.openai import RequestLimits
from headrace.schemas.refusals import CODES, Refusal


def read(body: dict[str, Any], **headers: str) -> Asked | Refusal:
    named = Headers({f"X-Headrace-{name.replace('_', '-')}": value for name, value in headers.items()})
    return read_request("chat", named, json.dumps(body).encode(), limits=RequestLimits())


def asked(body: dict[str, Any], **headers: str) -> Asked:
    found = read({"model": "m", **body}, **headers)
    assert isinstance(found, Asked)
    return found


def test_without_stream_an_answer_is_whole() -> None:
    for body in ({}, {"stream": None}, {"stream": False}):
        found = asked(body)
        assert not found.is_streaming
        assert json.loads(found.body)["stream"] is False
    assert asked({"stream": True}).is_streaming


def test_a_body_that_says_what_it_wants_is_passed_on_as_it_is() -> None:
    data = b'{ "model":"m",\n "stream":true, "a":1.0e2, "a":2 }'
    found = read_request("chat", Headers(), data, limits=RequestLimits())
    assert isinstance(found, Asked)
    assert found.body == data


def test_the_same_request_is_the_same_body_every_time() -> None:
    assert asked({"messages": [], "n": 1}).body == asked({"messages": [], "n": 1}).body


@pytest.mark.parametrize(
    ("tier", "header", "lane"),
    [
        ("priority", None, "high"),
        ("flex", None, "low"),
        ("default", None, None),
        ("auto", None, None),
        (None, None, None),
        (["flex"], None, None),
        ("flex", "high", "high"),
        (None, "nonsense", "nonsense"),
    ],
)
def test_lanes(tier: Any, header: str | None, lane: str | None) -> None:
    headers = {} if header is None else {"Priority": header}
    assert asked({"service_tier": tier}, **headers).priority == lane


def test_headers() -> None:
    found = asked({}, Id="a-b", Pool="batch", Queue_Timeout="1.5", Deadline="20", Fallback="other")
    assert (found.job_id, found.pool, found.queue_timeout_s, found.deadline_s, found.fallback) == (
        "a-b",
        "batch",
        1.5,
        20.0,
        "other",
    )


@pytest.mark.parametrize("name", ["Queue_Timeout", "Deadline"])
@pytest.mark.parametrize("value", ["", "soon", "-1", "0", "nan", "1,5"])
def test_seconds_that_are_none(name: str, value: str) -> None:
    refusal = read({"model": "m"}, **{name: value})
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.param) == ("invalid_value", f"X-Headrace-{name.replace('_', '-')}")


@pytest.mark.parametrize("model", [None, "", 7, "a" * 101, "a\nb", ["m"]])
def test_models_that_are_none(model: Any) -> None:
    refusal = read({"model": model})
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.param) == ("invalid_value", "model")


# Errors


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_its_status_and_says_when_to_retry(code: str) -> None:
    response = as_response(Refusal(code=code, message="why", param="here"))
    assert response.status_code == CODES[code].status
    assert json.loads(bytes(response.body))["error"] == {
        "message": "why",
        "type": CODES[code].type,
        "param": "here",
        "code": code,
    }
    assert response.headers["x-should-retry"] == str(CODES[code].is_retryable).lower()
    assert ("retry-after" in response.headers) == (response.status_code in (429, 503))
    assert int(response.headers.get("retry-after", "1")) >= 1


def test_the_names_of_headers_are_those_of_http() -> None:
    told = refusal_of(
        RequestError(Refusal(code="invalid_value", message="Headrace-Pool names no pool", param="Headrace-Pool"))
    )
    assert (told.message, told.param) == ("X-Headrace-Pool names no pool", "X-Headrace-Pool")
    again = refusal_of(RequestError(told))
    assert again == told


@pytest.mark.parametrize("error", [BrokerUnavailableError("at nats://u:secret@h"), ConfigError("secret"), ValueError()])
def test_what_went_wrong_inside_is_not_told(error: Exception) -> None:
    assert "secret" not in refusal_of(error).message


# Frames


def delta(text: str, *, offset: int, count: int = 1, finish: str | None = None) -> Delta:
    chunk = {"id": "x", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}
    found = from_event(
        Event(kind="delta", job="j", offset=offset, count=count, data=json.dumps(chunk, separators=(",", ":")).encode())
    )
    assert isinstance(found, Delta)
    return found


def done(text: str, *, num_tokens: int, finish: str = "stop", num_choices: int = 1) -> Done:
    choices = [
        {"index": index, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
        for index in range(num_choices)
    ]
    response = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": choices}
    response["usage"] = {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": 1 + num_tokens}
    found = from_event(Event(kind="done", job="j", offset=num_tokens, data=json.dumps(response).encode()))
    assert isinstance(found, Done)
    return found


def chunks_of(data: bytes | None) -> list[Any]:
    assert data is not None
    assert data.endswith(b"\n\n")
    frames = data.decode().split("\n\n")[:-1]
    assert all(frame.startswith("data: ") for frame in frames)
    return [frame[6:] if frame == "data: [DONE]" else json.loads(frame[6:]) for frame in frames]


def test_the_finish_reason_comes_once() -> None:
    frames = Frames(has_usage=False)
    (first,) = chunks_of(frames.delta(delta("a", offset=0)))
    assert first["headrace"] == {"offset": 1}
    assert "usage" not in first
    last, end = chunks_of(frames.end(done("a", num_tokens=1)))
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert end == "[DONE]"

    frames = Frames(has_usage=False)
    frames.delta(delta("a", offset=0, finish="stop"))
    assert chunks_of(frames.end(done("a", num_tokens=1))) == ["[DONE]"]


def test_usage_is_a_frame_of_its_own_and_null_before() -> None:
    frames = Frames(has_usage=True)
    (first,) = chunks_of(frames.delta(delta("a", offset=0)))
    assert first["usage"] is None
    last, usage, _ = chunks_of(frames.end(done("a", num_tokens=1)))
    assert last["usage"] is None
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 1)


def test_an_answer_without_deltas_is_one_chunk() -> None:
    for text in ("all of it", ""):
        whole, last, _ = chunks_of(Frames(has_usage=False).end(done(text, num_tokens=0)))
        assert whole["choices"][0]["delta"] == {"role": "assistant", "content": text}
        assert last["choices"][0]["finish_reason"] == "stop"


def test_a_hole_is_seen() -> None:
    frames = Frames(has_usage=False, after=4)
    assert frames.delta(delta("x", offset=5)) is None
    assert Frames(has_usage=False, after=4).end(done("a b c d e", num_tokens=5)) is None
    frames = Frames(has_usage=False, after=4)
    assert frames.delta(delta("x", offset=4, count=2)) is not None
    assert frames.end(done("a", num_tokens=6)) is not None
    assert chunks_of(Frames(has_usage=False, after=5).end(done("a", num_tokens=5)))[-1] == "[DONE]"


def test_an_answer_that_is_no_text_is_one_frame() -> None:
    response = b'{"object":"list","data":[]}'
    found = from_event(Event(kind="done", job="j", data=response))
    assert isinstance(found, Done)
    assert chunks_of(Frames(has_usage=True).end(found)) == [{"object": "list", "data": []}, "[DONE]"]


def test_an_error_is_a_frame_and_the_end() -> None:
    error, end = chunks_of(error_frames(Refusal(code="stream_gap", message="gone")))
    assert (error["error"]["code"], end) == ("stream_gap", "[DONE]")


@pytest.mark.parametrize(
    ("position", "eta_s", "line"),
    [
        (3, 11.2, b": queued, position 3, about 12 s\n\n"),
        (0, 0.0, b": queued, position 0, about 0 s\n\n"),
        (3, float("inf"), b": queued, position 3\n\n"),
        (None, None, b": queued\n\n"),
    ],
)
def test_comments(position: int | None, eta_s: float | None, line: bytes) -> None:
    assert waiting_comment(position, eta_s) == line


def test_a_comment_says_that_the_model_is_paused() -> None:
    assert waiting_comment(3, None, is_paused=True) == b": queued, position 3, the model is paused\n\n"


# What is open


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def left() -> Message:
    return {"type": "http.disconnect"}


async def test_work_is_done_or_given_up() -> None:
    opened = OpenRequests(limit=1)
    was_cancelled = asyncio.Event()

    async def for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()

    async def fail() -> None:
        raise LookupError

    assert await opened.unless_gone(asyncio.sleep(0, "result"), never) == "result"
    assert await opened.unless_gone(for_ever(), left) is Gone.CLIENT
    assert was_cancelled.is_set()
    with pytest.raises(LookupError):
        await opened.unless_gone(fail(), never)
    working = asyncio.create_task(opened.unless_gone(for_ever(), never))
    await asyncio.sleep(0)
    opened.end_all()
    assert await working is Gone.PROCESS
    assert await opened.unless_gone(for_ever(), never) is Gone.PROCESS


def test_no_more_are_open_than_may_be() -> None:
    opened = OpenRequests(limit=1)
    with opened.one_more("a", is_alone=True):
        with pytest.raises(RequestError) as refused, opened.one_more("a", is_alone=True):
            pass
        assert refused.value.code == "rate_limited"
    with opened.one_more("a", is_alone=True):
        pass
    opened.end_all()
    with pytest.raises(RequestError) as over, opened.one_more("a", is_alone=True):
        pass
    assert over.value.code == "shutting_down"


@given(st.lists(st.sampled_from("abcd"), max_size=60), st.integers(2, 24))
def test_no_tenant_can_keep_the_others_out(asked: list[str], limit: int) -> None:
    opened, taken = OpenRequests(limit=limit), Counter[str]()
    with contextlib.ExitStack() as stack:
        for tenant in asked:
            num_free = limit - taken.total()
            try:
                stack.enter_context(opened.one_more(tenant, is_alone=False))
            except RequestError:
                assert taken[tenant] >= num_free
            else:
                taken[tenant] += 1
                assert taken[tenant] <= (limit + 1) // 2
                assert taken.total() <= limit
        num_left = limit - taken.total()
        assert len(taken) > 1 or num_left >= limit // 2
        if num_left:  # whoever has none yet is always let in
            stack.enter_context(opened.one_more("another", is_alone=False))
    with opened.one_more("a", is_alone=False):
        pass


async def test_what_is_written_to_a_client_is_sent_at_once() -> None:
    accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue(1)

    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.put_nowait(writer)

    with listening("127.0.0.1", 0) as bound:
        async with await asyncio.start_server(on_client, sock=bound):
            _, client = await asyncio.open_connection(*bound.getsockname())
            async with asyncio.timeout(5):
                writer = await accepted.get()
            assert writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for each in (writer, client):
                each.close()
