"""The wait for a message: woken by what comes, over when its time is, given up without a trace."""

import asyncio

import pytest
from nats.aio.msg import Msg

from headrace.bus.inbox import Inbox


def message(data: bytes = b"x") -> Msg:
    return Msg(_client=None, data=data)  # type: ignore[arg-type]


async def test_what_comes_ends_the_wait() -> None:
    inbox = Inbox(8)
    loop = asyncio.get_running_loop()
    loop.call_soon(inbox.put_nowait, message())
    async with asyncio.timeout(5):
        assert await inbox.wait(60)
        assert inbox.get_nowait().data == b"x"
        inbox.put_nowait(message(b"y"))
        assert await inbox.wait(0)
    assert inbox.get_nowait().data == b"y"


async def test_times_are_kept_though_the_timer_is_shared() -> None:
    inbox = Inbox(8)
    loop = asyncio.get_running_loop()
    for put_at, timeout_s, is_there in ((None, 0.05, False), (0.0, 60, True), (None, 0.02, False), (None, 0.08, False)):
        began = loop.time()
        if put_at is not None:
            loop.call_soon(inbox.put_nowait, message())
        async with asyncio.timeout(5):
            assert await inbox.wait(timeout_s) is is_there
        if is_there:
            inbox.get_nowait()
        else:
            assert loop.time() - began >= timeout_s * 0.99


async def test_a_wait_that_is_cancelled_takes_nothing_with_it() -> None:
    inbox = Inbox(8)
    waiting = asyncio.create_task(inbox.wait(60))
    await asyncio.sleep(0)
    inbox.put_nowait(message())
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await inbox.wait(60)
    assert inbox.qsize() == 1


async def test_closing_ends_the_wait_and_later_ones() -> None:
    inbox = Inbox(8)
    asyncio.get_running_loop().call_soon(inbox.cancel)
    async with asyncio.timeout(5):
        assert not await inbox.wait(60)
        assert not await inbox.wait(60)
    assert inbox.is_closed
