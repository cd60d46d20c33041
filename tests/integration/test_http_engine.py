"""The `openai` engine against a scripted server: what is sent, what is understood, and every way it can go wrong."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from headrace.errors import ConfigError, EngineBusyError, EngineError, EngineRequestError, EngineStartError
from headrace.schemas.chunks import EngineChunk, Usage
from headrace.schemas.openai import InferenceRequest
from headrace.worker.engines.base import Resume
from headrace.worker.engines.openai import OpenAIEngine, OpenAIOptions, root_of_url
from tests.fake_openai import (
    DONE,
    Await,
    FakeOpenAI,
    Hang,
    Reset,
    Script,
    chat,
    completion,
    frame,
    reply,
    script,
    usage,
)

pytestmark = pytest.mark.asyncio

DEADLINE_S = 10.0
VLLM = ({"id": "served", "owned_by": "vllm", "max_model_len": 2048},)


def chat_request(*, n: int = 1, stop: tuple[str, ...] = (), **body: Any) -> InferenceRequest:
    messages = [{"role": "user", "content": "What did the river say to the old mill wheel?"}]
    return InferenceRequest(
        op="chat", body={"messages": messages, **body}, n=n, stop=stop, num_prompt_tokens_estimate=12
    )


def text_request(prompt: Any = "once", *, n: int = 1, stop: tuple[str, ...] = ()) -> InferenceRequest:
    return InferenceRequest(op="completions", body={"prompt": prompt}, n=n, stop=stop)


@contextlib.asynccontextmanager
async def attached(fake: FakeOpenAI, **options: Any) -> AsyncGenerator[OpenAIEngine, None]:
    engine = OpenAIEngine("m", OpenAIOptions(**{"url": fake.url, "stall_s": 5.0, **options}))
    async with asyncio.timeout(DEADLINE_S):
        await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def collect(
    engine: OpenAIEngine, request: InferenceRequest, *, max_tokens: int = 16, resume: Resume | None = None
) -> list[EngineChunk]:
    async with asyncio.timeout(DEADLINE_S):
        stream = engine.generate(request, max_tokens=max_tokens, request_id="job-1", resume=resume)
        return [chunk async for chunk in stream]


async def answered(*steps: Any, request: InferenceRequest | None = None, **options: Any) -> list[EngineChunk]:
    """What one scripted answer becomes."""
    async with FakeOpenAI() as fake, attached(fake, **options) as engine:
        fake.scripts.append(script(*steps))
        return await collect(engine, request or chat_request())


def text_of(chunks: list[EngineChunk], index: int = 0) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index)


def finish_of(chunks: list[EngineChunk]) -> list[str]:
    return [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason is not None]


async def test_a_chat_stream() -> None:
    chunks = await answered(
        chat(role="assistant", content=None), chat("Hel"), chat("lo"), chat(finish="stop"), usage(9, 2), DONE
    )
    assert [[(c.role, c.text, c.num_tokens, c.finish_reason) for c in chunk.choices] for chunk in chunks] == [
        [("assistant", "", 0, None)],
        [(None, "Hel", 1, None)],
        [(None, "lo", 1, None)],
        [(None, "", 0, "stop")],
        [],
    ]
    assert chunks[-1].usage == Usage(prompt_tokens=9, completion_tokens=2, total_tokens=11)


async def test_tokens_come_as_they_are_produced() -> None:
    go_on = asyncio.Event()
    async with FakeOpenAI() as fake, attached(fake) as engine, asyncio.timeout(DEADLINE_S):
        fake.scripts.append(script(completion("one"), Await(go_on), completion(" two", finish="stop"), DONE))
        stream = engine.generate(text_request(), max_tokens=2, request_id="r")
        assert (await anext(stream)).choices[0].text == "one"
        assert (await engine.usage()).num_running == 1
        go_on.set()
        assert (await anext(stream)).choices[0].text == " two"
        assert (await anext(stream)).usage == Usage(prompt_tokens=0, completion_tokens=2, total_tokens=2)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_what_is_sent() -> None:
    async with FakeOpenAI() as fake, attached(fake, api_key="k") as engine:
        fake.scripts.append(script(chat("x", finish="stop"), DONE))
        body: dict[str, Any] = {
            "max_completion_tokens": 50,
            "max_tokens": None,
            "stream": False,
            "stream_options": {"x": 1},
        }
        await collect(engine, chat_request(stop=("END",), **body, temperature=0.5, odd={"a": [1]}), max_tokens=7)
    assert fake.bodies == [
        {
            "messages": [{"role": "user", "content": "What did the river say to the old mill wheel?"}],
            "model": "served",
            "max_tokens": 7,
            "stream": True,
            "stream_options": {"include_usage": True},
            "stop": ["END"],
            "temperature": 0.5,
            "odd": {"a": [1]},
        }
    ]
    assert fake.headers[0]["X-Request-Id"] == "job-1"
    assert fake.headers[0]["Authorization"] == "Bearer k"


async def test_vllm_is_asked_for_token_ids_and_gives_its_facts() -> None:
    metrics = (
        '# HELP x\nvllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 1.0\n'
        'vllm:num_requests_waiting{engine="0"} 4.0\nvllm:kv_cache_usage_perc{engine="0"} 0.25\n'
        'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="41"} 1.0\n'
    )
    async with FakeOpenAI(models=VLLM) as fake:
        fake.pages |= {"/metrics": (200, metrics), "/health": (200, ""), "/version": (200, {"version": "0.32.0"})}
        fake.pages["/tokenize"] = (200, {"count": 21, "tokens": []})
        async with attached(fake, max_concurrency=8) as engine:
            facts = engine.facts
            assert (facts.kv_capacity_tokens, facts.block_size, facts.max_model_len) == (1280, 32, 2048)
            assert (facts.name, facts.version, facts.max_num_seqs) == ("openai", "0.32.0", 8)
            figures = await engine.usage()
            assert (figures.num_running, figures.num_waiting, figures.kv_usage_ratio) == (3, 4, 0.25)
            await engine.check_health()
            assert await engine.count_prompt_tokens(chat_request()) == 21
            fake.scripts.append(
                script(
                    completion("a", token_ids=[5], prompt_token_ids=[1, 2]),
                    completion("", token_ids=[6]),
                    completion("bc", token_ids=[7, 8]),
                    completion(finish="length"),
                    usage(2, 4),
                    DONE,
                )
            )
            chunks = await collect(engine, text_request())
    assert fake.bodies[0]["return_token_ids"] is True
    assert chunks[0].prompt_token_ids == (1, 2)
    assert [(c.text, c.token_ids, c.num_tokens) for chunk in chunks for c in chunk.choices] == [
        ("a", (5,), 1),
        ("bc", (6, 7, 8), 3),
        ("", (), 0),
    ]


async def test_llama_cpp_is_recognised() -> None:
    async with FakeOpenAI(models=({"id": "g", "owned_by": "llamacpp"},)) as fake:
        fake.pages["/props"] = (200, {"default_generation_settings": {"n_ctx": 512}, "total_slots": 2})
        fake.pages["/apply-template"] = (200, {"prompt": "<user>hi"})
        fake.pages["/tokenize"] = (200, {"tokens": [1, 2, 3]})
        async with attached(fake) as engine:
            assert (engine.facts.max_model_len, engine.facts.max_num_seqs) == (512, 2)
            assert await engine.count_prompt_tokens(chat_request()) == 3
            fake.scripts.append(script(chat("x", finish="stop"), DONE))
            await collect(engine, chat_request())
    assert fake.posted[-1] == ("/tokenize", {"content": "<user>hi", "add_special": True, "parse_special": True})
    assert fake.bodies[0]["return_progress"] is True


async def test_a_server_without_extras_is_enough() -> None:
    async with FakeOpenAI() as fake:
        del fake.pages["/v1/models"]
        async with attached(fake, kv_tokens=1000) as engine:
            assert engine.facts.kv_capacity_tokens == 1000
            assert await engine.count_prompt_tokens(chat_request()) == 12
            await engine.check_health()
            fake.scripts.append(script(chat("x", finish="stop"), DONE))
            assert text_of(await collect(engine, chat_request())) == "x"
        assert fake.bodies[0]["model"] == "m"


async def test_which_model_is_asked_for() -> None:
    async with FakeOpenAI(models=({"id": "a"}, {"id": "b"})) as fake:
        with pytest.raises(EngineStartError, match="a, b"):
            async with attached(fake):
                pass
        async with attached(fake, served_model="b") as engine:
            fake.scripts.append(script(chat("x", finish="stop"), DONE))
            await collect(engine, chat_request())
    assert fake.bodies[0]["model"] == "b"


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
async def test_urls_with_and_without_v1(url: str) -> None:
    assert str(root_of_url(url)) == "http://h:1/"


async def test_url_paths_are_kept_and_bad_urls_named() -> None:
    assert str(root_of_url("https://h/llm/v1")) == "https://h/llm"
    for url in ("h:1", "ftp://h", "http://", "http://h:x"):
        with pytest.raises(ConfigError, match="url="):
            root_of_url(url)


async def test_start_waits_for_a_server_that_loads_and_gives_up_in_time() -> None:
    async with FakeOpenAI() as fake:
        fake.pages["/health"] = (503, {})
        with pytest.raises(EngineStartError, match="still loading"):
            async with attached(fake, start_timeout_s=0.3):
                pass
        engine = OpenAIEngine("m", OpenAIOptions(url=fake.url))
        starting = asyncio.ensure_future(engine.start())
        fake.pages["/health"] = (200, {})
        await asyncio.wait_for(starting, DEADLINE_S)
        fake.pages["/health"] = (503, {})
        with pytest.raises(EngineError, match="503"):
            await engine.check_health()
        await engine.stop()
        await engine.stop()


@pytest.mark.parametrize(
    "steps",
    [
        (chat("x"), DONE),
        (chat("x"),),
        (chat("x"), Reset()),
        (chat("x"), frame({"error": {"message": "EngineCore died", "code": 500}}), DONE),
        (chat("x"), frame({"error": "gone"})),
        (chat("x"), chat(finish="abort"), DONE),
        (chat("x"), b"data: {not json}\n\n"),
        (chat("x"), b'data: {"choices": 5}\n\n'),
        (chat("x"), chat("y", index=3)),
        (chat("x"), b'data: {"choices":[{"finish_reason":"stop"}]}'),
        (Reset(),),
    ],
)
async def test_a_stream_without_a_finish_reason_is_an_engine_error(steps: tuple[Any, ...]) -> None:
    with pytest.raises(EngineError) as caught:
        await answered(*steps)
    assert type(caught.value) is EngineError


async def test_every_choice_must_finish() -> None:
    steps = [chat("a", index=0, finish="stop"), chat("b", index=1)]
    with pytest.raises(EngineError, match="without a finish_reason"):
        await answered(*steps, DONE, request=chat_request(n=2))
    chunks = await answered(*steps, chat(index=1, finish="length"), DONE, request=chat_request(n=2))
    assert (text_of(chunks, 0), text_of(chunks, 1)) == ("a", "b")


async def test_a_finished_answer_stands_whatever_follows() -> None:
    for tail in ((Reset(),), (frame({"error": "late"}),), (DONE,), ()):
        chunks = await answered(chat("x", finish="stop"), *tail)
        assert chunks[-1].usage == Usage(prompt_tokens=12, completion_tokens=1, total_tokens=13)
    chunks = await answered(chat("x", finish="stop"), Hang(), stall_s=0.1)
    assert finish_of(chunks) == ["stop"]


async def test_a_hung_engine_is_an_error_after_the_stall_limit() -> None:
    begun = time.monotonic()
    for steps in ((chat("a"), chat("b"), Hang()), (b"", Hang())):
        with pytest.raises(EngineError, match="nothing for"):
            await answered(*steps, stall_s=0.3)
    assert time.monotonic() - begun < 3.0


async def test_comments_are_not_progress() -> None:
    ticks = [asyncio.Event() for _ in range(40)]
    loop = asyncio.get_running_loop()
    for number, tick in enumerate(ticks):
        loop.call_later(0.05 * (number + 1), tick.set)
    steps = [step for tick in ticks for step in (b": ping\n\n", Await(tick))]
    with pytest.raises(EngineError, match="nothing for"):
        await answered(chat("a"), *steps, stall_s=0.3)


async def test_a_slow_reader_is_not_a_stall() -> None:
    async with FakeOpenAI() as fake, attached(fake, stall_s=0.2) as engine:
        fake.scripts.append(script(chat("a"), chat("b"), chat(finish="stop"), DONE))
        chunks = []
        async for chunk in engine.generate(chat_request(), max_tokens=9, request_id="r"):
            chunks.append(chunk)
            await asyncio.sleep(0.3)
    assert text_of(chunks) == "ab"


async def test_closing_the_stream_aborts_the_request() -> None:
    async with FakeOpenAI() as fake, attached(fake) as engine, asyncio.timeout(DEADLINE_S):
        fake.scripts += [script(chat("a"), Hang())] * 2
        stream = engine.generate(chat_request(), max_tokens=9, request_id="r")
        await anext(stream)
        await stream.aclose()
        await fake.aborted.wait()
        assert (await engine.usage()).num_running == 0
        fake.aborted.clear()
        draining = asyncio.ensure_future(collect(engine, chat_request()))
        while len(fake.bodies) < 2:
            await asyncio.sleep(0)
        draining.cancel()
        await fake.aborted.wait()
        with pytest.raises(asyncio.CancelledError):
            await draining


async def test_stop_ends_what_runs() -> None:
    async with FakeOpenAI() as fake, attached(fake) as engine, asyncio.timeout(DEADLINE_S):
        fake.scripts.append(script(chat("a"), Hang()))
        stream = engine.generate(chat_request(), max_tokens=9, request_id="r")
        await anext(stream)
        await engine.stop()
        with pytest.raises(EngineError):
            await anext(stream)


async def test_a_closed_idle_connection_is_asked_anew() -> None:
    good = script(chat("x", finish="stop"), usage(1, 1), DONE)
    async with FakeOpenAI() as fake, attached(fake) as engine:
        fake.scripts += [good, good]
        await collect(engine, chat_request())
        await collect(engine, chat_request())
        assert len(fake.connections) == 1
        fake.scripts += [script(Reset()), good, script(chat("x"), Reset())]
        assert text_of(await collect(engine, chat_request())) == "x"
        assert len(fake.bodies) == 4
        with pytest.raises(EngineError, match="broke off"):
            await collect(engine, chat_request())
        assert len(fake.bodies) == 5


async def test_a_fresh_connection_that_breaks_is_not_asked_anew() -> None:
    async with FakeOpenAI() as fake, attached(fake) as engine:
        fake.scripts += [script(chat("x"), chat(finish="stop"), Hang())]
        stream = engine.generate(chat_request(), max_tokens=9, request_id="r")
        await anext(stream)
        fake.scripts += [script(Reset())]
        with pytest.raises(EngineError, match="cannot be reached"):  # the first stream holds the only connection
            await collect(engine, chat_request())
        assert len(fake.bodies) == 2
        await stream.aclose()


async def test_a_server_that_is_gone() -> None:
    async with FakeOpenAI() as fake, contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(attached(fake))
        await fake.__aexit__(None, None, None)
        with pytest.raises(EngineError, match="cannot be reached"):
            await collect(engine, chat_request())
        with pytest.raises(EngineError, match="cannot be reached"):
            await engine.check_health()


LONG_CONTEXT = (
    "This model's maximum context length is 32 tokens. However, you requested 33 tokens (20 in the prompt, 13 new)."
)


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [
        (400, {"message": LONG_CONTEXT, "code": 400}, "context_length_exceeded"),
        (
            400,
            {"message": "request (99 tokens) is big", "type": "exceed_context_size_error"},
            "context_length_exceeded",
        ),
        (400, {"message": "temperature must be >= 0", "param": "temperature"}, "invalid_value"),
        (404, {"message": "no model"}, "invalid_value"),
        (413, {}, "invalid_value"),
        (422, {"message": "x"}, "invalid_value"),
        (501, {"message": "no embeddings here"}, "invalid_value"),
    ],
)
async def test_the_requests_own_faults(status: int, error: dict[str, Any], code: str) -> None:
    async with FakeOpenAI() as fake, attached(fake) as engine:
        fake.scripts.append(reply(status, {"error": error}))
        with pytest.raises(EngineRequestError) as caught:
            await collect(engine, chat_request())
    assert caught.value.code == code
    if "param" in error:
        assert caught.value.refusal.param == "temperature"
    if error.get("message") == LONG_CONTEXT:
        assert all(figure in caught.value.refusal.message for figure in ("32", "20", "13"))


async def test_a_refusal_is_short_and_does_not_repeat_the_prompt() -> None:
    said = "bad value: 'What did the river say to the old mill wheel?' " + "x" * 5000
    async with FakeOpenAI() as fake, attached(fake) as engine:
        fake.scripts += [reply(400, {"error": {"message": said}}), Script((b"y" * 70_000,), 400, "text/plain")]
        for _ in range(2):
            with pytest.raises(EngineRequestError) as caught:
                await collect(engine, chat_request())
            assert len(str(caught.value)) < 300
            assert "river say" not in str(caught.value)


@pytest.mark.parametrize("status", [429, 503])
async def test_no_room_is_not_a_failure(status: int) -> None:
    async with FakeOpenAI() as fake, attached(fake) as engine:
        fake.scripts.append(reply(status, {"error": {"message": "queue full"}}))
        with pytest.raises(EngineBusyError):
            await collect(engine, chat_request())


@pytest.mark.parametrize("status", [302, 401, 500, 502])
async def test_other_answers_are_the_engines_fault(status: int) -> None:
    async with FakeOpenAI() as fake, attached(fake) as engine:
        fake.scripts.append(reply(status, {"error": "boom"}))
        with pytest.raises(EngineError) as caught:
            await collect(engine, chat_request())
    assert type(caught.value) is EngineError


async def test_an_error_frame_before_any_token_can_be_the_requests_fault() -> None:
    refused = frame({"error": {"message": LONG_CONTEXT, "code": 400}})
    with pytest.raises(EngineRequestError):
        await answered(chat(role="assistant"), refused)
    with pytest.raises(EngineBusyError):
        await answered(frame({"error": {"message": "full", "code": 503}}))
    with pytest.raises(EngineError) as caught:
        await answered(chat("x"), refused)
    assert type(caught.value) is EngineError


async def test_json_in_answer_to_a_stream_is_an_engine_error() -> None:
    async with FakeOpenAI() as fake, attached(fake) as engine:
        fake.scripts.append(reply(200, {"choices": []}))
        with pytest.raises(EngineError, match="application/json"):
            await collect(engine, chat_request())


def raw_chat(text: bytes) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":"' + text + b'"},"finish_reason":null}]}\n\n'


async def test_a_character_split_across_chunks_is_one_character() -> None:  # STR-1
    halves = (raw_chat(b"a\xf0\x9f"), raw_chat(b"\xa6\x99b"), chat(finish="stop"), DONE)
    escaped = (raw_chat(rb"a\ud83e"), raw_chat(rb"\udd99b"), chat(finish="stop"), DONE)
    whole = raw_chat("a🦙b".encode()) + chat(finish="stop") + DONE
    on_the_wire = tuple(whole[at : at + 1] for at in range(len(whole)))
    for steps in (halves, escaped, on_the_wire):
        chunks = await answered(*steps)
        assert text_of(chunks) == "a🦙b"
        assert all("\ufffd" not in choice.text for chunk in chunks for choice in chunk.choices)


async def test_a_cut_off_character_is_flushed_once_at_the_end() -> None:  # STR-1
    chunks = await answered(raw_chat(b"a"), raw_chat(b"\xf0\x9f"), chat(finish="length"), DONE)
    assert text_of(chunks) == "a\ufffd"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


async def test_a_stop_string_the_engine_does_not_honour() -> None:  # STR-2
    async with FakeOpenAI() as fake, attached(fake) as engine, asyncio.timeout(DEADLINE_S):
        fake.scripts.append(script(chat("The quick br"), chat("own"), chat(" fox"), chat(" jumps"), Hang()))
        chunks = await collect(engine, chat_request(stop=("own fox",)))
        await fake.aborted.wait()
    assert text_of(chunks) == "The quick br"
    assert finish_of(chunks) == ["stop"]
    assert chunks[-1].usage == Usage(prompt_tokens=12, completion_tokens=3, total_tokens=15)


async def test_text_withheld_for_a_stop_string_is_released() -> None:  # STR-2
    steps = (chat("The quick br"), chat("own"), chat(" dog"), chat(" ow"), chat(finish="length"), DONE)
    chunks = await answered(*steps, request=chat_request(stop=("own fox",)))
    assert text_of(chunks) == "The quick brown dog ow"
    assert finish_of(chunks) == ["length"]


async def test_tool_calls_and_reasoning() -> None:
    first = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
    steps = (
        chat(role="assistant", reasoning_content="hm"),
        chat(tool_calls=[first]),
        chat(tool_calls=[{"index": 0, "function": {"arguments": '{"a"'}}]),
        chat(tool_calls=[{"index": 0, "function": {"arguments": ":1}"}}]),
        chat(finish="tool_calls"),
        DONE,
    )
    pieces = [choice for chunk in await answered(*steps) for choice in chunk.choices]
    calls = [call for piece in pieces for call in piece.tool_calls]
    assert pieces[0].reasoning == "hm"
    assert [(call.id, call.name) for call in calls] == [("c1", "f"), (None, None), (None, None)]
    assert "".join(call.arguments for call in calls) == '{"a":1}'


async def test_embeddings() -> None:
    body = {
        "object": "list",
        "data": [{"index": 0, "embedding": [0.5]}],
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }
    request = InferenceRequest(op="embeddings", body={"input": "x", "dimensions": 3})
    async with FakeOpenAI() as fake, attached(fake) as engine:
        fake.scripts += [reply(200, body), reply(200, {"data": None}), reply(400, {"error": {"message": "no"}})]
        (chunk,) = await collect(engine, request)
        with pytest.raises(EngineError):
            await collect(engine, request)
        with pytest.raises(EngineRequestError):
            await collect(engine, request)
    assert chunk.response == body
    assert chunk.usage == Usage(prompt_tokens=4, completion_tokens=0, total_tokens=4)
    assert fake.bodies[0] == {"input": "x", "dimensions": 3, "model": "served"}


async def resumed_body(request: InferenceRequest, resume: Resume, *, owner: str = "vllm") -> dict[str, Any]:
    """What is sent to go on with an answer; the server's role chunk must not be shown again."""
    async with FakeOpenAI(models=({"id": "served", "owned_by": owner},)) as fake, attached(fake) as engine:
        piece = (
            completion("!", finish="stop")
            if request.op == "completions"
            else chat("!", role="assistant", finish="stop")
        )
        fake.scripts.append(script(piece, DONE))
        chunks = await collect(engine, request, max_tokens=3, resume=resume)
    assert [choice.role for chunk in chunks for choice in chunk.choices] == [None]
    assert fake.bodies[0]["max_tokens"] == 3
    return fake.bodies[0]


