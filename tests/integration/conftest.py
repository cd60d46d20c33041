"""Fixtures of tests that talk to the broker through `bus` alone."""

from collections.abc import AsyncIterator

import pytest_asyncio

from headrace.bus.connection import Bus, connect
from headrace.bus.provision import provision
from headrace.settings import Settings


@pytest_asyncio.fixture
async def bus(broker_url: str, prefix: str) -> AsyncIterator[Bus]:
    """A connection of a provisioned deployment of its own, with one model, `m`."""
    settings = Settings(prefix=prefix, state_dir="unused", request_timeout_s=5)
    async with connect(broker_url, settings, name="test") as connected:
        await provision(connected, models=("m",))
        yield connected
