"""`headrace up` with the simulated engine, as a user starts it: asked, looked at, stopped, killed."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from headrace.bus.server import discover
from tests.deployment import until

WITHIN_S = 100.0
UP_LINE = "Headrace is up"


class Up:
    """A running `headrace up`, its state directory and its processes."""

    def __init__(self, process: asyncio.subprocess.Process, state_dir: Path) -> None:
        self.process = process
        self.state_dir = state_dir
        self.children: list[int] = []
        self.http = ""

    async def run(self, *argv: str, code: int = 0) -> str:
        """Stdout of `headrace argv` against this deployment; it must end with `code`."""
        process = await start(self.state_dir, *argv)
        async with asyncio.timeout(WITHIN_S):
            out, err = await process.communicate()
        assert process.returncode == code, err.decode()
        assert "Traceback" not in err.decode()
        return out.decode()

    async def end(self, number: signal.Signals) -> int:
        """Its exit code after a signal."""
        self.process.send_signal(number)
        async with asyncio.timeout(WITHIN_S):
            return await self.process.wait()


async def start(state_dir: Path, *argv: str) -> asyncio.subprocess.Process:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "OTEL_"))}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headrace.cli", *argv,
        env={**inherited, "HEADRACE_STATE_DIR": str(state_dir), "HEADRACE_GRACE_S": "5", "HEADRACE_HTTP_PORT": "0"},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def running(state_dir: Path, *argv: str) -> AsyncIterator[Up]:
    process = await start(state_dir, "up", "--engine", "sim", "--port", "0", *argv)
    up = Up(process, state_dir)
    assert process.stdout is not None
    assert process.stderr is not None
    draining = asyncio.create_task(process.stderr.read())
    try:
        async with asyncio.timeout(WITHIN_S):
            while UP_LINE not in (line := (await process.stdout.readline()).decode()):
                assert line, (await draining).decode()
        up.http = line.rpartition("HTTP ")[2].strip()
        up.children = children_of(process.pid)
        yield up
    finally:
        if process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await up.end(signal.SIGTERM)
        if process.returncode is None:
            process.kill()
            await process.wait()
        await draining


@pytest_asyncio.fixture
async def up(tmp_path: Path) -> AsyncIterator[Up]:
    async with running(tmp_path / "state", "--workers", "2", "-o", "tokens_per_second=100") as started:
        yield started


def children_of(pid: int) -> list[int]:
    """Processes whose parent it is, from /proc; none where there is no /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = entry.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(entry.parent.name))
    return found


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def gone(pids: list[int]) -> None:
    async def all_gone() -> bool:
        return not any(is_alive(pid) for pid in pids)

    await until(all_gone)


async def test_a_first_session(up: Up) -> None:
    text = await up.run("ask", "--max-tokens", "5", "--job-id", "first", "hello")
    assert len(text.split()) == 5
    answer = json.loads(await up.run("ask", "--max-tokens", "5", "--json", "hello"))
    assert (answer["text"], answer["finish_reason"], answer["usage"]["completion_tokens"]) == (
        text.rstrip("\n"),
        "length",
        5,
    )

    messages = [{"role": "user", "content": "hello"}]
    said = await over_http(up, {"model": "sim", "messages": messages, "max_tokens": 5})
    assert said["choices"][0]["message"]["content"] == answer["text"]

    now = json.loads(await up.run("status", "--json"))
    assert [(each["model"], each["engine"], each["state"], each["running"]) for each in now["workers"]] == [
        ("sim", "sim", "Ready", 0)
    ] * 2
    assert {each["id"] for each in now["workers"]} >= {answer["worker"]}
    assert {each["pid"] for each in now["workers"]} <= set(up.children)
    assert [(each["model"], each["queued"], each["running"]) for each in now["queues"]] == [("sim", 0, 0)]
    assert "Workers" in await up.run("status")

    job = json.loads(await up.run("jobs", "show", "first", "--json"))
    assert (job["state"], job["attempt"], job["num_tokens"], job["usage"]["completion_tokens"]) == ("done", 1, 5, 5)
    assert [event["event"] for event in job["events"]][:2] == ["accepted", "started"]
    assert job["events"][-1]["event"] == "done"
    assert "History" in await up.run("jobs", "show", "first")

    assert {each["action"] for each in json.loads(await up.run("provision", "--json"))} == {"unchanged"}
    assert await up.run("ask", "--model", "nonsense", "hello", code=1) == ""
    assert await up.run("jobs", "show", "nonsense", code=1) == ""
    await up.run("jobs", "cancel", "first", code=1)


async def over_http(up: Up, body: dict[str, Any]) -> Any:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WITHIN_S)) as session,
        session.post(f"{up.http}/v1/chat/completions", json=body) as response,
    ):
        return await response.json()


