"""`headrace bench` as a user runs it: small measurements, and one that is interrupted."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deployment import until

WITHIN_S = 100.0

pytestmark = pytest.mark.e2e


async def start(tmp_path: Path, *argv: str) -> asyncio.subprocess.Process:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "OTEL_"))}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headrace.cli", "bench", *argv,
        env={**inherited, "TMPDIR": str(tmp_path)},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def result_of(tmp_path: Path, *argv: str) -> Any:
    """What a measurement prints as JSON; it must succeed and leave nothing behind."""
    process = await start(tmp_path, *argv, "--json")
    async with asyncio.timeout(WITHIN_S):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert list(tmp_path.iterdir()) == []
    return json.loads(out)


def parts_of(state_dir: Path) -> set[int]:
    """Processes of a deployment in that directory, broker and workers alike."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.fsencode(state_dir) in (
                (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            ):
                found.add(int(entry.name))
        except OSError:
            continue
    return found


async def test_failover_is_measured_with_whole_streams(tmp_path: Path) -> None:
    result = await result_of(tmp_path, "failover", "--kills", "1", "--streams", "3", "--kind", "kill", "--kind", "hang")
    killed, hung = result["kinds"]
    assert [each["kind"] for each in (killed, hung)] == ["kill", "hang"]
    for each in (killed, hung):
        assert (each["num_kills"], each["num_streams"]) == (1, 3)
        assert 1 <= each["num_moved"] <= 3
        assert each["to_started"]["n"] == each["num_moved"] == len(each["to_started_ms"])
        assert all(gap > 0 for gap in each["token_gap_ms"])
    assert hung["to_started"]["min"] > 1000  # three and a half beats
    assert killed["to_started"]["min"] < hung["to_started"]["min"]


async def test_all_streams_are_lost_at_once_beside_idle_survivors(tmp_path: Path) -> None:
    result = await result_of(
        tmp_path, "failover", "--kills", "2", "--streams", "3", "--survivors", "2", "--pace", "10", "--kind", "kill"
    )
    (killed,) = result["kinds"]
    assert result["num_survivors"] == 2
    assert killed["num_moved"] == killed["num_streams"] == 6


async def test_dispatch_is_measured_beside_plain_nats(tmp_path: Path) -> None:
    result = await result_of(tmp_path, "dispatch", "--requests", "10", "--rate", "20", "--seconds", "1")
    for phase, number in (("idle", 10), ("loaded", 20)):
        found = result[phase]
        assert found["accepted"]["n"] == found["first_token"]["n"] == found["at_worker"]["n"] == number
        assert 0 < found["accepted"]["min"] <= found["first_token"]["min"]
        assert found["round_trip"]["n"] >= 1
        assert found["publish_fetch"]["min"] > 0


async def test_relay_is_measured_beside_plain_nats(tmp_path: Path) -> None:
    result = await result_of(tmp_path, "relay", "--rounds", "1", "--streams", "4", "--tokens", "1000", "--pace", "20")
    kinds = [(run["num_streams"], run["pace"]) for run in result["runs"]]
    assert kinds == [(0, 0), (1, 0), (4, 0), (0, 0), (4, 20)]
    assert all(run["per_second"] > 0 for run in result["runs"])
    assert result["runs"][-1]["per_second"] <= 4 * 20 * 1.5


async def test_the_http_edge_is_measured_beside_the_engines_own_server(tmp_path: Path) -> None:
    result = await result_of(
        tmp_path, "http", "--streams", "6", "--rate", "20", "--seconds", "1", "--pace", "10", "--workers", "1"
    )
    for run in (result["engine"], result["gateway"]):
        assert run["num_sustained"] == run["num_streams"] == 6
        assert run["num_tokens"] == run["num_asked"] == run["late"]["n"]
        assert run["first_token"]["n"] == 6
        assert 0 < run["tokens_per_second"] <= 6 * 10 * 1.5
        assert run["late"]["min"] == 0
    assert {"gateway", "worker", "broker", "router", "client"} <= set(result["gateway"]["cpu_us"])


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
async def test_ctrl_c_stops_everything_that_was_started(tmp_path: Path) -> None:
    process = await start(tmp_path, "failover", "--kind", "hang")
    assert process.stderr is not None
    try:
        async with asyncio.timeout(WITHIN_S):
            while b"SIGSTOP: 1 of 20" not in await process.stderr.readline():
                pass
            (state_dir,) = tmp_path.iterdir()

            async def are_there() -> bool:
                return len(parts_of(state_dir)) >= 5

            await until(are_there)
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err
    assert parts_of(state_dir) == set()
    assert list(tmp_path.iterdir()) == []