async def test_resuming_chat() -> None:
    body = await resumed_body(chat_request(), Resume(text="It said", num_tokens=2))
    assert body["messages"][-1] == {"role": "assistant", "content": "It said"}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)


async def test_vllm_goes_on_after_exactly_the_tokens_it_had() -> None:
    resume = Resume(text="It said", token_ids=(7, 8), num_tokens=2)
    requests = [chat_request(chat_template_kwargs={"a": 1}, seed=3), text_request("once")]
    async with FakeOpenAI(models=VLLM) as fake, attached(fake) as engine:
        fake.pages["/tokenize"] = (200, {"count": 3, "tokens": [1, 2, 3]})
        for request in requests:
            fake.scripts.append(script(completion("!", finish="stop", token_ids=[9]), DONE))
            assert text_of(await collect(engine, request, max_tokens=3, resume=resume)) == "!"
        reasoned = Resume(text="It said", token_ids=(7, 8), num_tokens=2, has_reasoning=True)
        fake.scripts.append(script(chat("!", finish="stop"), DONE))
        await collect(engine, requests[0], max_tokens=3, resume=reasoned)
    assert [body.get("prompt") for body in fake.bodies] == [[1, 2, 3, 7, 8], [1, 2, 3, 7, 8], None]
    assert (fake.bodies[0]["seed"], "messages" in fake.bodies[0]) == (3, False)
    assert fake.bodies[2]["messages"][-1] == {"role": "assistant", "content": "It said"}
    assert [(path, body.get("messages") is None) for path, body in fake.posted] == [
        ("/tokenize", False), ("/tokenize", True),
    ]  # fmt: skip