async def test_sigterm_leaves_no_process_and_a_clean_state_directory(up: Up) -> None:
    assert len(up.children) == 6  # broker, router, monitor, gateway, two workers
    assert await up.end(signal.SIGTERM) == 0
    assert [pid for pid in up.children if is_alive(pid)] == []
    assert discover(up.state_dir) is None
    left = {path.name for path in up.state_dir.iterdir()}
    assert left <= {"broker", "broker.conf", "broker.secret", "broker.lock", "broker.pid", "broker.log"}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the children of a killed process")
async def test_sigkill_leaves_no_process(up: Up) -> None:
    assert len(up.children) == 6
    assert await up.end(signal.SIGKILL) == -signal.SIGKILL
    await gone(up.children)


async def test_a_part_that_dies_is_started_again(up: Up) -> None:
    now = json.loads(await up.run("status", "--json"))
    workers = {each["pid"] for each in now["workers"]}
    broker = discover(up.state_dir)
    assert broker is not None
    for pid in set(up.children) - {broker.pid} - {min(workers)}:  # router, monitor, gateway and one worker
        os.kill(pid, signal.SIGKILL)
    assert (await up.run("ask", "--max-tokens", "3", "hello")).strip()

    async def two_again() -> bool:
        seen = json.loads(await up.run("status", "--json"))
        pids = {each["pid"] for each in seen["workers"] if each["state"] == "Ready"}
        return len(pids - {max(workers)}) == 2

    await until(two_again, timeout_s=WITHIN_S)


async def test_the_broker_is_started_again_on_its_port(up: Up) -> None:
    before = discover(up.state_dir)
    assert before is not None
    os.kill(before.pid, signal.SIGKILL)

    async def is_back() -> bool:
        now = discover(up.state_dir)
        return now is not None and now.pid != before.pid and now.url == before.url

    await until(is_back, timeout_s=WITHIN_S)
    assert (await up.run("ask", "--max-tokens", "3", "hello")).strip()


async def test_ctrl_c_cancels_the_question(tmp_path: Path) -> None:
    async with running(tmp_path / "state", "-o", "tokens_per_second=20", "-o", "default_tokens=4000") as up:
        process = await start(up.state_dir, "ask", "--job-id", "long", "tell me everything")
        assert process.stdout is not None
        async with asyncio.timeout(WITHIN_S):
            assert await process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            _, err = await process.communicate()
        assert process.returncode == 130
        assert err == b""
        assert json.loads(await up.run("jobs", "show", "long", "--json"))["state"] == "cancelled"


async def test_a_queued_question_is_cancelled_by_its_id(tmp_path: Path) -> None:
    slow = ("--max-concurrency", "1", "-o", "tokens_per_second=20", "-o", "default_tokens=4000")
    async with running(tmp_path / "state", *slow) as up:
        first = await start(up.state_dir, "ask", "--job-id", "first", "tell me everything")
        assert first.stdout is not None
        async with asyncio.timeout(WITHIN_S):
            assert await first.stdout.read(1)
        second = await start(up.state_dir, "ask", "--job-id", "second", "and this")

        async def is_queued() -> bool:
            now = json.loads(await up.run("status", "--json"))
            return [(each["queued"], each["running"]) for each in now["queues"]] == [(1, 1)]

        await until(is_queued, timeout_s=WITHIN_S)
        job = json.loads(await up.run("jobs", "show", "second", "--json"))
        assert (job["state"], job["position"]) == ("queued", 0)
        for name in ("second", "first"):
            assert "cancelled" in await up.run("jobs", "cancel", name)
        for process in (first, second):
            async with asyncio.timeout(WITHIN_S):
                _, err = await process.communicate()
            assert process.returncode == 1
            assert b"cancelled" in err


NO_SERVER = ("--engine", "openai", "--model", "m", "-o", "url=http://127.0.0.1:9", "-o", "start_timeout_s=0.2")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--engine", "llama", "--model", "nonsense"), "worker did not start: no weights known for model 'nonsense'"),
        (NO_SERVER, "worker did not start: no engine at"),
    ],
    ids=["no weights", "no server"],
)
async def test_up_says_why_it_cannot_start_and_leaves_nothing(
    tmp_path: Path, argv: tuple[str, ...], words: str
) -> None:
    process = await start(tmp_path / "state", "up", "--port", "0", *argv)
    async with asyncio.timeout(WITHIN_S):
        out, err = await process.communicate()
    assert process.returncode == 1
    assert UP_LINE not in out.decode()
    last = err.decode().splitlines()[-1]
    assert last.startswith("headrace: ")
    assert words in last
    assert discover(tmp_path / "state") is None
