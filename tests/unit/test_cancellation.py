"""A cancellation that comes in the same turn of the loop as an answer, or an error, is not lost."""

import asyncio

import pytest

from headrace.bus.steady import honouring_cancel


@pytest.mark.parametrize("outcome", [42, ConnectionRefusedError("nobody listens there")])
async def test_a_cancellation_is_not_lost_to_what_comes_with_it(outcome: int | Exception) -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waits = asyncio.Event()

    async def wait() -> int:
        waits.set()
        return await asyncio.wait_for(future, 10)

    task = asyncio.create_task(honouring_cancel(wait()))
    await waits.wait()
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    future.exception() if isinstance(outcome, Exception) else future.result()


async def test_results_and_errors_come_through() -> None:
    async def fails() -> None:
        raise ValueError("wrong")

    assert await honouring_cancel(asyncio.sleep(0, "right")) == "right"
    with pytest.raises(ValueError, match="wrong"):
        await honouring_cancel(fails())
