"""Readers that stop reading, and streams that are interrupted under them."""

import asyncio
import time
from typing import Any

import pytest

from headrace.bus.joblog import JobLog
from headrace.bus.jobqueue import JobQueue
from headrace.client import Delta, Done
from headrace.errors import JobCancelledError, JobFailedError
from headrace.schemas.subjects import QueueName
from tests.deployment import MODEL, deployment, sim, until
from tests.faults.checking import sim_answer
from tests.faults.reading import Reading

NUM_TOKENS = 10_000


async def test_a_reader_that_reads_nothing_for_long_gets_it_all_and_holds_nobody_up(
    broker_url: str, prefix: str
) -> None:  # STR-8
    engine = sim(tokens_per_second=4000.0, max_model_len=20_000, kv_tokens=1_000_000)
    others = [Reading(f"beside {number}", 200) for number in range(10)]
    is_resting, go_on = asyncio.Event(), asyncio.Event()

    async def read_slowly() -> None:
        text, offset = "", 0
        body: dict[str, Any] = {"prompt": "slow", "max_tokens": NUM_TOKENS, "ignore_eos": True}
        async for event in running.client.stream(model=MODEL, job_id=f"slow-{prefix[:9]}", **body):
            if isinstance(event, Delta):
                assert event.offset == offset
                text, offset = text + event.text, offset + event.num_tokens
                is_resting.set()
                await go_on.wait()
            if isinstance(event, Done):
                assert event.text == text == sim_answer("slow", NUM_TOKENS)
        assert offset == NUM_TOKENS

    async def has_ended() -> bool:
        last = await JobLog(running.bus).last("default", f"slow-{prefix[:9]}")
        return last is not None and last.is_terminal

    async with deployment(broker_url, prefix) as running, asyncio.timeout(50):
        await running.worker(engine)
        async with asyncio.TaskGroup() as group:
            group.create_task(read_slowly())
            await is_resting.wait()
            await asyncio.gather(*(reading.read(running.client) for reading in others))
            await until(has_ended, timeout_s=30)
            go_on.set()


async def test_a_reader_that_cancels_frees_the_engine(broker_url: str, prefix: str) -> None:  # STR-3
    engine = sim(tokens_per_second=30.0)

    async def read_three() -> None:
        num_read = 0
        stream = running.client.stream(model=MODEL, prompt="cut short", max_tokens=1000, ignore_eos=True)
        async for event in stream:
            num_read += isinstance(event, Delta)
            if num_read == 3:
                await stream.cancel()
                num_read += 1

    async def is_aborted() -> bool:
        return engine.num_aborted == 1 and engine.num_running == 0

    async with deployment(broker_url, prefix, ack_wait_s=0.5) as running, asyncio.timeout(30):
        await running.worker(engine)
        with pytest.raises(JobCancelledError):
            await read_three()
        began = time.monotonic()
        await until(is_aborted, timeout_s=3)
        print(f"aborted {1000 * (time.monotonic() - began):.0f} ms after the reader knew")
        progress = await JobQueue(running.bus, MODEL).progress(QueueName())
        assert progress is not None
        assert (progress.num_in_flight, progress.num_waiting, progress.consumer_sequence) == (0, 0, 1)
        assert not await JobQueue(running.bus, MODEL).counts()  # so that nothing can be delivered again


async def test_an_interrupted_answer_has_as_many_tokens_as_were_asked_for(
    broker_url: str, prefix: str
) -> None:  # STR-5
    async with deployment(broker_url, prefix) as running, asyncio.timeout(30):
        await running.worker(sim(tokens_per_second=100.0, die_after=5, fault_first=1))
        reading = Reading("ten", 10)
        await reading.read(running.client)
        assert len(reading.attempts) == 2


async def test_what_cannot_be_continued_says_so(broker_url: str, prefix: str) -> None:  # STR-5
    async with deployment(broker_url, prefix) as running, asyncio.timeout(30):
        await running.worker(sim(tokens_per_second=100.0, die_after=5, fault_first=1))
        deltas: list[Delta] = []

        async def read() -> None:
            async for event in running.client.stream(model=MODEL, prompt="two", max_tokens=10, n=2, ignore_eos=True):
                if isinstance(event, Delta):
                    deltas.append(event)

        with pytest.raises(JobFailedError) as caught:
            await read()
        assert caught.value.code == "not_resumable"
        assert sum(delta.num_tokens for delta in deltas) == 10  # five of each choice, none of them twice
