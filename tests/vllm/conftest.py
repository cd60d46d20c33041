"""A real vLLM for the session, and engines that start one of their own."""

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.worker.engines.vllm import VllmEngine, VllmOptions
from tests.vllm.environment import CACHE_VARIABLE, Environment
from tests.vllm.load import MODEL, Direct

BLOCK_SIZE = 32
NUM_BLOCKS = 61
"""Twenty streams of three blocks, and the block that vLLM gives to nobody."""
MAX_NUM_SEQS = 20
_CPU = "0"
"""vLLM has a core of its own: its processes spin, and beside others on theirs everything crawls."""
_START_WITHIN_S = 180.0
_ARGUMENTS = (
    "--dtype float32 --enforce-eager --max-model-len 1024 --kv-cache-memory-bytes 256M "
    f"--block-size {BLOCK_SIZE} --num-gpu-blocks-override {NUM_BLOCKS} --no-enable-prefix-caching"
)


@pytest.fixture(scope="session")
def environment() -> Environment:
    found = Environment(Path(os.environ.get(CACHE_VARIABLE) or ".vllm-cache"))
    if not os.environ.get(CACHE_VARIABLE) or not found.is_there:
        pytest.skip("a real vLLM is needed: make test-vllm builds one and runs this")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _CPU)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return found


@pytest.fixture(scope="session")
def options(environment: Environment) -> dict[str, str]:
    """Options of the `vllm` engine, as a command line gives them."""
    return {
        "model_path": str(environment.model),
        "command": f"taskset -c {_CPU} {environment.program}",
        "args": _ARGUMENTS,
        "max_concurrency": str(MAX_NUM_SEQS),
        "start_timeout_s": str(_START_WITHIN_S),
    }


@pytest.fixture(scope="session")
def make_engine(options: dict[str, str]) -> Callable[..., VllmEngine]:
    """An engine that is not started yet."""

    def make(**changed: Any) -> VllmEngine:
        told: dict[str, Any] = {**options, "max_concurrency": MAX_NUM_SEQS, "start_timeout_s": _START_WITHIN_S}
        return VllmEngine(MODEL, VllmOptions(**{**told, **changed}))

    return make


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server(make_engine: Callable[..., VllmEngine]) -> AsyncIterator[Direct]:
    """A vLLM that serves the whole session, for direct questions and for workers that attach to it."""
    engine = make_engine()
    try:
        await engine.start()
        assert engine.facts.port is not None
        async with Direct(engine.facts.port) as direct:
            yield direct
    finally:
        await engine.stop()
