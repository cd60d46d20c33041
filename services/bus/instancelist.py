"""What the keys of the instances bucket say: who runs what, what was decided, what has failed; or all of it at once."""

import logging
from typing import TypeVar

import msgspec

from headrace.bus.connection import Bus
from headrace.bus.keyvalue import Bucket
from headrace.errors import NotProvisionedError
from headrace.schemas.instances import (
    FailedGeneration,
    GroupName,
    HostBeat,
    ProvenGeneration,
    Scale,
    Slot,
    SlotName,
    group_of_failed_key,
    group_of_proven_key,
    host_of_key,
)

__all__ = ["Snapshot", "decoded", "read_instances"]

log = logging.getLogger(__name__)

_K = TypeVar("_K")
_T = TypeVar("_T")


class Snapshot(msgspec.Struct, kw_only=True):
    """The bucket as far as it was read. `failed` is by group and generation; `revisions` are those of all keys.

    What cannot be decoded, or is of a kind that is not known here, is left out.
    """

    slots: dict[SlotName, Slot] = {}
    scales: dict[GroupName, Scale] = {}
    hosts: dict[str, HostBeat] = {}
    failed: dict[tuple[GroupName, str], FailedGeneration] = {}
    proven: dict[GroupName, ProvenGeneration] = {}
    revisions: dict[str, int] = {}

    def slots_of(self, group: GroupName) -> dict[SlotName, Slot]:
        """Leases of one group, of all its generations."""
        return {name: slot for name, slot in self.slots.items() if name.group == group}

    def take(self, key: str, value: bytes | None) -> None:
        """What a key says now; None: it is gone."""
        if (slot := SlotName.of_key(key)) is not None:
            _set(self.slots, slot, decoded(key, value, Slot))
        elif (host := host_of_key(key)) is not None:
            _set(self.hosts, host, decoded(key, value, HostBeat))
        elif (scaled := GroupName.of_scale_key(key)) is not None:
            _set(self.scales, scaled, decoded(key, value, Scale))
        elif (stopped := group_of_failed_key(key)) is not None:
            _set(self.failed, stopped, decoded(key, value, FailedGeneration))
        elif (group := group_of_proven_key(key)) is not None:
            _set(self.proven, group, decoded(key, value, ProvenGeneration))


async def read_instances(bus: Bus) -> Snapshot:
    """All keys that are there, read once; none where there is no such bucket yet. Raises BrokerUnavailableError."""
    bucket = Bucket(bus, bus.names.instances_bucket)
    snapshot = Snapshot()
    try:
        if await bucket.last_revision() == 0:
            return snapshot
    except NotProvisionedError:
        return snapshot
    async for change in bucket.changes(after=0):  # a key that is written meanwhile comes again
        snapshot.take(change.key, change.value)
        _set(snapshot.revisions, change.key, change.revision if change.value is not None else None)
    return snapshot


def decoded(key: str, value: bytes | None, kind: type[_T]) -> _T | None:
    """What stands in a key; None for nothing, or for what cannot be."""
    if value is None:
        return None
    try:
        return msgspec.json.decode(value, type=kind)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        log.warning("%s is not what it should be, and is left out: %s", key, error)
        return None


def _set(values: dict[_K, _T], key: _K, value: _T | None) -> None:
    if value is None:
        values.pop(key, None)
    else:
        values[key] = value
