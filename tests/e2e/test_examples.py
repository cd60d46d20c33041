"""The examples and the README's program run as they stand, against a deployment with the simulated engine."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from headrace.schemas.refusals import CODES
from tests.deployment import Deployment, deployment, sim

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m"
DEADLINE_S = 30.0


@pytest_asyncio.fixture
async def running(broker_url: str, prefix: str) -> AsyncIterator[Deployment]:
    """One router and one worker that serves the model the examples ask for."""
    async with deployment(broker_url, prefix) as started:
        await started.worker(sim(tokens_per_second=100.0), model=MODEL)
        yield started


async def run(program: Path, *arguments: str, url: str, prefix: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a Python program that is told where the deployment is."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "OTEL_"))}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(program),
        *arguments,
        env={**inherited, "HEADRACE_NATS_URL": url, "HEADRACE_PREFIX": prefix},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def answer_of(running: Deployment, question: str) -> str:
    """What the deterministic engine says to it."""
    messages = [{"role": "user", "content": question}]
    return (await running.client.complete(model=MODEL, messages=messages, max_tokens=100, temperature=0)).text


async def test_stream(running: Deployment, broker_url: str, prefix: str) -> None:
    code, out, err = await run(ROOT / "examples/stream.py", "What", "is", "a", "weir?", url=broker_url, prefix=prefix)
    assert code == 0, err
    assert out == await answer_of(running, "What is a weir?") + "\n"
    assert "attempt 1 on worker w1" in err
    assert "completion_tokens=32" in err


async def test_bare_nats(running: Deployment, broker_url: str, prefix: str) -> None:
    code, out, err = await run(ROOT / "examples/bare_nats.py", "What is a weir?", url=broker_url, prefix=prefix)
    assert code == 0, err
    assert out == await answer_of(running, "What is a weir?") + "\n"
    assert '"position":0' in err
    assert "'completion_tokens': 32" in err


async def test_attach_and_cancel(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running:
        await running.worker(sim(tokens_per_second=50.0, default_tokens=5_000), model=MODEL)
        code, out, err = await run(ROOT / "examples/attach_and_cancel.py", url=broker_url, prefix=prefix)
        assert code == 0, err
        (job,) = set(re.findall(r"story-\w+", err))
        assert (await running.client.status(job)).state == "cancelled"
    assert re.search(r"left job story-\w+ running\nit is cancelled\nwho attaches now", err)
    first, attached, afterwards = (line.split() for line in out.splitlines())
    assert len(first) >= 10
    assert len(attached) >= 20
    assert attached[:10] == first[:10]
    assert afterwards[:20] == attached[:20]


async def test_the_program_of_the_readme(running: Deployment, broker_url: str, prefix: str, tmp_path: Path) -> None:
    (source,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    program = tmp_path / "program.py"
    program.write_text(source)
    code, out, err = await run(program, url=broker_url, prefix=prefix)
    assert code == 0, err
    (question,) = re.findall(r'"content": "([^"]+)"', source)
    assert out.rstrip() == (await answer_of(running, question)).rstrip()


@pytest.mark.parametrize("name", ["stream.py", "bare_nats.py", "attach_and_cancel.py"])
async def test_an_unknown_model_is_one_line_and_exit_code_1(name: str, broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix):
        code, out, err = await run(ROOT / "examples" / name, url=broker_url, prefix=prefix)
    assert (code, out) == (1, "")
    assert "model_not_found" in CODES
    assert "model_not_found" in err
    assert len(err.splitlines()) == 1
