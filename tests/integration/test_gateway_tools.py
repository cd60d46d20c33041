"""Tools, structured output, reasoning: a scripted engine at one end, OpenAI's own client at the other."""

import json
from typing import Any

import msgspec
import pydantic
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from headrace.worker.engines.openai import OpenAIEngine, OpenAIOptions
from tests.deployment import MODEL, Deployment, deployment
from tests.fake_openai import DONE, FakeOpenAI, chat, script, usage

ASKED: list[ChatCompletionMessageParam] = [{"role": "user", "content": "how high is the water?"}]
TOOLS: list[ChatCompletionToolParam] = [
    {"type": "function", "function": {"name": "level", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "flow", "parameters": {"type": "object"}}},
]


def call(index: int, arguments: str, **head: Any) -> bytes:
    """A piece of a tool call; engines may repeat its head in every piece."""
    function = {"arguments": arguments}
    if name := head.pop("name", None):
        function["name"] = name
    return chat(tool_calls=[{"index": index, **head, "function": function}])


CALLS = (
    chat(role="assistant"),
    call(0, "", id="c0", type="function", name="level"),
    call(0, '{"where"', id="c0", type="function", name="level"),
    call(0, ': "weir"}'),
    call(1, "{", id="c1", type="function", name="flow"),
    call(1, '"of": '),
)


async def started(running: Deployment, fake: FakeOpenAI) -> str:
    engine = OpenAIEngine(MODEL, msgspec.convert({"url": fake.url, "kv_tokens": 10_000}, OpenAIOptions))
    await running.worker(engine, max_concurrency=4)
    return (await running.gateway()).url


@pytest.mark.parametrize("finish", ["tool_calls", "length"])
async def test_tool_calls(broker_url: str, prefix: str, finish: str) -> None:  # STR-9
    end = () if finish == "length" else (call(1, '"mill"}'),)
    steps = (*CALLS, *end, chat(finish=finish), usage(9, 7), DONE)
    async with deployment(broker_url, prefix) as running, FakeOpenAI() as fake:
        url = await started(running, fake)
        fake.scripts += [script(*steps), script(*steps)]
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=20) as client:
            stream = await client.chat.completions.create(model=MODEL, messages=ASKED, tools=TOOLS, stream=True)
            chunks = [chunk async for chunk in stream]
            answer = await client.chat.completions.create(model=MODEL, messages=ASKED, tools=TOOLS)
    pieces = [piece for chunk in chunks for choice in chunk.choices for piece in choice.delta.tool_calls or ()]
    for index, (name, ident) in enumerate((("level", "c0"), ("flow", "c1"))):
        of_call = [piece for piece in pieces if piece.index == index]
        assert [piece.id for piece in of_call if piece.id] == [ident]
        assert [piece.function.name for piece in of_call if piece.function and piece.function.name] == [name]
        assert of_call[0].id == ident
    second = "".join(piece.function.arguments or "" for piece in pieces if piece.index == 1 and piece.function)
    assert second == ('{"of": "mill"}' if finish == "tool_calls" else '{"of": ')
    assert chunks[-1].choices[0].finish_reason == finish
    whole = answer.choices[0]
    assert whole.finish_reason == finish
    assert whole.message.tool_calls is not None
    assert [each.id for each in whole.message.tool_calls] == ["c0", "c1"]
    assert [body["tools"] for body in fake.bodies] == [TOOLS, TOOLS]


class Level(pydantic.BaseModel):
    metres: float


async def test_structured_output(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running, FakeOpenAI() as fake:
        url = await started(running, fake)
        fake.scripts.append(
            script(chat('{"met', role="assistant"), chat('res": 1.5}'), chat(finish="stop"), usage(9, 4), DONE)
        )
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=20) as client:
            answer = await client.chat.completions.parse(model=MODEL, messages=ASKED, response_format=Level)
    assert answer.choices[0].message.parsed == Level(metres=1.5)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 13
    assert fake.bodies[0]["response_format"]["type"] == "json_schema"


async def test_what_only_the_engine_knows_is_passed_on(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running, FakeOpenAI() as fake:
        url = await started(running, fake)
        fake.scripts.append(
            script(chat(role="assistant", reasoning_content="hm"), chat("yes", finish="stop"), usage(9, 2), DONE)
        )
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=20) as client:
            stream = await client.chat.completions.create(
                model=MODEL, messages=ASKED, stream=True, extra_body={"top_k": 5, "min_p": 0.1}, logprobs=True
            )
            deltas = [json.loads(chunk.choices[0].delta.to_json()) async for chunk in stream]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "hm"
    assert "".join(delta.get("content") or "" for delta in deltas) == "yes"
    assert (fake.bodies[0]["top_k"], fake.bodies[0]["min_p"], fake.bodies[0]["logprobs"]) == (5, 0.1, True)
