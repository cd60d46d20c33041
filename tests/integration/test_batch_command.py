"""`headrace batch run` beside a deployment."""

import fcntl
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio

from headrace.worker.engines.sim import SimEngine
from tests.deployment import MODEL, Deployment, deployment, sim
from tests.faults.checking import sim_answer
from tests.processes import part

NUM_TOKENS = 5


class Runs:
    """Runs the command on one file beside one deployment with a worker."""

    def __init__(self, running: Deployment, engine: SimEngine, folder: Path) -> None:
        self._running = running
        self._folder = folder
        self.engine = engine
        self.file = folder / "in.jsonl"
        self.output = folder / "in.jsonl.output.jsonl"
        self.errors = folder / "in.jsonl.errors.jsonl"

    def write(self, *lines: dict[str, Any]) -> None:
        self.file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    async def run(self, *options: str, code: int = 0) -> str:
        """Run it to its end; what it printed."""
        running = self._running
        where: dict[str, Any] = {"url": running.url, "prefix": running.settings.prefix, "state_dir": self._folder}
        async with part("batch", "run", str(self.file), *options, **where) as child:
            assert await child.wait() == code, child.tail()
            return child.tail()

    async def json(self, *options: str, code: int = 0) -> dict[str, Any]:
        """What it printed as JSON."""
        found: dict[str, Any] = json.loads((await self.run(*options, "--json", code=code)).splitlines()[-1])
        return found


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    whole = {"model": MODEL, "prompt": custom_id, "max_tokens": NUM_TOKENS, "ignore_eos": True, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": whole}


def texts(file: Path) -> dict[str, str]:
    results = [json.loads(each) for each in file.read_text().splitlines()]
    return {result["custom_id"]: result["response"]["body"]["choices"][0]["text"] for result in results}


@pytest_asyncio.fixture
async def runs(broker_url: str, prefix: str, tmp_path: Path) -> AsyncIterator[Runs]:
    async with deployment(broker_url, prefix) as running:
        engine = sim()
        await running.worker(engine)
        yield Runs(running, engine, tmp_path)


async def test_all_lines_are_answered_and_asked_once(runs: Runs) -> None:
    names = [f"line {number}" for number in range(20)]
    runs.write(*map(line, names))
    told = await runs.run()
    assert "20 of 20 answered" in told
    assert texts(runs.output) == {name: sim_answer(name, NUM_TOKENS) for name in names}
    assert not runs.errors.exists()
    again = await runs.json()
    assert (again["total"], again["completed"], again["resumed"], again["failed"]) == (20, 20, 20, 0)
    assert runs.engine.num_started == 20
    runs.output.unlink()
    await runs.run()  # under the same names as before: their answers are still in the log
    assert len(texts(runs.output)) == 20
    assert runs.engine.num_started == 20
    await runs.run("--name", "anew", "--output", str(runs.output) + ".2")
    assert runs.engine.num_started == 40


async def test_what_failed_is_told_and_tried_again(runs: Runs) -> None:
    runs.write(line("good"), line("bad", temperature=9))
    for _ in range(2):
        summary = await runs.json(code=1)
        assert (summary["completed"], summary["failed"]) == (1, 1)
        (error,) = [json.loads(each) for each in runs.errors.read_text().splitlines()]
        assert error["custom_id"] == "bad"
        assert error["response"]["status_code"] == 400
    assert list(texts(runs.output)) == ["good"]
    assert "1 failed" in await runs.run(code=1)


async def test_a_line_that_was_cut_off_is_asked_again(runs: Runs) -> None:
    runs.write(line("a"), line("b"))
    await runs.run()
    whole = runs.output.read_bytes()
    runs.output.write_bytes(whole[:-10])
    assert (await runs.json())["resumed"] == 1
    assert sorted(texts(runs.output)) == ["a", "b"]


async def test_nothing_is_sent_of_a_bad_file_nor_written_over_somebody_elses(runs: Runs) -> None:
    runs.write(line("a"), line("a"))
    assert "Line 2: 'custom_id' must be unique" in await runs.run(code=1)
    runs.write(line("a"))
    runs.output.write_text("notes\n")
    assert "something else than results" in await runs.run(code=1)
    runs.output.unlink()
    await runs.run()
    runs.write(line("a", prompt="changed"))
    assert "has changed since" in await runs.run(code=1)
    assert "three different files" in await runs.run("--output", str(runs.file), code=2)
    runs.output.unlink()
    with runs.output.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "by another run" in await runs.run(code=1)
    assert runs.engine.num_started == 1
