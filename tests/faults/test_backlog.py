"""Interrupted streams go before everything that was still queued."""

import asyncio
import signal
from pathlib import Path

import headrace.client
from headrace.bus.joblog import JobLog
from headrace.bus.jobqueue import JobQueue
from headrace.bus.server import BrokerInfo
from headrace.client import Client
from headrace.lifecycle import ChildProcess
from headrace.settings import Settings
from tests.deployment import MODEL, until
from tests.faults.reading import Reading
from tests.processes import part, serving

NUM_SLOTS = 5
NUM_QUEUED = 500


async def test_streams_of_a_killed_worker_resume_before_a_backlog(
    broker: BrokerInfo, prefix: str, tmp_path: Path
) -> None:
    def started(*arguments: str, **variables: str) -> ChildProcess:
        return part(*arguments, url=broker.url, prefix=prefix, state_dir=tmp_path, **variables)

    workers = {
        name: started(
            "serve", "worker", "--engine", "sim", "--model", MODEL, "--worker-id", name,
            "--max-concurrency", str(NUM_SLOTS), "-o", "tokens_per_second=30",
        )
        for name in ("w1", "w2")
    }  # fmt: skip
    streams = [Reading(f"stream {number}", 120) for number in range(2 * NUM_SLOTS)]
    queued = [Reading(f"queued {number}", 1) for number in range(NUM_QUEUED)]
    async with (
        asyncio.timeout(120),
        started("serve", "router"),
        started("serve", "monitor", HEADRACE_NATS_SYSTEM_URL=broker.system_url),
        workers["w1"],
        workers["w2"],
        headrace.client.connect(broker.url, settings=Settings(prefix=prefix)) as client,
    ):
        await serving(client, MODEL)
        async with asyncio.TaskGroup() as group:
            for reading in streams:
                group.create_task(reading.read(client))
            await asyncio.gather(*(reading.first_token.wait() for reading in streams))
            for reading in queued:
                group.create_task(reading.read(client))
            await until(lambda: are_in_queue(client, len(streams) + NUM_QUEUED))
            workers["w1"].send_signal(signal.SIGKILL)
            interrupted = [reading for reading in streams if reading.workers == ["w1"]]
        assert len(interrupted) == NUM_SLOTS
        resumed = [await last_start(client, reading) for reading in interrupted]
        begun = sorted([await last_start(client, reading) for reading in queued])
        assert max(resumed) < begun[0]
    assert all(reading.workers == ["w1", "w2"] for reading in interrupted)


async def last_start(client: Client, reading: Reading) -> int:
    """Log sequence of a job's last `started`; one log has them all in the order in which they came."""
    events = await JobLog(client.bus).read("default", reading.job)
    return max(event.sequence for event in events if event.kind == "started")


async def are_in_queue(client: Client, number: int) -> bool:
    return sum((await JobQueue(client.bus, MODEL).counts()).values()) == number
