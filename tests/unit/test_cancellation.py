"""A cancellation that comes in the same turn of the loop as an answer, or an error, is not lost."""

import asyncio
import contextlib

import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError

from headrace.bus.steady import SteadyClient, honouring_cancel


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


async def test_an_attempt_to_connect_that_is_refused_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(client: Client) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):  # as `asyncio.wait_for` does before Python 3.12
            await asyncio.sleep(0)
        raise NatsError("nats: 'Authorization Violation'")

    monkeypatch.setattr(Client, "_process_connect_init", refused)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(SteadyClient()._process_connect_init())


async def test_results_and_errors_come_through() -> None:
    async def fails() -> None:
        raise ValueError("wrong")

    assert await honouring_cancel(asyncio.sleep(0, "right")) == "right"
    with pytest.raises(ValueError, match="wrong"):
        await honouring_cancel(fails())
