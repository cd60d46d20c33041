"""The beat of a host: one agent has its name at a time, by compare-and-set on its key."""

import asyncio
import contextlib
import time
from collections.abc import Callable

from headrace.bus.connection import Stored
from headrace.bus.instances import InstancesBucket
from headrace.errors import BrokerError, BrokerUnavailableError, ConfigError
from headrace.schemas.instances import HostBeat

__all__ = ["Presence"]


class Presence:
    """Says that a host is there. `ousted` is set when another agent has its name: ours must stop then."""

    def __init__(
        self, bucket: InstancesBucket, host: str, compose: Callable[[], HostBeat], *, ttl_s: float, beat_s: float
    ) -> None:
        self._bucket = bucket
        self._host = host
        self._compose = compose
        self._ttl_s = ttl_s
        self._beat_s = beat_s
        self._revision = 0
        self.ousted = asyncio.Event()

    async def register(self) -> None:
        """Say so for the first time, once an earlier agent's beat has expired.

        Raises ConfigError where one goes on beating, BrokerUnavailableError where the broker does not take ours.
        """
        known_revision: int | None = None
        until = time.monotonic() + 2 * self._ttl_s
        while True:
            with contextlib.suppress(BrokerError):
                revision, known = await self._bucket.host(self._host)
                if known is None and await self._put(revision):
                    return
                if known is not None and known_revision not in (None, revision):
                    self.ousted.set()
                    raise self.refusal()
                known_revision = revision if known is not None else None
            if time.monotonic() > until:
                raise BrokerUnavailableError(f"host {self._host} cannot register: the broker does not take its beat")
            await asyncio.sleep(self._beat_s)

    async def beat(self) -> None:
        """Say so again; a key that expired or was removed meanwhile is written anew."""
        if await self._put(self._revision):
            return
        try:
            revision, known = await self._bucket.host(self._host)
        except BrokerError:
            return
        if known is not None and known.epoch != self._compose().epoch:
            self.ousted.set()
        elif revision != self._revision:
            await self._put(revision)

    async def leave(self) -> None:
        """Take the beat away; where the broker does not take that, it expires."""
        with contextlib.suppress(BrokerError):
            revision, known = await self._bucket.host(self._host)  # our last write may have got no answer
            if known is not None and known.epoch == self._compose().epoch:
                await self._bucket.remove_host(self._host, expected_revision=revision)

    def refusal(self) -> ConfigError:
        """Why an agent whose name another has cannot run."""
        return ConfigError(f"another agent runs as host {self._host}; give each machine a --host-id of its own")

    async def _put(self, expected_revision: int) -> bool:
        result = await self._bucket.put_host(
            self._compose(), expected_revision=expected_revision, ttl_s=self._ttl_s, timeout_s=self._beat_s
        )
        if isinstance(result, Stored):
            self._revision = result.sequence
        return isinstance(result, Stored)
