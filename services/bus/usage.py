"""The usage bucket: what each tenant used of its limits a minute, shared by all routers by compare-and-set."""

from typing import Final

import msgspec

from headrace.bus.connection import Bus, StoreResult
from headrace.bus.keyvalue import Bucket
from headrace.schemas.usage import Usage

__all__ = ["SeenUsage", "UsageBucket"]

_TTL_S: Final = 120
"""A record counts for a minute after its last write; then it may go."""


class SeenUsage(msgspec.Struct, frozen=True):
    """A tenant's record and its revision, 0 where there is none."""

    usage: Usage = Usage()
    revision: int = 0


class UsageBucket:
    """Reads and writes records, under the tenant's name."""

    def __init__(self, bus: Bus) -> None:
        self._bucket = Bucket(bus, bus.names.usage_bucket)

    async def get(self, tenant: str) -> SeenUsage:
        """The record as it stands. One that cannot be read counts as empty. Raises BrokerUnavailableError."""
        entry = await self._bucket.get(tenant)
        if entry is None:
            return SeenUsage()
        if entry.value is None:
            return SeenUsage(revision=entry.revision)
        try:
            return SeenUsage(msgspec.json.decode(entry.value, type=Usage), entry.revision)
        except msgspec.DecodeError:
            return SeenUsage(revision=entry.revision)

    async def put(self, tenant: str, usage: Usage, *, expected_revision: int) -> StoreResult:
        """Write the record if nobody else has since that revision."""
        return await self._bucket.put(
            tenant, msgspec.json.encode(usage), expected_revision=expected_revision, ttl_s=_TTL_S
        )
