"""What becomes of streams, of the worker's word on itself and of vLLM's processes when a part of the engine ends."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.bus.heartbeats import WorkersBucket
from headrace.lifecycle import ChildProcess
from headrace.schemas.workers import Heartbeat
from headrace.worker.engines.openai import OpenAIEngine, OpenAIOptions
from headrace.worker.engines.processes import Process, descendants
from headrace.worker.engines.vllm import VllmEngine
from tests.deployment import Deployment, deployment, until
from tests.processes import part
from tests.vllm.conftest import MAX_NUM_SEQS
from tests.vllm.load import MODEL, Direct, Stream, bodies, read_all

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]

REPORTED_WITHIN_S = 5.0
RESTARTED_WITHIN_S = 180.0
STREAMS = bodies(4, max_tokens=150, ignore_eos=True)


async def beat_of(running: Deployment, worker: str) -> Heartbeat:
    seen = await WorkersBucket(running.bus).get(worker)
    assert seen is not None
    assert seen.beat is not None
    return seen.beat


async def failure_of(running: Deployment, worker: str) -> tuple[str, float]:
    """Wait until a worker says that its engine failed: why, and after how many seconds."""
    began = time.monotonic()
    said: list[str] = []

    async def has_failed() -> bool:
        beat = await beat_of(running, worker)
        said.append(beat.reason)
        return beat.state == "Failed"

    await until(has_failed, timeout_s=RESTARTED_WITHIN_S)
    return said[-1], time.monotonic() - began


def core_of(engine: VllmEngine) -> Process:
    assert engine.pid is not None
    return next(each for each in descendants(engine.pid) if each.name.startswith("VLLM::EngineCor"))


def are_gone(processes: list[Process]) -> bool:
    return not any(os.path.exists(f"/proc/{each.pid}") for each in processes)


async def test_a_killed_and_a_stopped_engine_core_are_reported_and_their_streams_go_on(
    server: Direct, make_engine: Callable[..., VllmEngine], broker_url: str, prefix: str
) -> None:
    own = await server.answers(STREAMS)
    engine = make_engine()
    async with deployment(broker_url, prefix) as running:
        await running.monitor()
        await running.worker(engine, model=MODEL, worker="w1", is_awaited=False)
        await until(lambda: running.is_ready("w1"), timeout_s=RESTARTED_WITHIN_S)

        streams = [Stream(body) for body in STREAMS]
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read_all(running.client, streams))
            await asyncio.gather(*(stream.has_some.wait() for stream in streams))
            assert engine.pid is not None
            processes = descendants(engine.pid)
            os.kill(core_of(engine).pid, signal.SIGKILL)
            why, after_s = await failure_of(running, "w1")
            print(f"killed core: reported after {after_s:.2f} s: {why.splitlines()[-1]}")
            assert after_s < REPORTED_WITHIN_S
            assert "VLLM::EngineCor" in why
            began = time.monotonic()
            assert await reading == own
        print(f"killed core: all streams done {time.monotonic() - began:.1f} s after that, after a restart")
        assert are_gone(processes)
        assert {worker for stream in streams for worker in stream.workers} == {"w1"}

        streams = [Stream(body) for body in STREAMS]
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read_all(running.client, streams))
            await asyncio.gather(*(stream.has_some.wait() for stream in streams))
            processes = descendants(engine.pid)
            os.kill(core_of(engine).pid, signal.SIGSTOP)
            reporting = group.create_task(failure_of(running, "w1"))
            elsewhere = OpenAIEngine(MODEL, OpenAIOptions(url=server.url, max_concurrency=MAX_NUM_SEQS))
            await running.worker(elsewhere, model=MODEL, worker="w2")
            why, after_s = await reporting
            print(f"stopped core: reported after {after_s:.2f} s: {why}")
            assert after_s < REPORTED_WITHIN_S
            assert "is stopped" in why
            began = time.monotonic()
            assert await reading == own
        print(f"stopped core: all streams done {time.monotonic() - began:.1f} s after that, elsewhere")
        await until(lambda: running.is_ready("w1"), timeout_s=RESTARTED_WITHIN_S)
        assert are_gone(processes)
        assert {stream.workers[0] for stream in streams} == {"w1"}


async def test_a_killed_worker_leaves_no_process_and_its_streams_go_on_after_its_start(
    server: Direct, options: dict[str, str], broker_url: str, prefix: str, tmp_path: Path
) -> None:
    own = await server.answers(STREAMS)
    argv = ["serve", "worker", "--engine", "vllm", "--model", MODEL, "--worker-id", "w1"]
    argv += [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    streams = [Stream(body) for body in STREAMS]
    async with deployment(broker_url, prefix) as running:
        await running.monitor()
        async with part(*argv, url=broker_url, prefix=prefix, state_dir=tmp_path) as first:
            await until(lambda: is_ready_or_ended(running, "w1", first), timeout_s=RESTARTED_WITHIN_S)
            assert first.returncode is None, first.tail()
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(read_all(running.client, streams))
                await asyncio.gather(*(stream.has_some.wait() for stream in streams))
                processes = descendants(first.pid)
                assert len(processes) >= 4
                first.send_signal(signal.SIGKILL)
                began = time.monotonic()
                await first.wait()
                await until(lambda: asyncio.to_thread(are_gone, processes))
                print(f"killed worker: all its {len(processes)} processes gone {time.monotonic() - began:.2f} s later")
                async with part(*argv, url=broker_url, prefix=prefix, state_dir=tmp_path):
                    assert await reading == own
    assert {worker for stream in streams for worker in stream.workers} == {"w1"}


async def is_ready_or_ended(running: Deployment, worker: str, process: ChildProcess) -> bool:
    return process.returncode is not None or await running.is_ready(worker)
