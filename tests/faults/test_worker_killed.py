"""A worker dies or hangs with streams on it: others go on after the last token; readers see every token once."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import headrace.client
from headrace.bus.server import BrokerInfo
from headrace.client import Client, Delta, Done, Requeued, Started
from headrace.lifecycle import ChildProcess
from headrace.settings import Settings
from tests.processes import part, serving

MODEL = "sim-model"
NUM_STREAMS = 20
NUM_TOKENS = 60


class Fleet:
    """Workers as processes, by worker id."""

    def __init__(self, client: Client, workers: dict[str, ChildProcess]) -> None:
        self.client = client
        self.workers = workers


@pytest_asyncio.fixture(params=["notices", "beats"])
async def fleet(
    request: pytest.FixtureRequest, broker: BrokerInfo, prefix: str, tmp_path: Path
) -> AsyncIterator[Fleet]:
    """Router, monitor (with or without the system account's notices) and two workers with room for everything."""

    def started(*arguments: str, **variables: str) -> ChildProcess:
        return part(*arguments, url=broker.url, prefix=prefix, state_dir=tmp_path, **variables)

    notices = {"HEADRACE_NATS_SYSTEM_URL": broker.system_url} if request.param == "notices" else {}
    workers = {
        name: started(
            "serve", "worker", "--engine", "sim", "--model", MODEL, "--worker-id", name,
            "-o", "tokens_per_second=30", "-o", "kv_tokens=1000000",
        )
        for name in ("w1", "w2")
    }  # fmt: skip
    async with (
        started("serve", "router"),
        started("serve", "monitor", **notices),
        workers["w1"],
        workers["w2"],
        headrace.client.connect(broker.url, settings=Settings(prefix=prefix)) as client,
    ):
        await serving(client, MODEL)
        yield Fleet(client, workers)


class Reading:
    """One stream as read: when each attempt started, and a check that no token was lost or repeated."""

    def __init__(self) -> None:
        self.attempts: dict[int, tuple[str, float]] = {}
        self.reasons: list[str] = []
        self.first_token = asyncio.Event()
        self.done: Done | None = None

    async def read(self, client: Client, number: int) -> None:
        offset, text = 0, ""
        body: dict[str, Any] = {"messages": [{"role": "user", "content": f"stream {number}"}], "max_tokens": NUM_TOKENS}
        async for event in client.stream(model=MODEL, ignore_eos=True, **body):
            if isinstance(event, Started):
                self.attempts[event.attempt] = (event.worker, time.monotonic())
            if isinstance(event, Requeued):
                self.reasons.append(event.reason)
            if isinstance(event, Delta):
                assert event.offset == offset
                offset += event.num_tokens
                text += event.text
                self.first_token.set()
            if isinstance(event, Done):
                assert event.text == text
                assert event.usage is not None
                assert event.usage.completion_tokens == NUM_TOKENS == offset
                self.done = event


async def test_streams_of_a_killed_worker_go_on_elsewhere(fleet: Fleet) -> None:
    readings = [Reading() for _ in range(NUM_STREAMS)]
    async with asyncio.TaskGroup() as group:
        for number, reading in enumerate(readings):
            group.create_task(reading.read(fleet.client, number))
        await asyncio.gather(*(reading.first_token.wait() for reading in readings))
        victim = readings[0].attempts[1][0]
        killed_at = time.monotonic()
        fleet.workers[victim].send_signal(signal.SIGKILL)
    assert all(reading.done is not None for reading in readings)
    moved = [reading for reading in readings if len(reading.attempts) > 1]
    assert {reading.attempts[1][0] for reading in moved} == {victim}
    assert moved
    assert {tuple(reading.reasons) for reading in moved} == {("worker_lost",)}
    gaps_ms = sorted(1000 * (reading.attempts[2][1] - killed_at) for reading in moved)
    print(f"{len(moved)} streams moved; kill to started: {gaps_ms[0]:.0f} to {gaps_ms[-1]:.0f} ms")


async def test_a_hung_worker_is_fenced_and_serves_again_when_it_returns(fleet: Fleet) -> None:
    reading = Reading()
    async with asyncio.TaskGroup() as group:
        group.create_task(reading.read(fleet.client, 1))
        await reading.first_token.wait()
        victim = reading.attempts[1][0]
        fleet.workers[victim].send_signal(signal.SIGSTOP)
    assert reading.done is not None
    assert {worker for worker, _ in reading.attempts.values()} == {"w1", "w2"}
    fleet.workers[victim].send_signal(signal.SIGCONT)
    (other,) = {"w1", "w2"} - {victim}
    fleet.workers[other].send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(fleet.workers[other].wait(), 10) == 0
    again = Reading()
    await again.read(fleet.client, 2)
    assert again.attempts[1][0] == victim
