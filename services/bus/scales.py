"""What the autoscaler decided, in the instances bucket: read as a whole, written by compare-and-set."""

from collections.abc import Mapping
from typing import Final

import msgspec

from headrace.bus.connection import Bus, Refused, Stored, StoreResult, Unknown
from headrace.bus.keyvalue import Bucket
from headrace.errors import BrokerUnavailableError
from headrace.schemas.instances import GroupName, Scale

__all__ = ["NEVER_WRITTEN", "KnownScale", "Scales"]

_REMOVED_TTL_S: Final = 60


class KnownScale(msgspec.Struct, frozen=True):
    """A key as it stands; `scale` is None where it was removed, or is none."""

    revision: int
    scale: Scale | None


NEVER_WRITTEN: Final = KnownScale(0, None)


class Scales:
    """The keys `scale.*`. Losing a compare-and-set is a normal answer: read again, and decide again."""

    def __init__(self, bus: Bus) -> None:
        self._bucket = Bucket(bus, bus.names.instances_bucket)

    async def read(self) -> Mapping[GroupName, KnownScale]:
        """All of them. Raises NotProvisionedError where there is no bucket, BrokerUnavailableError."""
        known: dict[GroupName, KnownScale] = {}
        async for change in self._bucket.changes(after=0, keys="scale.>"):
            group = GroupName.of_scale_key(change.key)
            if group is not None:
                known[group] = KnownScale(change.revision, _decoded(change.value))
        return known

    async def write(self, group: GroupName, scale: Scale, *, expected_revision: int) -> bool:
        """Write it if the key's revision is still that; False where somebody else was faster.

        Raises BrokerUnavailableError where the broker takes it from nobody, or gives no clear answer.
        """
        value = msgspec.json.encode(scale)
        return _is_stored(await self._bucket.put(group.scale_key, value, expected_revision=expected_revision), group)

    async def remove(self, group: GroupName, *, expected_revision: int) -> bool:
        """Take a key away if its revision is still that. Raises as `write` does."""
        result = await self._bucket.remove(group.scale_key, expected_revision=expected_revision, ttl_s=_REMOVED_TTL_S)
        return _is_stored(result, group)


def _is_stored(result: StoreResult, group: GroupName) -> bool:
    if isinstance(result, Unknown):
        raise BrokerUnavailableError(f"{group.scale_key} may be written or not: {result.reason}")
    if isinstance(result, Refused) and not result.is_lost_race:
        raise BrokerUnavailableError(f"{group.scale_key} is not taken: {result.description}")
    return isinstance(result, Stored)


def _decoded(value: bytes | None) -> Scale | None:
    try:
        return msgspec.json.decode(value, type=Scale) if value else None
    except (msgspec.DecodeError, RecursionError):
        return None
