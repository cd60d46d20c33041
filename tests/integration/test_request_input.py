"""Bad input over NATS: the right code, before anything is stored, and nothing else is disturbed (CASES, group 1)."""

import json
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from headrace.bus.jobqueue import JobQueue
from headrace.client import Done
from headrace.errors import RequestError
from tests.deployment import MODEL, Deployment, deployment, header, sim

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 3}


@pytest_asyncio.fixture
async def running(broker_url: str, prefix: str) -> AsyncIterator[Deployment]:
    async with deployment(broker_url, prefix) as started:
        await started.worker(sim(max_model_len=32, kv_tokens=64, block_size=1))
        yield started


@pytest_asyncio.fixture
async def nc(broker_url: str) -> AsyncIterator[NatsClient]:
    connection = await nats.connect(broker_url)
    yield connection
    await connection.close()


async def first_answer(
    running: Deployment,
    nc: NatsClient,
    body: bytes | dict[str, Any],
    *,
    op: str = "chat",
    token: str = MODEL,
    tenant: str = "default",
    headers: dict[str, str] | None = None,
) -> Msg:
    inbox = nc.new_inbox()
    subscription = await nc.subscribe(inbox)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    await nc.publish(f"{running.settings.prefix}.infer.{tenant}.{op}.{token}", data, reply=inbox, headers=headers)
    message = await subscription.next_msg(5)
    await subscription.unsubscribe()
    return message


async def refusal(running: Deployment, nc: NatsClient, body: bytes | dict[str, Any], **how: Any) -> dict[str, Any]:
    """The error a request is refused with; nothing may have been stored, and a good request must still be served."""
    message = await first_answer(running, nc, body, **how)
    assert header(message, "Headrace-Event") == "error", message.data
    assert len(message.data) <= 4096
    assert await JobQueue(running.bus, MODEL).counts() == {}
    error: dict[str, Any] = json.loads(message.data)["error"]
    assert set(error) == {"message", "type", "code", "param"}
    done = await running.client.complete(model=MODEL, **CHAT)
    assert isinstance(done, Done)
    return error


async def test_null_max_tokens_of_a_completion_is_as_if_absent(running: Deployment) -> None:  # REQ-2
    done = await running.client.complete(model=MODEL, prompt="a b", max_tokens=None, ignore_eos=True)
    assert done.usage is not None
    assert done.usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "expected"),
    [(32, 1, "context_length_exceeded"), (31, 1, 1), (20, 13, "context_length_exceeded"), (20, None, 12)],
)
async def test_the_context_length_is_kept_exactly(
    running: Deployment, nc: NatsClient, num_prompt: int, max_tokens: int | None, expected: str | int
) -> None:  # REQ-3
    prompt = " ".join("x" * num_prompt)
    body = {"prompt": prompt, "ignore_eos": True, **({"max_tokens": max_tokens} if max_tokens else {})}
    if isinstance(expected, str):
        error = await refusal(running, nc, body, op="completions")
        assert error["code"] == expected
        assert all(str(number) in error["message"] for number in (32, num_prompt, max_tokens))
        return
    done = await running.client.complete(model=MODEL, **body)
    assert done.usage is not None
    assert done.usage.completion_tokens == expected


async def test_requests_of_one_outside_id_are_jobs_of_their_own(running: Deployment) -> None:  # REQ-4
    first = running.client.stream(model=MODEL, **CHAT, user="dup-1")
    second = running.client.stream(model=MODEL, **CHAT, user="dup-1")
    assert first.job != second.job
    events = [[event async for event in stream] for stream in (first, second)]
    assert all(isinstance(seen[-1], Done) for seen in events)


@pytest.mark.parametrize("job", ["a.b", "*", ">", "x" * 65, "", "né", "a b"])
async def test_an_id_that_is_no_token_is_refused(running: Deployment, nc: NatsClient, job: str) -> None:  # REQ-5
    error = await refusal(running, nc, CHAT, headers={"Headrace-Id": job})
    assert (error["code"], error["param"]) == ("invalid_value", "Headrace-Id")


async def test_headers_have_a_bound(running: Deployment, nc: NatsClient) -> None:  # REQ-5
    error = await refusal(running, nc, CHAT, headers={"X-Request-Id": "x" * 100_000})
    assert error["code"] == "header_too_large"


async def test_max_completion_tokens_wins_in_chat_and_is_refused_in_completions(
    running: Deployment, nc: NatsClient
) -> None:  # REQ-7
    body = {**CHAT, "max_completion_tokens": 7, "max_tokens": 2, "ignore_eos": True}
    done = await running.client.complete(model=MODEL, **body)
    assert done.usage is not None
    assert done.usage.completion_tokens == 7
    error = await refusal(running, nc, {"prompt": "x", "max_completion_tokens": 3}, op="completions")
    assert (error["code"], error["param"]) == ("unsupported_parameter", "max_completion_tokens")


