"""Real text of a real vLLM through Headrace: equal to its own, whatever dies, and nothing preempted."""

import asyncio
import signal
from pathlib import Path

import pytest

from headrace.bus.heartbeats import WorkersBucket
from headrace.worker.engines.openai import OpenAIEngine, OpenAIOptions
from tests.deployment import deployment
from tests.processes import part, serving
from tests.vllm.conftest import BLOCK_SIZE, MAX_NUM_SEQS, NUM_BLOCKS
from tests.vllm.load import MODEL, Direct, Stream, bodies, read_all

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

STREAMS = bodies(20, max_tokens=50, ignore_eos=True)
LARGE = bodies(12, max_tokens=180, ignore_eos=True)
"""Each takes seven blocks; together more than there are."""


@pytest.fixture(scope="module")
def texts() -> dict[str, list[str]]:
    """What vLLM itself answered, asked once."""
    return {}


async def own_texts(server: Direct, texts: dict[str, list[str]]) -> list[str]:
    if "own" not in texts:
        texts["own"] = await server.answers(STREAMS)
    return texts["own"]


def attached(server: Direct) -> OpenAIEngine:
    return OpenAIEngine(MODEL, OpenAIOptions(url=server.url, max_concurrency=MAX_NUM_SEQS, priority=True))


async def test_twenty_streams_at_once_have_vllms_own_text(
    server: Direct, texts: dict[str, list[str]], broker_url: str, prefix: str
) -> None:
    own = await own_texts(server, texts)
    streams = [Stream(body) for body in STREAMS]
    async with deployment(broker_url, prefix) as running:
        await running.worker(attached(server), model=MODEL, worker="w1")
        seen = await WorkersBucket(running.bus).get("w1")
        assert seen is not None
        assert seen.beat is not None
        assert (seen.beat.kv_capacity_tokens, seen.beat.block_size) == ((NUM_BLOCKS - 1) * BLOCK_SIZE, BLOCK_SIZE)
        assert seen.beat.kv_capacity_source == "engine"
        server.most_running = 0
        watching = asyncio.create_task(server.watch_running())
        assert await read_all(running.client, streams) == own
        watching.cancel()
    print(f"{server.most_running} streams at once")
    assert server.most_running == len(streams)
    assert len(set(own)) == len(own)


async def test_a_killed_worker_changes_no_text(
    server: Direct, texts: dict[str, list[str]], broker_url: str, prefix: str, tmp_path: Path
) -> None:
    own = await own_texts(server, texts)
    streams = [Stream(body) for body in STREAMS]
    argv = ["serve", "worker", "--engine", "openai", "--engine-url", server.url, "--model", MODEL]
    async with deployment(broker_url, prefix) as running:
        await running.monitor()
        told = {"url": broker_url, "prefix": prefix, "state_dir": tmp_path}
        async with (
            part(*argv, "--max-concurrency", "20", "--worker-id", "first", **told) as first,  # type: ignore[arg-type]
            asyncio.TaskGroup() as group,
        ):
            await serving(running.client, MODEL)
            reading = group.create_task(read_all(running.client, streams))
            await asyncio.gather(*(stream.has_some.wait() for stream in streams))
            first.send_signal(signal.SIGKILL)
            await running.worker(attached(server), model=MODEL, worker="second")
            got = await reading
    assert got == own
    assert all(stream.workers[0] == "first" for stream in streams)
    num_moved = sum(stream.workers[-1] == "second" for stream in streams)
    print(f"{num_moved} of {len(streams)} streams went on elsewhere")
    assert num_moved > 0


async def test_admission_preempts_nothing_where_the_same_load_sent_directly_does(
    server: Direct, broker_url: str, prefix: str
) -> None:
    before = await server.num_preemptions()
    own = await server.answers(LARGE)
    directly = await server.num_preemptions() - before
    async with deployment(broker_url, prefix) as running:
        await running.worker(attached(server), model=MODEL)
        before = await server.num_preemptions()
        got = await read_all(running.client, [Stream(body) for body in LARGE])
        through_us = await server.num_preemptions() - before
    print(f"preemptions: {directly} sent directly, {through_us} through Headrace")
    assert directly > 0
    assert through_us == 0
    assert got == own
