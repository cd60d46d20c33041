"""Fixtures every test can use: a real nats-server for the session and a prefix of its own for each test."""

import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import settings

from headrace.bus.server import BrokerInfo, EmbeddedBroker
from tests.sweeping import remove_streams

# A busy machine is no failure, nor is what nobody changed; `--hypothesis-profile random` looks for more.
settings.register_profile("headrace", parent=settings(), deadline=None, derandomize=True)
settings.register_profile("random", parent=settings(), deadline=None)
settings.load_profile("headrace")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Which test runs in which process, where there are several (`--numprocesses`)."""
    from tests.scheduling import TimedApart

    return TimedApart(config, log)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def broker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[BrokerInfo]:
    """A real nats-server with JetStream on a port the OS chose and a store of its own, shared by a process's tests."""
    async with EmbeddedBroker(tmp_path_factory.mktemp("broker"), port=0) as embedded:
        yield embedded.info


@pytest.fixture(scope="session")
def broker_url(broker: BrokerInfo) -> str:
    """URL of the session's nats-server; needs no credentials."""
    return broker.url


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> Iterator[str]:
    """A deployment prefix no other test uses, so that tests share the broker without seeing each other.

    What it left in the session's broker is removed: idle streams by the hundreds slow down every later test.
    """
    url = request.getfixturevalue("broker_url") if "broker_url" in request.fixturenames else None
    name = f"t{secrets.token_hex(4)}.v1"
    yield name
    if url is not None:
        remove_streams(url, name)
