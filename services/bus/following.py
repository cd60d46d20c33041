"""Keeping up with a bucket: pushes that may be lost, and a task that looks again now and then."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from headrace.bus.connection import Bus, Message

__all__ = ["following"]


@contextlib.asynccontextmanager
async def following(
    bus: Bus,
    subject: str,
    *,
    on_push: Callable[[Message], Awaitable[None]],
    look_for_ever: Callable[[], Coroutine[Any, Any, None]],
    queue: str = "",
) -> AsyncIterator[None]:
    """Inside this context `on_push` gets what is published on the subject, and `look_for_ever` runs.

    Of those that follow it as one `queue` each push goes to one.
    """
    subscription = await bus.subscribe(subject, queue=queue, cb=on_push)
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(look_for_ever(), name=f"follow {subject}")
            try:
                yield
            finally:
                task.cancel()
    finally:
        if not bus.nc.is_closed:
            await subscription.unsubscribe()
