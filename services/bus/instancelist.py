"""Everything in the instances bucket, read at once: who runs what, what was decided, what has failed."""

from typing import Final, TypeVar

import msgspec

from headrace.bus.connection import Bus
from headrace.bus.keyvalue import Bucket
from headrace.errors import NotProvisionedError
from headrace.schemas.instances import FailedGeneration, GroupName, HostBeat, Scale, Slot, SlotName, host_key

__all__ = ["Snapshot", "read_instances"]

_HOSTS: Final = host_key("")

_K = TypeVar("_K")
_T = TypeVar("_T")


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The bucket as it was read. `failed` is by group and generation; `revisions` are of all keys, by their names."""

    slots: dict[SlotName, Slot] = {}
    scales: dict[GroupName, Scale] = {}
    hosts: dict[str, HostBeat] = {}
    failed: dict[tuple[GroupName, str], FailedGeneration] = {}
    revisions: dict[str, int] = {}

    def slots_of(self, group: GroupName) -> dict[SlotName, Slot]:
        """Leases of one group, of all its generations."""
        return {name: slot for name, slot in self.slots.items() if name.group == group}


async def read_instances(bus: Bus) -> Snapshot:
    """All keys that are there, read once; none where there is no such bucket yet. Raises BrokerUnavailableError.

    What cannot be decoded, or is of a kind that is not known here, is left out.
    """
    bucket = Bucket(bus, bus.names.instances_bucket)
    values: dict[str, bytes] = {}
    revisions: dict[str, int] = {}
    try:
        if await bucket.last_revision() == 0:
            return Snapshot()
    except NotProvisionedError:
        return Snapshot()
    async for change in bucket.changes(after=0):  # a key that is written meanwhile comes again
        values.pop(change.key, None)
        revisions[change.key] = change.revision
        if change.value is not None:
            values[change.key] = change.value
    snapshot = Snapshot(revisions={key: revisions[key] for key in values})
    for key, value in values.items():
        _add(snapshot, key, value)
    return snapshot


def _add(snapshot: Snapshot, key: str, data: bytes) -> None:
    if (slot := SlotName.of_key(key)) is not None:
        _put(snapshot.slots, slot, data, Slot)
    elif (scaled := GroupName.of_scale_key(key)) is not None:
        _put(snapshot.scales, scaled, data, Scale)
    elif (failed := _failed(key)) is not None:
        _put(snapshot.failed, failed, data, FailedGeneration)
    elif key.startswith(_HOSTS):
        _put(snapshot.hosts, key.removeprefix(_HOSTS), data, HostBeat)


def _failed(key: str) -> tuple[GroupName, str] | None:
    """What `failed_key` was made of; None for another key."""
    match key.split("."):
        case ["failed", model, pool, generation] if group := GroupName.of_scale_key(f"scale.{model}.{pool}"):
            return group, generation
    return None


def _put(values: dict[_K, _T], key: _K, data: bytes, kind: type[_T]) -> None:
    try:
        values[key] = msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return