async def test_12_000_wrong_items_make_one_short_error(running: Deployment, nc: NatsClient) -> None:  # REQ-8
    error = await refusal(running, nc, {"messages": [{"role": 7, "content": "canary-7f3"}] * 12_000})
    assert error["code"] == "invalid_value"
    assert "canary" not in json.dumps(error)


async def test_a_body_over_the_limit_and_one_nested_too_deep(running: Deployment, nc: NatsClient) -> None:  # REQ-9
    large = json.dumps({"messages": [{"role": "user", "content": "x" * 1_000_000}]}).encode()
    assert (await refusal(running, nc, large))["code"] == "request_too_large"
    assert (await refusal(running, nc, b'{"a":' * 500 + b"1" + b"}" * 500))["code"] == "json_too_deep"
    assert (await refusal(running, nc, b"[" * 100_000))["code"] == "json_too_deep"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"messages": NaN}', b"\x00" * 100])
async def test_what_is_not_json_is_refused(running: Deployment, nc: NatsClient, body: bytes) -> None:
    assert (await refusal(running, nc, body))["code"] in ("invalid_json", "invalid_value")


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"Headrace-Priority": "urgent"}, "Headrace-Priority"),
        ({"Headrace-Pool": "nowhere"}, "Headrace-Pool"),
        ({"Headrace-Pool": "a.b.>"}, "Headrace-Pool"),
        ({"Headrace-Queue-Timeout": "-1"}, "Headrace-Queue-Timeout"),
        ({"Headrace-Queue-Timeout": "nan"}, "Headrace-Queue-Timeout"),
        ({"Headrace-Deadline": "soon"}, "Headrace-Deadline"),
        ({"Headrace-Deadline": "1e99"}, "Headrace-Deadline"),
    ],
)
async def test_a_header_out_of_range_is_named(
    running: Deployment, nc: NatsClient, headers: dict[str, str], param: str
) -> None:
    error = await refusal(running, nc, CHAT, headers=headers)
    assert (error["code"], error["param"]) == ("invalid_value", param)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ({"op": "sing"}, "invalid_value"),
        ({"token": "no-such-model"}, "model_not_found"),
        ({"token": "=ZZ"}, "invalid_value"),
        ({"token": "org=2fm"}, "invalid_value"),
        ({"tenant": "Nobody"}, "invalid_value"),
    ],
)
async def test_a_subject_that_names_nothing_is_refused(
    running: Deployment, nc: NatsClient, how: dict[str, str], code: str
) -> None:
    assert (await refusal(running, nc, CHAT, **how))["code"] == code


async def test_what_no_worker_could_hold_is_refused_at_once(broker_url: str, prefix: str, nc: NatsClient) -> None:
    async with deployment(broker_url, prefix) as running:
        await running.worker(sim(kv_tokens=64, block_size=1, max_model_len=8192))
        error = await refusal(running, nc, {**CHAT, "max_tokens": 500})
    assert error["code"] == "exceeds_capacity"


async def test_a_reply_that_is_no_inbox_is_refused_and_nothing_is_sent_to_another_tenants(
    running: Deployment, nc: NatsClient
) -> None:
    data = json.dumps(CHAT).encode()
    subject = f"{running.settings.prefix}.infer.other.chat.{MODEL}"
    told = await nc.subscribe("plain.subject")
    await nc.publish(subject, data, reply="plain.subject")
    assert json.loads((await told.next_msg(5)).data)["error"]["param"] == "reply"
    victim = await nc.subscribe("_INBOX.default.>")
    services = await nc.subscribe("_INBOX._svc.spoofed")
    own_log = f"{running.settings.prefix}.log.0.default.forged"
    for reply in ("_INBOX.default.evil", "_INBOX._svc.spoofed", own_log):
        await nc.publish(subject, data, reply=reply)
    # An answered request after them shows that they were handled and got no answer.
    assert header((await first_answer(running, nc, CHAT)), "Headrace-Event") == "accepted"
    assert await running.client.complete(model=MODEL, **CHAT)
    assert services.pending_msgs == 0
    seen = [victim._pending_queue.get_nowait() for _ in range(victim.pending_msgs)]
    assert not any("evil" in message.subject for message in seen)
    with pytest.raises(RequestError):
        await running.client.status("forged")
    await told.unsubscribe()


async def test_a_client_error_reaches_the_sdk_as_a_typed_one(running: Deployment) -> None:
    with pytest.raises(RequestError) as caught:
        await running.client.complete(model=MODEL, messages=[{"role": "user", "content": 5}])
    assert (caught.value.code, caught.value.status) == ("invalid_value", 400)
    assert caught.value.param == "messages[0].content"
