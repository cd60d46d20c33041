"""A secured broker of a test's own, and bare clients that use its credentials by hand."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from headrace.bus.connection import Bus, connect
from headrace.bus.members import OPERATOR, Member
from headrace.bus.provision import provision
from headrace.bus.securing import SecureDirectory
from headrace.bus.server import EmbeddedBroker
from headrace.schemas.subjects import Names, service_inbox
from headrace.settings import Settings

__all__ = ["ACME", "RIVAL", "Bare", "SecuredBroker", "bare", "secured_broker", "worker"]

ACME = Member(role="tenant", tenant="acme")
RIVAL = Member(role="tenant", tenant="rival")
_ANSWER_S = 0.5
_LOOKS = 50


def worker(name: str, model: str, *pools: str) -> Member:
    """A worker's user."""
    return Member(role="worker", worker=name, model=model, pools=pools)


class SecuredBroker:
    """Where it is, and the credentials of its users."""

    def __init__(self, url: str, directory: SecureDirectory, prefix: str, state_dir: Path) -> None:
        self.url = url
        self.directory = directory
        self.names = Names(prefix)
        self.state_dir = state_dir

    def credentials(self, member: Member) -> str:
        """The credentials file of a user."""
        return str(self.directory.file_of(member))

    def settings(self, member: Member, **values: Any) -> Settings:
        """Settings of a part with that credential."""
        return Settings(
            nats_url=self.url,
            prefix=self.names.prefix,
            state_dir="unused",
            nats_credentials=self.credentials(member),
            **values,
        )

    @contextlib.asynccontextmanager
    async def operator(self) -> AsyncIterator[Bus]:
        """A connection that may do everything."""
        settings = self.settings(OPERATOR, request_timeout_s=5)
        async with connect(self.url, settings, name="test", inbox_prefix=service_inbox("operator")) as bus:
            yield bus

    def violations(self) -> list[str]:
        """What the broker's log says was refused, oldest first."""
        text = (self.state_dir / "broker.log").read_text(errors="replace")
        return [line for line in text.splitlines() if "iolation" in line or "authentication error" in line]


@contextlib.asynccontextmanager
async def secured_broker(
    state_dir: Path, prefix: str, members: Iterable[Member], *, models: tuple[str, ...] = ()
) -> AsyncIterator[SecuredBroker]:
    """A provisioned deployment on a broker of its own that asks everybody for a credential."""
    directory = SecureDirectory(state_dir / "secure")
    directory.enrol(Names(prefix), members)
    broker = EmbeddedBroker(
        state_dir, port=0, accounts=directory.accounts, operator_credentials=directory.file_of(OPERATOR)
    )
    async with broker as running:
        secured = SecuredBroker(running.info.url, directory, prefix, state_dir)
        async with secured.operator() as bus:
            await provision(bus, models=models)
        yield secured


class Bare:
    """A client library with nothing of Headrace around it. `refused` are the broker's words about what it denied."""

    def __init__(self, client: Client, refused: list[str]) -> None:
        self.client = client
        self.refused = refused

    async def is_refused(self, subject: str, data: bytes = b"", **arguments: Any) -> bool:
        """Whether the broker refuses a publish there."""
        before = len(self.refused)
        await self.client.publish(subject, data, **arguments)
        await self.client.flush()
        await asyncio.sleep(0)  # the words come before the answer to the flush; their callback runs after it
        return await self._is_said(subject, before)

    async def is_deaf(self, subject: str) -> bool:
        """Whether the broker refuses a subscription."""
        before = len(self.refused)
        await self.client.subscribe(subject)
        await self.client.flush()
        return await self._is_said(subject, before)

    async def answer(self, subject: str, data: bytes = b"") -> Msg | None:
        """What comes back to a request; None for nothing."""
        try:
            return await self.client.request(subject, data, timeout=_ANSWER_S)
        except (NatsError, TimeoutError):
            return None

    async def _is_said(self, subject: str, before: int) -> bool:
        """Whether the broker's words about a subject come; those about others before it may come late."""
        for _ in range(_LOOKS):
            if any(subject.lower() in words for words in self.refused[before:]):
                return True
            await asyncio.sleep(0.01)
        return False


@contextlib.asynccontextmanager
async def bare(broker: SecuredBroker, member: Member | None, *, inbox_prefix: str = "_INBOX") -> AsyncIterator[Bare]:
    """A bare client with a user's credential, or without any."""
    refused: list[str] = []

    async def on_error(error: Exception) -> None:
        refused.append(str(error).lower())

    credentials: dict[str, Any] = {"nkeys_seed": broker.credentials(member)} if member is not None else {}
    client = Client()
    try:
        await client.connect(
            broker.url, error_cb=on_error, allow_reconnect=False, inbox_prefix=inbox_prefix, **credentials
        )
        yield Bare(client, refused)
    finally:
        with contextlib.suppress(AssertionError):  # it asserts that it has a server to close
            await client.close()  # also where it was not let in, or its socket would be left
