"""The gateway under the official `openai` client, unmodified."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.deployment import MODEL, Deployment, deployment, sim

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


@pytest_asyncio.fixture
async def running(broker_url: str, prefix: str) -> AsyncIterator[Deployment]:
    async with deployment(broker_url, prefix) as started:
        yield started


@pytest_asyncio.fixture
async def client(running: Deployment) -> AsyncIterator[AsyncOpenAI]:
    gateway = await running.gateway()
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0, timeout=20) as connected:
        yield connected


async def chunks_of(client: AsyncOpenAI, **parameters: Any) -> list[Any]:
    stream = await client.chat.completions.create(
        **{"model": MODEL, "messages": HELLO, "max_tokens": 5, **parameters}, stream=True
    )
    return [chunk async for chunk in stream]


async def test_a_chat(running: Deployment, client: AsyncOpenAI) -> None:
    await running.worker()
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5)
    assert answer.choices[0].message.content is not None
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(answer.choices[0].message.content.split()) == 5
    assert answer.object == "chat.completion"
    assert answer._request_id is not None

    chunks = await chunks_of(client)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in chunks)


async def test_usage_comes_last_and_only_when_asked_for(running: Deployment, client: AsyncOpenAI) -> None:
    await running.worker()
    *chunks, last = await chunks_of(client, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == 5
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks)
    assert all(chunk.choices for chunk in chunks)


async def test_several_choices(running: Deployment, client: AsyncOpenAI) -> None:
    await running.worker()
    chunks = await chunks_of(client, n=3)
    texts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5, n=3)
    assert texts == [choice.message.content for choice in answer.choices]
    finished = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(finished) == [0, 1, 2]


async def test_completions_embeddings_and_models(running: Deployment, client: AsyncOpenAI) -> None:
    await running.worker()
    answer = await client.completions.create(model=MODEL, prompt="hello")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    stream = await client.completions.create(model=MODEL, prompt="hello", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == answer.choices[0].text
    embeddings = await client.embeddings.create(model=MODEL, input=["a", "b"])
    assert [each.index for each in embeddings.data] == [0, 1]
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nothing/at.all")


async def test_a_model_with_a_slash_in_its_name(running: Deployment, client: AsyncOpenAI) -> None:
    await running.worker(model="org/m-3.1")
    assert (await client.models.retrieve("org/m-3.1")).id == "org/m-3.1"
    assert (await chunks_of(client, model="org/m-3.1"))[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("parameters", "code", "param"),
    [
        ({"model": "nothing"}, "model_not_found", "model"),
        ({"model": ""}, "invalid_value", "model"),
        ({"model": 3}, "invalid_value", "model"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"temperature": 3}, "invalid_value", "temperature"),
        ({"max_tokens": 9000}, "context_length_exceeded", "max_tokens"),
        ({"service_tier": "best"}, "invalid_value", "service_tier"),
        ({"extra_body": {"priority": 3}}, "unsupported_parameter", "priority"),
        ({"extra_body": {"stream_options": {"include_usage": True}}}, "invalid_value", "stream_options"),
        ({"extra_body": {"stream": "yes"}}, "invalid_value", "stream"),
        ({"extra_headers": {"X-Headrace-Id": "a.b"}}, "invalid_value", "X-Headrace-Id"),
        ({"extra_headers": {"X-Headrace-Priority": "best"}}, "invalid_value", "X-Headrace-Priority"),
        ({"extra_headers": {"X-Headrace-Pool": "nowhere"}}, "invalid_value", "X-Headrace-Pool"),
        ({"extra_headers": {"X-Headrace-Deadline": "soon"}}, "invalid_value", "X-Headrace-Deadline"),
        ({"extra_headers": {"X-Headrace-Deadline": "1e9"}}, "invalid_value", "X-Headrace-Deadline"),
        ({"extra_headers": {"X-Headrace-Queue-Timeout": "nan"}}, "invalid_value", "X-Headrace-Queue-Timeout"),
    ],
)
async def test_what_is_wrong_is_said_before_anything_is_streamed(
    running: Deployment, client: AsyncOpenAI, parameters: dict[str, Any], code: str, param: str
) -> None:
    await running.worker()
    kind = openai.NotFoundError if code == "model_not_found" else openai.BadRequestError
    for _ in range(2):
        with pytest.raises(kind) as caught:
            await client.chat.completions.create(**{"model": MODEL, "messages": HELLO, **parameters})
        assert (caught.value.code, caught.value.param) == (code, param)
        assert caught.value.response.headers["x-should-retry"] == "false"
        if "stream" in str(parameters):
            return
        parameters = {**parameters, "stream": True}


async def test_a_full_queue_and_a_wait_too_long(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, queue_limit=1) as running:
        await running.worker(sim(default_tokens=4000, tokens_per_second=10), max_concurrency=1)
        gateway = await running.gateway()
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0, timeout=20) as client:
            stream = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=500, stream=True)
            await anext(aiter(stream))
            with pytest.raises(openai.RateLimitError) as full:
                await client.chat.completions.create(model=MODEL, messages=HELLO)
            assert full.value.code == "queue_full"
            assert int(full.value.response.headers["retry-after"]) >= 1
            assert full.value.response.headers["x-should-retry"] == "true"
            await stream.close()


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_request_that_waits_too_long(running: Deployment, client: AsyncOpenAI, is_streaming: bool) -> None:
    await running.worker(sim(default_tokens=4000, tokens_per_second=10), max_concurrency=1)
    await running.monitor()
    first = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=500, stream=True)
    await anext(aiter(first))
    short = {"X-Headrace-Queue-Timeout": "0.5"}
    if is_streaming:
        second = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, extra_headers=short)
        with pytest.raises(openai.APIError) as late:
            await anext(aiter(second))
        assert not isinstance(late.value, openai.APIStatusError)
    else:
        with pytest.raises(openai.InternalServerError) as late:
            await client.chat.completions.create(model=MODEL, messages=HELLO, extra_headers=short)
        assert late.value.status_code == 504
    assert late.value.code == "queue_timeout"
    await first.close()


async def test_an_engine_that_fails_in_mid_answer_is_an_error_and_no_end(
    running: Deployment, client: AsyncOpenAI
) -> None:
    await running.worker(sim(error_after=3))
    await running.monitor()
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, n=2, stream=True)
    seen: list[Any] = []

    async def read() -> None:
        async for chunk in stream:
            seen.append(chunk)

    with pytest.raises(openai.APIError) as failed:
        await read()
    assert failed.value.code == "not_resumable"
    assert seen
    assert all(choice.finish_reason is None for chunk in seen for choice in chunk.choices)


async def test_the_same_id_is_the_same_job(running: Deployment, client: AsyncOpenAI) -> None:
    engine = sim()
    await running.worker(engine)
    named = {"X-Headrace-Id": "mine"}
    first = await client.chat.completions.create(model=MODEL, messages=HELLO, extra_headers=named)
    again = await client.chat.completions.create(model=MODEL, messages=HELLO, extra_headers=named)
    assert first == again
    assert engine.num_started == 1
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2, extra_headers=named)
