"""The `vllm` engine around a program in vLLM's place: how it is started, what is seen of it, and all its ends."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.bus.heartbeats import WorkersBucket
from headrace.errors import EngineError, EngineStartError
from headrace.hardware.gpu import find_gpu, visible_gpus
from headrace.schemas.openai import InferenceRequest
from headrace.worker.engines import vllm_gpus
from headrace.worker.engines.base import EngineUsage, Resume
from headrace.worker.engines.factory import make_engine
from headrace.worker.engines.http import HttpAdapter
from headrace.worker.engines.openai import root_of_url
from headrace.worker.engines.processes import Process, descendants, process_of
from headrace.worker.engines.sim import SimEngine
from headrace.worker.engines.sim_script import SimOptions
from headrace.worker.engines.vllm import VllmEngine, VllmOptions
from tests.deployment import MODEL, deployment, until
from tests.fake_nvml import Card, FakeNvml

ROOT = Path(__file__).resolve().parents[2]
COMMAND = f"{sys.executable} -m tests.fake_vllm"
DEADLINE_S = 20.0
REQUEST = InferenceRequest(op="completions", body={"prompt": "once"})

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(sys.platform != "linux", reason="the guard needs Linux"),
]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@contextlib.asynccontextmanager
async def started(args: str = "", **options: Any) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine("m", VllmOptions(**{"command": COMMAND, "args": args, "start_timeout_s": 15.0, **options}))
    try:
        async with asyncio.timeout(DEADLINE_S):
            await engine.start()
        yield engine
    finally:
        await engine.stop()


async def generate(engine: VllmEngine, max_tokens: int, **arguments: Any) -> str:
    async with asyncio.timeout(DEADLINE_S):
        stream = engine.generate(REQUEST, max_tokens=max_tokens, request_id="r", **arguments)
        return "".join([choice.text async for chunk in stream for choice in chunk.choices])


async def asked_of(engine: VllmEngine) -> Any:
    http = HttpAdapter(root_of_url(f"http://127.0.0.1:{engine.facts.port}"))
    await http.open()
    try:
        return (await http.get("/asked", timeout_s=5)).json()
    finally:
        await http.close()


def processes_of(engine: VllmEngine) -> list[Process]:
    assert engine.pid is not None
    return descendants(engine.pid)


def core_of(processes: list[Process]) -> int:
    return next(each.pid for each in processes if each.name == "VLLM::EngineCor")


def living(processes: list[Process]) -> list[Process]:
    now = [process_of(each.pid) for each in processes]
    return [each for each in now if each is not None and not each.has_ended]


async def all_ended(processes: list[Process]) -> bool:
    return not living(processes)


async def test_it_runs_vllm_with_the_users_arguments_and_reads_what_it_holds() -> None:
    args = "--dtype float32 --max_num_seqs=7"
    async with started(args, model_path="/models/m") as engine:
        facts = engine.facts
        assert (facts.name, facts.version, facts.max_model_len, facts.max_num_seqs) == ("vllm", "0.32.0", 512, 7)
        assert (facts.kv_capacity_tokens, facts.block_size) == (160, 16)
        assert await generate(engine, 3, priority=-1) == "0 1 2 "
        await engine.check_health()
        assert (await engine.usage()).num_preemptions == 3
        asked = await asked_of(engine)
        processes = processes_of(engine)
        assert len(processes) == 3
    assert asked["argv"] == [
        "serve", "/models/m", "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(facts.port),
        "--scheduling-policy", "priority", "--dtype", "float32", "--max_num_seqs=7",
    ]  # fmt: skip
    (body,) = asked["bodies"]
    assert (body["model"], body["priority"], body["return_token_ids"]) == ("m", -1, True)
    assert living(processes) == []


async def test_priorities_are_for_a_vllm_that_heeds_them() -> None:
    async with started("--scheduling-policy fcfs") as engine:
        await generate(engine, 1, priority=1)
        assert "priority" not in (await asked_of(engine))["bodies"][0]


async def test_it_goes_on_by_token_ids() -> None:
    async with started() as engine:
        request = InferenceRequest(op="completions", body={"prompt": [4, 5]})
        resume = Resume(text="ab", token_ids=(6, 7), num_tokens=2)
        async with asyncio.timeout(DEADLINE_S):
            async for _ in engine.generate(request, max_tokens=1, request_id="r", resume=resume):
                pass
        assert (await asked_of(engine))["bodies"][0]["prompt"] == [4, 5, 6, 7]


async def test_a_dead_engine_core_is_the_engines_death() -> None:
    async with started() as engine:
        processes = processes_of(engine)
        os.kill(core_of(processes), signal.SIGKILL)
        began = time.monotonic()
        async with asyncio.timeout(DEADLINE_S):
            why = await engine.wait_died()
        assert time.monotonic() - began < 5
        assert "VLLM::EngineCor" in why
        with pytest.raises(EngineError, match="VLLM::EngineCor"):
            await engine.check_health()
        await engine.start()
        assert living(processes) == []
        assert await generate(engine, 2) == "0 1 "


async def test_a_stopped_engine_core_is_unhealthy_at_once_and_ended_all_the_same() -> None:
    async with started() as engine:
        processes = processes_of(engine)
        core = core_of(processes)
        os.kill(core, signal.SIGSTOP)
        await until(lambda: is_stopped(core))
        with pytest.raises(EngineError, match=r"VLLM::EngineCor \(process \d+\) of the vLLM server is stopped"):
            await engine.check_health()
        await engine.stop()
        assert living(processes) == []


async def is_stopped(pid: int) -> bool:
    process = process_of(pid)
    return process is not None and process.is_stopped


async def test_an_engine_that_computes_nothing_is_seen_to_hang() -> None:
    async with started("--fake-hangs", hang_s=0.2) as engine:
        stream = asyncio.create_task(generate(engine, 5))
        await engine.check_health()

        async def is_silent() -> bool:
            return (await engine.usage()).silent_s > 0.2

        await until(is_silent)
        with pytest.raises(EngineError, match="has work and computed nothing"):
            await engine.check_health()
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
        assert (await engine.usage()).silent_s == 0
        await engine.check_health()


async def test_a_killed_guard_leaves_no_process_once_the_engine_is_stopped() -> None:
    async with started() as engine:
        processes = processes_of(engine)
        os.kill(processes[0].pid, signal.SIGKILL)
        assert "killed by signal 9" in await engine.wait_died()
        await engine.stop()
        await until(lambda: all_ended(processes))


async def test_a_killed_worker_leaves_no_process() -> None:
    program = (
        "import asyncio, sys\n"
        "from headrace.worker.engines.vllm import VllmEngine, VllmOptions\n"
        "async def main():\n"
        "    engine = VllmEngine('m', VllmOptions(command=sys.argv[1]))\n"
        "    await engine.start()\n"
        "    print(engine.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, COMMAND, stdout=asyncio.subprocess.PIPE
    )
    assert worker.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            pid = int(await worker.stdout.readline())
        processes = descendants(pid)
        assert len(processes) == 3
    finally:
        worker.kill()
        await worker.wait()
    await until(lambda: all_ended(processes))


async def test_what_keeps_it_from_starting_is_said(tmp_path: Path) -> None:
    told = tmp_path / "metrics"
    told.write_text('vllm:num_requests_running{engine="0"} 0\n')
    with pytest.raises(EngineStartError, match=r"vLLM 0\.32\.0 tells no capacity: vllm:cache_config_info"):
        async with started(f"--fake-metrics {told}"):
            pass
    told.write_text(told.read_text() + 'vllm:cache_config_info{block_size="16",num_gpu_blocks="11"} 1.0\n')
    with pytest.raises(
        EngineStartError,
        match=r"vLLM 0\.99\.0 tells no usage of its KV cache: neither vllm:kv_cache_usage_perc nor "
        "vllm:gpu_cache_usage_perc is in its /metrics",
    ):
        async with started(f"--fake-metrics {told} --fake-version 0.99.0"):
            pass
    with pytest.raises(EngineStartError, match=r"vLLM 0\.12\.1 is too old: 0\.13 or newer"):
        async with started("--fake-version 0.12.1"):
            pass
    with pytest.raises(EngineStartError, match=r"the vLLM server exited with code 3:\nno such device"):
        async with started("--fake-exit 3"):
            pass
    silent = {"command": "sh -c 'test $2 = --version && echo 0.32.0 || sleep 60' x", "start_timeout_s": "0.5"}
    with pytest.raises(EngineStartError, match=r"the vLLM server was not ready after 0\.5 s$"):
        await make_engine("vllm", "m", silent).start()
    with pytest.raises(EngineStartError, match="vLLM is not installed"):
        await make_engine("vllm", "m", {"command": "no-such-program"}).start()


async def test_a_second_one_on_its_gpu_is_refused_by_its_name_until_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml([Card("GPU-aa11", free_gib=79)])
    monkeypatch.setattr(vllm_gpus, "visible_gpus", lambda *, environ: visible_gpus(nvml=nvml, environ={}))
    monkeypatch.setattr(vllm_gpus, "find_gpu", lambda uuid: find_gpu(uuid, nvml=nvml, environ={}))
    told = VllmOptions(command=COMMAND, args="--gpu-memory-utilization 0.6", start_timeout_s=15.0)
    one, other = (VllmEngine("m", told, worker=name, shared_folder=tmp_path) for name in ("w1", "w2"))
    try:
        async with asyncio.timeout(2 * DEADLINE_S):
            await one.start()
            with pytest.raises(EngineStartError, match=r"worker w1 has 48\.0 GiB of its 80\.0 GiB, and 48\.0 GiB more"):
                await other.start()
            (tmp_path / "GPU-aa11" / "table.json").unlink()
            await one.check_health()
            with pytest.raises(EngineStartError, match="worker w1 has"):
                await other.start()
            await one.stop()
            await other.start()
            assert await generate(other, 2) == "0 1 "
    finally:
        await one.stop()
        await other.stop()
    assert list(tmp_path.glob("*/*.alive")) == []


class _Silent(SimEngine):
    """Says for how long it has computed nothing."""

    silent_s = 0.0

    async def usage(self) -> EngineUsage:
        return msgspec.structs.replace(await super().usage(), silent_s=self.silent_s)


async def test_a_silent_engine_is_reported_and_gets_nothing_more_until_it_computes(
    broker_url: str, prefix: str
) -> None:
    engine = _Silent(MODEL, SimOptions())
    async with deployment(broker_url, prefix) as running:
        await running.worker(engine, worker="w1")

        async def says(state: str, reason: str) -> bool:
            seen = await WorkersBucket(running.bus).get("w1")
            beat = seen.beat if seen is not None else None
            return beat is not None and beat.state == state and reason in beat.reason

        began = time.monotonic()
        engine.silent_s = 4.0
        await until(lambda: says("Busy", "computed nothing"))
        assert time.monotonic() - began < 3
        engine.silent_s = 0.0
        await until(lambda: says("Ready", ""))
