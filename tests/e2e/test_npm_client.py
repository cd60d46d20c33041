"""The gateway under OpenAI's npm client, unmodified. `make clients` installs that; without, these tests are skipped."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.worker.engines.openai import OpenAIEngine, OpenAIOptions
from tests.deployment import MODEL, Deployment, deployment, sim, until
from tests.fake_openai import DONE, FakeOpenAI, chat, script, usage

CLIENTS = Path(__file__).resolve().parents[1] / "clients"
NODE = shutil.which("node")
WITHIN_S = 100.0

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        NODE is None or not (CLIENTS / "node_modules/openai").is_dir(),
        reason="the npm client is not installed: `make clients`, which needs node and npm, and their registry",
    ),
]


async def said(url: str, scenario: str) -> Any:
    """What a scenario of client.js saw."""
    assert NODE is not None
    process = await asyncio.create_subprocess_exec(
        NODE, "client.js", f"{url}/v1", MODEL, scenario,
        cwd=CLIENTS, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(WITHIN_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()
    return json.loads(out)


async def test_chats_streams_and_the_rest(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running:
        await running.worker()
        url = (await running.gateway()).url
        seen = await said(url, "chat")
        text = seen["answer"]["choices"][0]["message"]["content"]
        assert len(text.split()) == 5
        assert seen["request_id"]
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in seen["chunks"]) == text
        assert not any(chunk.get("usage") for chunk in seen["chunks"])
        *chunks, last = await said(url, "usage")
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5)
        assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)
        others = await said(url, "others")
        assert len(others["text"].split()) == 16
        assert others["models"] == [MODEL]
        assert len(set(others["vectors"])) == 1
        assert len(others["vectors"]) == 2


def call(index: int, arguments: str, **head: Any) -> bytes:
    name = head.pop("name", None)
    function = {"arguments": arguments, **({"name": name} if name else {})}
    return chat(tool_calls=[{"index": index, **head, "function": function}])


async def test_tools_and_structured_output(broker_url: str, prefix: str) -> None:
    calls = (
        chat(role="assistant"),
        call(0, "", id="c0", type="function", name="level"),
        call(0, '{"where": "weir"}'),
        call(1, '{"of": ', id="c1", type="function", name="flow"),
        call(1, '"mill"}'),
        chat(finish="tool_calls"),
    )
    async with deployment(broker_url, prefix) as running, FakeOpenAI() as fake:
        engine = OpenAIEngine(MODEL, msgspec.convert({"url": fake.url, "kv_tokens": 10_000}, OpenAIOptions))
        await running.worker(engine, max_concurrency=4)
        url = (await running.gateway()).url
        fake.scripts += [script(*calls, usage(9, 7), DONE)] * 2
        seen = await said(url, "tools")
        for choice in (seen["streamed"], seen["whole"]):
            assert choice["finish_reason"] == "tool_calls"
            found = [(each["id"], each["function"]["name"], each["function"]["arguments"]) for each in calls_of(choice)]
            assert found == [("c0", "level", '{"where": "weir"}'), ("c1", "flow", '{"of": "mill"}')]
        fake.scripts.append(script(chat('{"metres": 1.5}', role="assistant", finish="stop"), usage(9, 4), DONE))
        assert json.loads(await said(url, "structured")) == {"metres": 1.5}
        assert fake.bodies[-1]["response_format"]["json_schema"]["name"] == "level"


def calls_of(choice: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = choice["message"]["tool_calls"]
    return found


async def test_errors_are_the_clients_own_classes(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running:
        await running.worker(sim(error_after=3))
        await running.monitor()
        url = (await running.gateway()).url
        errors = await said(url, "errors")
        value, *unknown = errors["value"], errors["model"], errors["shown"], errors["streamed"]
        assert (value["class"], value["code"], value["param"]) == ("BadRequestError", "invalid_value", "temperature")
        for error in unknown:
            assert (error["class"], error["status"], error["code"]) == ("NotFoundError", 404, "model_not_found")
        assert all(error["has_request_id"] for error in (value, *unknown))
        broken = await said(url, "broken")
        assert (broken["class"], broken["status"], broken["code"]) == ("APIError", None, "not_resumable")


async def test_what_may_help_is_tried_again_and_nothing_else(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, queue_limit=1) as running:
        engine = sim(default_tokens=4000, tokens_per_second=10)
        await running.worker(engine, max_concurrency=1)
        url = (await running.gateway()).url
        blocking = running.client.stream(model=MODEL, prompt="x", max_tokens=30)
        async with blocking:
            await anext(aiter(blocking))
            full = await said(url, "full")
            assert (full["class"], full["status"], full["code"]) == ("RateLimitError", 429, "queue_full")
            assert await said(url, "retried") == {"status": 200}
        assert engine.num_calls == 2


async def test_a_client_that_breaks_off_ends_its_job(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running:
        engine = sim(default_tokens=4000, tokens_per_second=20)
        await running.worker(engine)
        assert await said((await running.gateway()).url, "left") is True
        await until(lambda: is_cancelled(running))
        assert engine.num_running == 0


async def is_cancelled(running: Deployment) -> bool:
    return (await running.client.status("left")).state == "cancelled"