async def test_vllm_is_up_once_it_makes_tokens_or_is_seen_to_compute() -> None:
    async with FakeOpenAI(models=VLLM) as fake:
        fake.token_status = 500
        with pytest.raises(EngineStartError, match="HTTP 500 to a completion of one token"):
            async with attached(fake, start_timeout_s=0.5):
                pass
        fake.token_status = 404  # it may know no completions
        async with attached(fake):
            pass
        fake.makes_tokens.clear()
        with pytest.raises(EngineStartError, match="it answers, but makes no token"):
            async with attached(fake, start_timeout_s=0.5):
                pass

        async def computes() -> None:
            number = 0
            while True:
                number += 1
                fake.pages["/metrics"] = (200, f"vllm:num_requests_running 9\nvllm:generation_tokens_total {number}\n")
                await asyncio.sleep(0.01)

        computing = asyncio.create_task(computes())
        async with attached(fake):
            computing.cancel()


async def test_an_attached_vllm_that_does_not_tell_its_figures_is_warned_of_by_its_version(
    caplog: pytest.LogCaptureFixture,
) -> None:
    running = "vllm:num_requests_running 0\n"
    capacity = 'vllm:cache_config_info{block_size="32",num_gpu_blocks="41"} 1.0\n'
    usage = "vllm:gpu_cache_usage_perc 0\n"
    for metrics, said in (
        (running, "vLLM 0.77.0 tells no capacity"),
        (
            running + capacity,
            "vLLM 0.77.0 tells no usage of its KV cache: neither vllm:kv_cache_usage_perc nor vllm:gpu",
        ),
        (running + capacity + usage, ""),
    ):
        caplog.clear()
        async with FakeOpenAI(models=VLLM) as fake:
            fake.pages |= {"/metrics": (200, metrics), "/health": (200, ""), "/version": (200, {"version": "0.77.0"})}
            async with attached(fake):
                told = [record.getMessage() for record in caplog.records if "tells no" in record.getMessage()]
        assert len(told) == bool(said)
        assert all(said in each for each in told)


