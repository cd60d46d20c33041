"""Bad input and canaries over HTTP, through gateway, broker, router and worker (CASES, groups 1 and 9)."""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from headrace.bus.overview import overview
from headrace.telemetry import configure
from headrace.worker.engines.openai import OpenAIEngine, OpenAIOptions
from tests.deployment import MODEL, Deployment, deployment, sim
from tests.fake_openai import DONE, FakeOpenAI, Hang, chat, reply, script, usage
from tests.otlp_receiver import OtlpReceiver

CANARY = "canary-7f3"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 3}


class Http:
    """Sends JSON to one gateway."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Status, decoded answer and headers."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(self.url + path, json=body, headers=named) as response:
            found = {name.lower(): value for name, value in response.headers.items()}
            return response.status, json.loads(await response.read()), found

    async def chat(self, **parameters: Any) -> tuple[int, Any]:
        """Status and answer of a chat."""
        status, answer, _ = await self.post("/v1/chat/completions", {**CHAT, **parameters})
        return status, answer

    async def completion(self, **parameters: Any) -> tuple[int, Any]:
        """Status and answer of a completion."""
        status, answer, _ = await self.post("/v1/completions", {"model": MODEL, "ignore_eos": True, **parameters})
        return status, answer

    async def stream(self, *, job: str, read: asyncio.Event | None = None, **parameters: Any) -> str:
        """All of a streamed chat; `read` is set with its first chunk."""
        request = self.session.post(
            f"{self.url}/v1/chat/completions",
            json={**CHAT, "stream": True, **parameters},
            headers={"X-Headrace-Id": job, "X-Request-Id": "dup-1"},
        )
        text = ""
        async with request as response:
            async for line in response.content:
                text += line.decode()
                if read is not None and line.startswith(b"data: {"):
                    read.set()
        return text


@pytest_asyncio.fixture
async def running(broker_url: str, prefix: str) -> AsyncIterator[Deployment]:
    async with deployment(broker_url, prefix) as started:
        yield started


@pytest_asyncio.fixture
async def http(running: Deployment) -> AsyncIterator[Http]:
    url = (await running.gateway()).url
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield Http(url, session)


@pytest_asyncio.fixture
async def small(running: Deployment) -> None:
    """A worker whose model has 32 tokens of context; a prompt has as many as it has words."""
    await running.worker(sim(max_model_len=32, kv_tokens=1024, block_size=1))


def tokens(answer: Any) -> int:
    """New tokens of an answer."""
    return int(answer["usage"]["completion_tokens"])


@pytest.mark.usefixtures("small")
async def test_a_null_limit_is_as_if_absent(http: Http) -> None:  # REQ-2
    status, answer = await http.completion(prompt="a b", max_tokens=None)
    assert (status, tokens(answer)) == (200, 16)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "expected"), [(32, 1, 0), (31, 1, 1), (20, 13, 0), (20, None, 12)]
)
async def test_the_context_length_over_http(
    http: Http, num_prompt: int, max_tokens: int | None, expected: int
) -> None:  # REQ-3
    status, answer = await http.completion(prompt=" ".join("x" * num_prompt), max_tokens=max_tokens)
    if expected:
        assert (status, tokens(answer)) == (200, expected)
        return
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert all(str(number) in answer["error"]["message"] for number in (32, num_prompt, max_tokens))


async def test_cancelling_one_of_two_requests_with_the_same_id_leaves_the_other(
    running: Deployment, http: Http
) -> None:  # REQ-4
    await running.worker(sim(default_tokens=4000, tokens_per_second=40))
    seen = asyncio.Event()
    one = asyncio.create_task(http.stream(job="one", read=seen, max_tokens=500))
    other = asyncio.create_task(http.stream(job="other", max_tokens=40))
    await asyncio.wait_for(seen.wait(), 10)
    async with http.session.delete(f"{http.url}/v1/jobs/one") as response:
        assert (await response.json())["state"] == "cancelled"
    assert '"code":"job_failed"' in await one
    chunks = [json.loads(line[6:]) for line in (await other).split("\n") if line.startswith("data: {")]
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert chunks[-1]["headrace"]["offset"] == 40
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_request_id_that_looks_like_a_subject_goes_nowhere(
    running: Deployment, http: Http, caplog: pytest.LogCaptureFixture
) -> None:  # REQ-5
    await running.worker()
    caplog.set_level(logging.DEBUG)
    subjects = await running.bus.subscribe(">")
    await running.bus.nc.flush()  # the broker has it before anybody else publishes
    status, answer, headers = await http.post("/v1/chat/completions", CHAT, x_request_id="*.>evil")
    assert (status, headers["x-request-id"][:4]) == (200, "req_")
    assert "evil" not in json.dumps(answer) + caplog.text
    await running.bus.publish(f"{running.settings.prefix}.end")
    seen: list[str] = []
    while not seen or not seen[-1].endswith(".end"):
        message = await running.bus.next_message(subjects, 5.0)
        assert message is not None
        assert "evil" not in f"{message.subject} {message.reply} {message.headers}"
        seen.append(message.subject)
    assert any(".infer.default.chat." in subject for subject in seen)
    await subjects.unsubscribe()


async def test_limits_of_both_names(running: Deployment, http: Http) -> None:  # REQ-7
    await running.worker(sim(default_tokens=4000, tokens_per_second=0))
    status, answer = await http.chat(max_completion_tokens=50, max_tokens=16)
    assert (status, tokens(answer)) == (200, 50)
    status, answer = await http.completion(prompt="x", max_completion_tokens=3)
    assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")
    assert answer["error"]["param"] == "max_completion_tokens"


async def test_what_is_refused_at_the_edge_is_stored_nowhere(running: Deployment, http: Http) -> None:  # REQ-8, REQ-9
    await running.worker()
    for body, code in (
        ({**CHAT, "messages": [{"role": 7, "content": CANARY}] * 12_000}, "invalid_value"),
        ({**CHAT, "messages": json.loads('{"a":' * 500 + "1" + "}" * 500)}, "json_too_deep"),
    ):
        status, answer, _ = await http.post("/v1/chat/completions", body)
        assert (status, answer["error"]["code"]) == (400, code)
        assert len(json.dumps(answer)) <= 4096
        assert CANARY not in json.dumps(answer)
    assert not any(queue.queued or queue.running for queue in (await overview(running.bus)).queues)
    assert (await http.chat())[0] == 200


async def test_a_canary_is_in_no_log_span_metric_or_error(
    broker_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # SEC-4
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    caplog.set_level(logging.DEBUG)
    with OtlpReceiver() as receiver:
        for name, value in {"NO_PROXY": "127.0.0.1", **receiver.environ}.items():
            monkeypatch.setenv(name, value)
        with configure("headrace-test", instance_id="i", version="0"):
            errors = await _play_canaries(broker_url, prefix)
        receiver.wait_for(lambda spans: {"admit", f"process {MODEL}"} <= {span.name for span in spans}, timeout_s=10)
        sent = b"".join(receiver.bodies)
    assert len(errors) == 3
    assert CANARY not in "".join(errors)
    assert CANARY not in caplog.text
    assert CANARY.encode() not in sent


async def _play_canaries(broker_url: str, prefix: str) -> list[str]:
    """A success, failures and a cancel, with canaries in prompts, answers and keys; returns our own errors."""
    prompt = [{"role": "user", "content": CANARY}]
    engine_says = {"error": {"message": f"cannot do {CANARY}", "type": "invalid_request_error", "code": None}}
    errors: list[str] = []
    async with deployment(broker_url, prefix) as running, FakeOpenAI() as fake:
        engine = OpenAIEngine(MODEL, msgspec.convert({"url": fake.url, "kv_tokens": 10_000}, OpenAIOptions))
        await running.worker(engine, max_concurrency=4)
        headers = {"Authorization": f"Bearer {CANARY}"}
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=20)) as session:
            http = Http((await running.gateway()).url, session)
            fake.scripts.append(script(chat(CANARY, role="assistant", finish="stop"), usage(1, 1), DONE))
            status, answer = await http.chat(messages=prompt)
            assert (status, answer["choices"][0]["message"]["content"]) == (200, CANARY)
            wrong: list[dict[str, Any]] = [{"temperature": CANARY}, {"response_format": {"type": CANARY}}]
            for parameters in wrong:
                status, answer = await http.chat(messages=prompt, **parameters)
                assert status == 400
                errors.append(json.dumps(answer))
            fake.scripts.append(reply(400, engine_says))
            status, answer = await http.chat(messages=prompt)
            assert status == 400
            assert answer["error"]["message"].endswith(engine_says["error"]["message"])  # to its sender alone
            fake.scripts.append(script(chat(CANARY, role="assistant"), Hang()))
            seen = asyncio.Event()
            streaming = asyncio.create_task(http.stream(job="left", read=seen, messages=prompt))
            await asyncio.wait_for(seen.wait(), 10)
            async with session.delete(f"{http.url}/v1/jobs/left") as response:
                assert response.status == 200
            errors.append((await streaming).split("\n\n")[-3])
    return errors
