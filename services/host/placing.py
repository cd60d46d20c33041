"""Where a replica fits, and which host takes it: pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from headrace.discipline.fit import has_room, need_bytes
from headrace.schemas.instances import Device, HostBeat, Slot, SlotName
from headrace.schemas.replicas import ReplicaGroup

__all__ = ["choose_device", "rank"]


def choose_device(group: ReplicaGroup, devices: Iterable[Device]) -> tuple[str, int] | None:
    """The device for one more worker, and the bytes it is promised there; None where none has room.

    The one with the least left afterwards: what is whole stays whole, for those that need a device of their own.
    """
    fitting = [
        (device.total_bytes - device.promised_bytes - need, device.name, need)
        for device in devices
        if device.kind == group.uses
        and (need := need_bytes(group, device)) is not None
        and device.promised_bytes + need <= device.total_bytes
    ]
    if not fitting:
        return None
    _, name, need = min(fitting)
    return name, need


def rank(
    group: ReplicaGroup,
    *,
    host: str,
    devices: Sequence[Device],
    hosts: Mapping[str, HostBeat],
    slots: Mapping[SlotName, Slot],
) -> int:
    """How many hosts should take a replica before this one, which has room for it; `slots` are the group's.

    The host with the fewest replicas of the group comes first, so that its death costs the model as few as possible;
    of equal ones the host with the most memory left, by its last beat. Who was wrong about another only waited in vain.
    """
    num_on = Counter(slot.host for slot in slots.values())
    own = _order(group, host, devices, num_on)
    return sum(
        _order(group, beat.host, beat.devices, num_on) < own and has_room(group, beat.devices)
        for beat in hosts.values()
        if beat.host != host and not beat.is_draining
    )


def _order(group: ReplicaGroup, host: str, devices: Iterable[Device], num_on: Counter[str]) -> tuple[int, int, str]:
    left = sum(device.total_bytes - device.promised_bytes for device in devices if device.kind == group.uses)
    return num_on[host], -left, host