async def test_resuming_completions() -> None:
    assert (await resumed_body(text_request("once"), Resume(text=" upon")))["prompt"] == "once upon"
    by_ids = Resume(text=" upon", token_ids=(7,), prompt_token_ids=(1, 2))
    assert (await resumed_body(text_request("once"), by_ids))["prompt"] == [1, 2, 7]
    assert (await resumed_body(text_request([1, 2]), Resume(text="x"), owner="llamacpp"))["prompt"] == [1, 2, "x"]


BEGUN = InferenceRequest(op="chat", body={"messages": [{"role": "assistant", "content": "Well,"}]})


@pytest.mark.parametrize("request_", [text_request([1, 2]), chat_request(n=2), BEGUN])
async def test_what_cannot_be_resumed_says_so(request_: InferenceRequest) -> None:
    async with FakeOpenAI() as fake, attached(fake) as engine:
        with pytest.raises(EngineRequestError) as caught:
            await collect(engine, request_, resume=Resume(text="x"))
    assert caught.value.code == "not_resumable"


async def test_many_streams_at_once() -> None:
    async with FakeOpenAI() as fake, attached(fake) as engine:
        texts = [f"word{number} " for number in range(50)]
        fake.scripts += [script(*(completion(text) for text in texts), completion(finish="stop"), DONE)] * 64
        answers = await asyncio.gather(*(collect(engine, text_request()) for _ in range(64)))
    assert {text_of(chunks) for chunks in answers} == {"".join(texts)}
