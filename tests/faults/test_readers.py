"""Readers that stop reading, and streams that are interrupted under them."""

import asyncio
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from headrace.bus.joblog import JobLog
from headrace.bus.jobqueue import JobQueue
from headrace.client import Accepted, Delta, Done
from headrace.errors import JobCancelledError, JobFailedError
from headrace.schemas.subjects import QueueName
from tests.deployment import MODEL, Deployment, deployment, sim, until
from tests.faults.checking import sim_answer
from tests.faults.reading import Reading

NUM_TOKENS = 10_000
LATE_S = 2.0
"""What a busy machine may add to the promised time."""


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

    async with deployment(broker_url, prefix) as running, asyncio.timeout(120):
        await running.worker(engine)
        async with asyncio.TaskGroup() as group:
            group.create_task(read_slowly())
            await is_resting.wait()
            await asyncio.gather(*(reading.read(running.client) for reading in others))
            await until(has_ended)
            go_on.set()


async def test_a_reader_of_one_byte_a_second(broker_url: str, prefix: str) -> None:  # STR-8
    """A socket that takes next to nothing: the broker keeps what is sent there, and nobody else waits for it."""
    engine = sim(tokens_per_second=4000.0, max_model_len=20_000, kv_tokens=1_000_000)
    others = [Reading(f"beside {number}", 200) for number in range(10)]
    job = f"slow-{prefix[:9]}"
    body: dict[str, Any] = {"prompt": "slow", "max_tokens": NUM_TOKENS, "ignore_eos": True}

    async def has_ended() -> bool:
        last = await JobLog(running.bus).last("default", job)
        return last is not None and last.is_terminal

    async def read_a_byte_a_second() -> None:
        while True:
            await loop.sock_recv(connection, 1)
            await asyncio.sleep(1)

    loop = asyncio.get_running_loop()
    address = urlsplit(broker_url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await loop.sock_connect(connection, (address.hostname, address.port))
        await loop.sock_sendall(connection, b'CONNECT {"verbose":false,"headers":true}\r\nSUB _INBOX.default.> 1\r\n')
        async with deployment(broker_url, prefix) as running, asyncio.timeout(120):
            await running.worker(engine)
            slow = asyncio.create_task(read_a_byte_a_second())
            stream = running.client.stream(model=MODEL, job_id=job, **body)
            assert isinstance(await anext(aiter(stream)), Accepted)
            await asyncio.gather(*(reading.read(running.client) for reading in others))
            await until(has_ended)
            assert not slow.done()
            slow.cancel()
            await asyncio.wait([slow])
            offset, text = 0, ""
            async for event in stream:  # nor did its worker wait: whoever reads now finds all of it
                if isinstance(event, Delta):
                    assert event.offset == offset
                    offset, text = offset + event.num_tokens, text + event.text
            assert (offset, text) == (NUM_TOKENS, sim_answer("slow", NUM_TOKENS))


async def test_a_reader_that_cancels_frees_the_engine(broker_url: str, prefix: str) -> None:  # STR-3
    engine = sim(tokens_per_second=30.0)
    cancelled_at = 0.0

    async def read_three() -> None:
        nonlocal cancelled_at
        num_read = 0
        stream = running.client.stream(model=MODEL, job_id="cut", prompt="cut short", max_tokens=1000, ignore_eos=True)
        async for event in stream:
            num_read += isinstance(event, Delta)
            if num_read == 3 and not cancelled_at:
                cancelled_at = time.monotonic()
                await stream.cancel()

    async def is_aborted() -> bool:
        return engine.num_aborted == 1 and engine.num_running == 0

    async def delivered() -> tuple[int, int, int]:
        progress = await JobQueue(running.bus, MODEL).progress(QueueName())
        assert progress is not None
        return progress.num_in_flight, progress.num_waiting, progress.consumer_sequence

    async with deployment(broker_url, prefix, ack_wait_s=0.5) as running, asyncio.timeout(120):
        await running.worker(engine)
        with pytest.raises(JobCancelledError):
            await read_three()
        await until(is_aborted, timeout_s=3)
        waited_s = time.monotonic() - cancelled_at
        print(f"aborted {1000 * waited_s:.0f} ms after the cancel")
        assert waited_s < 1
        await until(lambda: is_queue_empty(running))
        assert await delivered() == (0, 0, 1)
        await asyncio.sleep(2 * running.settings.ack_wait_s)
        assert await delivered() == (0, 0, 1)  # and it was not delivered again
        assert (await JobLog(running.bus).read("default", "cut"))[-1].kind == "cancelled"


async def test_an_answer_that_is_long_and_fast_can_be_cancelled_too(broker_url: str, prefix: str) -> None:  # STR-3
    """Its worker appends all the time, and each of its appends wins over a `cancelled` that was prepared before."""
    engine = sim(tokens_per_second=4000.0, max_model_len=20_000, kv_tokens=1_000_000)
    asked_at = 0.0

    async def read() -> None:
        nonlocal asked_at
        async with asyncio.TaskGroup() as group:
            stream = running.client.stream(model=MODEL, prompt="fast", max_tokens=NUM_TOKENS, ignore_eos=True)
            async for event in stream:
                if isinstance(event, Delta) and event.offset >= NUM_TOKENS // 5 and not asked_at:
                    asked_at = time.monotonic()
                    group.create_task(stream.cancel())

    async def is_aborted() -> bool:
        return engine.num_aborted == 1 and engine.num_running == 0

    async with deployment(broker_url, prefix) as running, asyncio.timeout(120):
        await running.worker(engine)
        with pytest.raises(ExceptionGroup) as caught:
            await read()
        assert caught.group_contains(JobCancelledError)
        await until(is_aborted, timeout_s=3)
        waited_s = time.monotonic() - asked_at
        print(f"aborted {1000 * waited_s:.0f} ms after the cancel")
        assert waited_s < 1 + LATE_S


async def is_queue_empty(running: Deployment) -> bool:
    return not await JobQueue(running.bus, MODEL).counts()


async def test_an_interrupted_answer_has_as_many_tokens_as_were_asked_for(
    broker_url: str, prefix: str
) -> None:  # STR-5
    async with deployment(broker_url, prefix) as running, asyncio.timeout(120):
        await running.worker(sim(tokens_per_second=100.0, die_after=5, fault_first=1))
        reading = Reading("ten", 10)
        await reading.read(running.client)
        assert len(reading.attempts) == 2


@pytest.mark.parametrize(
    ("more", "num_tokens"),
    [({"n": 2}, 10), ({"response_format": {"type": "json_object"}}, 5)],
    ids=["two choices", "constrained"],
)
async def test_what_cannot_be_continued_says_so(
    broker_url: str, prefix: str, more: dict[str, Any], num_tokens: int
) -> None:  # STR-5
    messages = [{"role": "user", "content": "two"}]
    body: dict[str, Any] = {"messages": messages, "max_tokens": 10, "ignore_eos": True, **more}
    async with deployment(broker_url, prefix) as running, asyncio.timeout(120):
        await running.worker(sim(tokens_per_second=100.0, die_after=5, fault_first=1))
        deltas: list[Delta] = []

        async def read() -> None:
            async for event in running.client.stream(model=MODEL, **body):
                if isinstance(event, Delta):
                    deltas.append(event)

        with pytest.raises(JobFailedError) as caught:
            await read()
        assert caught.value.code == "not_resumable"
        assert sum(delta.num_tokens for delta in deltas) == num_tokens  # of each choice five, none of them twice
