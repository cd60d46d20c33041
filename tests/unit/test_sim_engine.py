"""The `sim` engine: determinism, resuming, limits, capacity, scripted faults, and what 200 streams cost."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from headrace.errors import ConfigError, EngineBusyError, EngineError, EngineRequestError
from headrace.schemas.chunks import EngineChunk
from headrace.schemas.openai import InferenceRequest
from headrace.worker.engines.base import PROBE_PREFIX, Resume
from headrace.worker.engines.factory import make_engine
from headrace.worker.engines.sim import SimEngine, SimOptions

pytestmark = pytest.mark.asyncio

DEADLINE_S = 10.0


def chat(
    content: str = "tell me of the river", *, n: int = 1, stop: tuple[str, ...] = (), **body: Any
) -> InferenceRequest:
    messages = [{"role": "user", "content": content}]
    return InferenceRequest(op="chat", body={"messages": messages, **body}, n=n, stop=stop)


def completion(prompt: str | list[int], **body: Any) -> InferenceRequest:
    return InferenceRequest(op="completions", body={"prompt": prompt, **body})


@contextlib.asynccontextmanager
async def started(**options: Any) -> AsyncGenerator[SimEngine, None]:
    engine = SimEngine("m", SimOptions(**{"tokens_per_second": 0.0, **options}))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def collect(
    engine: SimEngine,
    request: InferenceRequest,
    *,
    max_tokens: int = 1000,
    resume: Resume | None = None,
    seen: list[EngineChunk] | None = None,
) -> list[EngineChunk]:
    """All chunks, also in `seen` as they come."""
    chunks = [] if seen is None else seen
    async with asyncio.timeout(DEADLINE_S):
        async for chunk in engine.generate(request, max_tokens=max_tokens, request_id="r", resume=resume):
            chunks.append(chunk)
    return chunks


def text_of(chunks: list[EngineChunk], index: int = 0) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index)


def finish_of(chunks: list[EngineChunk], index: int = 0) -> list[str]:
    return [
        choice.finish_reason
        for chunk in chunks
        for choice in chunk.choices
        if choice.index == index and choice.finish_reason is not None
    ]


async def test_chunks_have_the_form_of_a_real_engine() -> None:
    async with started(default_tokens=3) as engine:
        chunks = await collect(engine, chat("two words"))
    first, *pieces, finish, last = chunks
    assert (first.choices[0].role, first.choices[0].text, first.choices[0].num_tokens) == ("assistant", "", 0)
    assert [piece.choices[0].num_tokens for piece in pieces] == [1, 1, 1]
    assert (finish.choices[0].finish_reason, finish.choices[0].text) == ("stop", "")
    assert last.choices == ()
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (6, 3, 9)
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * 5


async def test_text_depends_on_seed_model_prompt_and_choice_alone() -> None:
    async with started() as engine, started() as same, started(seed=1) as other:
        text = text_of(await collect(engine, chat()))
        assert text_of(await collect(same, chat())) == text
        assert text_of(await collect(engine, chat())) == text
        assert text_of(await collect(other, chat())) != text
        assert text_of(await collect(engine, chat("another prompt"))) != text
        both = await collect(engine, chat(n=2))
    assert text_of(both, 0) == text
    assert text_of(both, 1) != text
    assert finish_of(both, 0) == finish_of(both, 1) == ["stop"]


@pytest.mark.parametrize("num_sent", [1, 2, 17, 31, 32])
async def test_a_resumed_answer_goes_on_exactly(num_sent: int) -> None:
    async with started() as engine:
        whole = await collect(engine, chat())
        sent = "".join(piece.choices[0].text for piece in whole[1 : 1 + num_sent])
        rest = await collect(engine, chat(), max_tokens=1000 - num_sent, resume=Resume(text=sent, num_tokens=num_sent))
    assert sent + text_of(rest) == text_of(whole)
    assert finish_of(rest) == ["stop"]
    assert all(choice.role is None for chunk in rest for choice in chunk.choices)
    assert rest[-1].usage is not None
    assert rest[-1].usage.completion_tokens == 32 - num_sent


@pytest.mark.parametrize(
    ("max_tokens", "body", "num_tokens", "finish"),
    [(5, {}, 5, "length"), (32, {}, 32, "stop"), (50, {}, 32, "stop"), (50, {"ignore_eos": True}, 50, "length")],
)
async def test_limits(max_tokens: int, body: dict[str, Any], num_tokens: int, finish: str) -> None:
    async with started() as engine:
        chunks = await collect(engine, chat(**body), max_tokens=max_tokens)
    assert len(text_of(chunks).split()) == num_tokens
    assert finish_of(chunks) == [finish]


async def test_a_stop_string_is_never_shown_in_part() -> None:
    async with started() as engine:
        words = text_of(await collect(engine, chat())).split()
        stop = f"{words[9][1:]} {words[10][:2]}"
        chunks = await collect(engine, chat(stop=(stop,)))
    assert text_of(chunks) == " ".join(words[:10]).removesuffix(words[9][1:])
    assert finish_of(chunks) == ["stop"]


async def test_context_length() -> None:
    async with started(max_model_len=10) as engine:
        chunks = await collect(engine, completion("a b c d", ignore_eos=True))
        assert len(text_of(chunks).split()) == 6
        with pytest.raises(EngineRequestError) as caught:
            await collect(engine, completion("a b c d e f g h i j"))
    assert caught.value.code == "context_length_exceeded"


async def test_token_ids_stand_for_the_text() -> None:
    async with started(token_ids=True, tokens_per_chunk=4, default_tokens=6) as engine:
        chunks = await collect(engine, completion([7, 8, 9]))
    assert [chunk.prompt_token_ids for chunk in chunks if chunk.prompt_token_ids] == [(0, 1, 2)]
    assert [len(chunk.choices[0].token_ids) for chunk in chunks[:2]] == [4, 2]


async def test_embeddings_are_deterministic() -> None:
    request = InferenceRequest(op="embeddings", body={"input": ["one two", "three"]})
    async with started() as engine:
        (chunk,) = await collect(engine, request)
        assert await collect(engine, request) == [chunk]
    assert chunk.response is not None
    assert [len(item["embedding"]) for item in chunk.response["data"]] == [8, 8]
    assert chunk.usage is not None
    assert chunk.usage.prompt_tokens == 3


async def test_counting_prompt_tokens() -> None:
    parts = [{"type": "text", "text": "a b"}, {"type": "image_url", "image_url": {"url": "x"}}]
    messages = [{"role": "system", "content": "one"}, {"role": "user", "content": parts}]
    async with started() as engine:
        assert await engine.count_prompt_tokens(InferenceRequest(op="chat", body={"messages": messages})) == 3 + 8
        assert await engine.count_prompt_tokens(completion([5, 6, 7])) == 3
        assert await engine.count_prompt_tokens(completion("a  b\nc")) == 3


async def test_closing_the_stream_aborts_it() -> None:
    async with started(tokens_per_second=1000.0) as engine:
        stream = engine.generate(chat(), max_tokens=100, request_id="r")
        await anext(stream)
        assert (await engine.usage()).num_running == 1
        await stream.aclose()
        assert (await engine.usage()).num_running == 0
    assert (engine.num_started, engine.num_aborted, engine.num_failed) == (1, 1, 0)


async def test_more_than_it_can_hold_is_busy_and_too_much_admitted_fails() -> None:
    async with started(max_concurrency=2, kv_tokens=64, block_size=16, tokens_per_second=1000.0) as engine:
        streams = [engine.generate(completion("a b"), max_tokens=100, request_id="r") for _ in range(3)]
        await anext(streams[0])
        await anext(streams[1])
        with pytest.raises(EngineBusyError):
            await anext(streams[2])
        assert (await engine.usage()).kv_usage_ratio == 0.5
        for stream in streams:
            await stream.aclose()
        with pytest.raises(EngineBusyError):
            await collect(engine, completion("word " * 65))
        with pytest.raises(EngineError, match="out of KV cache"):
            await collect(engine, completion("word " * 60, ignore_eos=True))
        assert (await engine.usage()).kv_usage_ratio == 0.0
    assert engine.num_running_peak == 2


async def test_the_ledgers_need_is_what_it_holds() -> None:
    async with started(kv_tokens=48, block_size=16) as engine:
        chunks = await collect(engine, completion("a " * 30, ignore_eos=True), max_tokens=19)
    assert finish_of(chunks) == ["length"]
    assert engine.kv_peak_tokens == 48


@pytest.mark.parametrize("fault", ["error_after", "cut_after", "hang_after"])
async def test_faults_after_so_many_tokens(fault: str) -> None:
    async with started(**{fault: 3, "fault_first": 1, "stall_s": 0.05}) as engine:
        seen: list[EngineChunk] = []
        with pytest.raises(EngineError):
            await collect(engine, chat(), seen=seen)
        await engine.check_health()
        assert finish_of(await collect(engine, chat())) == ["stop"]
    assert len(text_of(seen).split()) == 3
    assert engine.num_failed == 1


async def test_death_takes_every_stream_and_a_start_revives() -> None:
    async with started(tokens_per_second=1.0) as engine, asyncio.timeout(DEADLINE_S):
        neighbour = asyncio.ensure_future(collect(engine, chat()))
        died = asyncio.ensure_future(engine.wait_died())
        with pytest.raises(EngineError, match="died"):
            await collect(engine, chat("<sim die_after=0> poison"))
        with pytest.raises(EngineError, match="died"):
            await neighbour
        assert "died" in await died
        with pytest.raises(EngineError):
            await engine.check_health()
        await engine.start()
        await engine.check_health()
    assert engine.num_running == 0


async def test_stop_ends_what_runs() -> None:
    async with started(ttft_s=60.0) as engine, asyncio.timeout(DEADLINE_S):
        running = asyncio.ensure_future(collect(engine, chat()))
        while not engine.num_running:
            await asyncio.sleep(0)
        await engine.stop()
        with pytest.raises(EngineError):
            await running


async def test_busy_and_refused_first() -> None:
    async with started(busy_first=1, refuse_first=1) as engine:
        with pytest.raises(EngineBusyError):
            await collect(engine, chat())
        with pytest.raises(EngineRequestError):
            await collect(engine, chat())
        await collect(engine, chat())
    assert (engine.num_calls, engine.num_started) == (3, 1)


async def test_sickness_is_over_after_so_many_starts() -> None:
    options = {"error_rate": 0.5, "slow_factor": 3.0, "leak_bytes_per_s": 1 << 40, "sick_runs": 1}
    async with started(tokens_per_second=1000.0, **options) as engine:
        failed = 0
        for number in range(40):
            try:
                await collect(engine, completion(f"request {number}"), max_tokens=1)
            except EngineError:
                failed += 1
        assert failed == engine.num_failed
        assert 10 < failed < 30  # by the seed: the same in every run
        before, after = await engine.memory_use(), await engine.memory_use()
        assert after[0].used_bytes > before[0].used_bytes
        await engine.stop()
        await engine.start()
        for number in range(40):
            await collect(engine, completion(f"request {number}"), max_tokens=1)
        assert engine.num_failed == failed
        assert await engine.memory_use() == await engine.memory_use()


async def test_a_slow_one_takes_so_many_times_as_long() -> None:
    async with started(tokens_per_second=100.0, ttft_s=0.02, slow_factor=10.0) as engine:
        began = time.monotonic()
        await collect(engine, completion("x"), max_tokens=3)
        assert time.monotonic() - began >= 0.2 + 3 * 0.1


async def test_probes_are_spared_everything_and_counted_apart() -> None:
    async with started(die_after=0, busy_first=9, ttft_s=60.0, max_concurrency=1, fail_probes=1) as engine:
        request_id = f"{PROBE_PREFIX}1"
        with pytest.raises(EngineError, match="fail its probes"):
            await anext(engine.generate(completion("a"), max_tokens=1, request_id=request_id))
        chunk = await anext(engine.generate(completion("a"), max_tokens=1, request_id=request_id))
        assert chunk.choices[0].finish_reason == "length"
        assert (engine.num_probes, engine.num_calls, engine.num_started, engine.memory.peak_tokens) == (2, 0, 0, 0)


async def test_speed_and_time_to_first_token() -> None:
    async with started(ttft_s=0.05, tokens_per_second=200.0, default_tokens=20) as engine:
        begun = time.monotonic()
        await collect(engine, chat())
        assert 0.05 + 19 / 200 <= time.monotonic() - begun < 2.0


async def test_two_hundred_streams_cost_little() -> None:
    async with started(tokens_per_second=20.0, default_tokens=20, max_concurrency=200) as engine:
        cpu = time.process_time()
        answers = await asyncio.gather(*(collect(engine, completion(f"p{number}")) for number in range(200)))
        cpu = time.process_time() - cpu
    assert all(len(text_of(chunks).split()) == 20 for chunks in answers)
    assert engine.num_running_peak == 200
    assert cpu < 0.8, "a core's share for 4,000 tokens"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seed": "x"}, "seed='x'"),
        ({"kv_tokens": "0"}, "kv_tokens='0'"),
        ({"speed": "1"}, "'speed'"),
        ({"tokens_per_second": "nan"}, "tokens_per_second"),
        ({"token_ids": "maybe"}, "token_ids"),
    ],
)
async def test_bad_options_are_named(options: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_engine("sim", "m", options)


async def test_options_from_strings() -> None:
    engine = make_engine("sim", "m", {"kv_tokens": "1000", "block_size": "16", "tokens_per_second": "12.5"})
    assert engine.facts.kv_capacity_tokens == 992
    with pytest.raises(ConfigError, match="llama, openai, sim"):
        make_engine("none", "m", {})
    with pytest.raises(ConfigError, match="needs the option url"):
        make_engine("openai", "m", {})


async def test_an_engine_that_allocates_as_it_goes_dies_of_a_token_too_many() -> None:
    async with started(pool_bytes=1000, kv_bytes_per_token=10, block_size=1, default_tokens=200) as engine:
        assert engine.facts.kv_capacity_tokens is None
        assert engine.facts.kv_memory is not None
        await collect(engine, completion("word " * 50, ignore_eos=True), max_tokens=51)
        usage = await engine.usage()
        assert (usage.memory_free_bytes, usage.memory_total_bytes, usage.kv_usage_ratio) == (1000, 1000, None)
        with pytest.raises(EngineError, match="out of memory: 1010 bytes"):
            await collect(engine, completion("word " * 50, ignore_eos=True), max_tokens=52)
        assert "out of memory" in await engine.wait_died()
        await engine.start()
        assert (await engine.usage()).memory_free_bytes == 1000


async def test_an_engine_that_keeps_its_memory_uses_it_for_others() -> None:
    options = {"pool_bytes": 1000, "kv_bytes_per_token": 10, "keeps_memory": True, "block_size": 1}
    async with started(**options) as engine:
        for _ in range(3):
            await collect(engine, completion("word " * 60, ignore_eos=True), max_tokens=21)
            assert (await engine.usage()).memory_free_bytes == 200
        await engine.start()
        assert (await engine.usage()).memory_free_bytes == 1000
