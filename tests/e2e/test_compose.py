"""compose.yaml as it is, built and run by Docker: skipped by name where there is no engine to run it."""

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = f"headrace-test-{os.getpid()}"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]


def compose(*arguments: str, timeout_s: float) -> str:
    argv = ["docker", "compose", "--project-name", PROJECT, "--profile", "cpu", *arguments]
    result = subprocess.run(argv, check=False, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.fixture(scope="module")
def stack() -> Iterator[None]:
    """All services, up and healthy; nothing of them is left afterwards."""
    if shutil.which("docker") is None:
        pytest.skip("no docker here to run compose.yaml with")
    for question in (["docker", "info"], ["docker", "compose", "version"]):
        asked = subprocess.run(question, check=False, capture_output=True, text=True, timeout=60)
        if asked.returncode:
            pytest.skip(f"compose.yaml is not run here: `{' '.join(question)}` fails: {asked.stderr.strip()[:200]}")
    try:
        compose("up", "--build", "--detach", "--wait", "--wait-timeout", "600", timeout_s=1200)
        yield
    finally:
        subprocess.run(
            ["docker", "compose", "--project-name", PROJECT, "--profile", "cpu", "down", "--volumes", "--timeout", "5"],
            check=False, cwd=ROOT, capture_output=True, timeout=120,
        )  # fmt: skip


def fetched(url: str, body: dict[str, Any] | None = None) -> str:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        text: str = response.read().decode()
        return text


@pytest.mark.usefixtures("stack")
def test_a_question_is_answered_and_a_broker_may_die() -> None:
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "What is a weir?"}], "max_tokens": 16}
    for dies in ("", "broker-1", "router"):
        if dies:
            compose("kill", dies, timeout_s=60)
        answer = json.loads(fetched("http://127.0.0.1:8080/v1/chat/completions", body))
        assert answer["choices"][0]["message"]["content"]
    metrics = fetched("http://127.0.0.1:8081/metrics")
    for service in ("router", "worker", "gateway", "monitor"):
        assert f'service="{service}"' in metrics
