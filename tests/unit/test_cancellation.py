"""A cancellation that comes in the same turn of the loop as an answer is not lost."""

import asyncio

import pytest

from headrace.bus.connection import _honouring_cancel


async def test_a_cancel_beside_a_result_still_cancels() -> None:
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(_honouring_cancel(asyncio.wait_for(answer, 5)))
    await asyncio.sleep(0)
    answer.set_result(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_result_alone_is_given() -> None:
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    answer.set_result(1)
    assert await _honouring_cancel(asyncio.wait_for(answer, 5)) == 1
