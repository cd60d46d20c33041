"""The lease of one slot: taken, renewed, given back by compare-and-set, and lost for good when another has it."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

from headrace.bus.connection import Refused, Stored, StoreResult
from headrace.bus.instances import InstancesBucket
from headrace.errors import BrokerError
from headrace.schemas.instances import Slot, SlotName

__all__ = ["DOUBT_S", "Lease"]

DOUBT_S: Final = 60.0
"""How long a lease may go without being renewed. A broker that is away is away for all: nobody can have taken it."""


class Lease:
    """Ours from `claim` until it is released or lost, and what is lost never comes back.

    It is lost when another has it, or when no renewal came through for a minute. One that expired meanwhile is taken
    again at the first that does, if nobody else was faster.
    """

    def __init__(
        self,
        bucket: InstancesBucket,
        name: SlotName,
        *,
        ttl_s: float,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = bucket
        self.name = name
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._revision = 0
        self._sent_at = 0.0
        self._written: Slot | None = None
        self._is_ours = False
        self._writing = asyncio.Lock()

    @property
    def is_held(self) -> bool:
        """Whether it is ours, as far as we know; once it is not, it never will be."""
        self._is_ours = self._is_ours and self._clock() - self._sent_at < DOUBT_S
        return self._is_ours

    async def claim(self, slot: Slot) -> bool:
        """Take it, if nobody has it; False where somebody does, or the broker did not say so. Raises BrokerError."""
        revision, known = await self._bucket.slot(self.name)
        if known is not None:
            return False
        sent_at = self._clock()
        self._is_ours = self._note(await self._put(slot, revision), slot, sent_at)
        return self.is_held

    async def renew(self, slot: Slot, *, every_s: float) -> None:
        """Write what is to be known of it, where that changed or the last time is `every_s` ago."""
        async with self._writing:
            sent_at = self._clock()
            if not self.is_held or (slot == self._written and sent_at - self._sent_at < every_s):
                return
            result = await self._put(slot, self._revision)
            if not self._note(result, slot, sent_at) and isinstance(result, Refused) and result.is_lost_race:
                await self._look(slot)

    async def release(self) -> None:
        """Give it back; where the broker does not take that, it expires."""
        async with self._writing:
            if self.is_held:
                await self._bucket.remove_slot(self.name, expected_revision=self._revision)
            self._is_ours = False

    async def _look(self, slot: Slot) -> None:
        """After a refusal: a write that got no answer was stored, or somebody removed the key, or it is another's."""
        with contextlib.suppress(BrokerError):
            revision, known = await self._bucket.slot(self.name)
            if known is not None and (known.host, known.epoch) != (slot.host, slot.epoch):
                self._is_ours = False
                return
            sent_at = self._clock()
            self._note(await self._put(slot, revision), slot, sent_at)

    async def _put(self, slot: Slot, revision: int) -> StoreResult:
        return await self._bucket.put_slot(
            self.name, slot, expected_revision=revision, ttl_s=self._ttl_s, timeout_s=self._timeout_s
        )

    def _note(self, result: StoreResult, slot: Slot, sent_at: float) -> bool:
        if not isinstance(result, Stored):
            return False
        self._revision, self._sent_at, self._written = result.sequence, sent_at, slot
        return True
