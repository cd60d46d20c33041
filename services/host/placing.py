"""Where a replica fits, and which host takes it: pure."""

from collections.abc import Iterable, Mapping, Sequence

from headrace.schemas.instances import Device, GroupName, HostBeat, Slot, SlotName
from headrace.schemas.replicas import ReplicaGroup

__all__ = ["choose_device", "need_text", "rank"]

_MIB = 1 << 20


def choose_device(group: ReplicaGroup, devices: Iterable[Device]) -> tuple[str, int] | None:
    """The device for one more worker, and the bytes it is promised there; None where none has room.

    The one with the least left afterwards: what is whole stays whole, for those that need a device of their own.
    """
    fitting = [
        (device.total_bytes - device.promised_bytes - need, device.name, need)
        for device in devices
        if device.kind == group.uses
        and (need := _need_bytes(group, device)) is not None
        and device.promised_bytes + need <= device.total_bytes
    ]
    if not fitting:
        return None
    _, name, need = min(fitting)
    return name, need


def rank(
    group_name: GroupName,
    group: ReplicaGroup,
    *,
    host: str,
    devices: Sequence[Device],
    hosts: Mapping[str, HostBeat],
    slots: Mapping[SlotName, Slot],
) -> int | None:
    """How many hosts should take a replica before this one; None where it has no room itself.

    The host with the fewest replicas of the group comes first, so that its death costs the model as few as possible;
    of equal ones the host with the most memory left afterwards, by its last beat. Who was wrong about another only
    waited in vain.
    """
    if choose_device(group, devices) is None:
        return None
    own = _order(group_name, group, host, devices, slots)
    others = [beat for beat in hosts.values() if beat.host != host and not beat.is_draining]
    return sum(
        choose_device(group, beat.devices) is not None
        and _order(group_name, group, beat.host, beat.devices, slots) < own
        for beat in others
    )


def need_text(group: ReplicaGroup) -> str:
    """What a worker of the group needs, in words."""
    kind = "GPU" if group.uses == "gpu" else "host's memory"
    return f"a {kind} of its own" if group.memory_mib is None else f"{group.memory_mib} MiB of a {kind}"


def _order(
    group_name: GroupName, group: ReplicaGroup, host: str, devices: Sequence[Device], slots: Mapping[SlotName, Slot]
) -> tuple[int, int, str]:
    num_here = sum(name.group == group_name and slot.host == host for name, slot in slots.items())
    left = sum(device.total_bytes - device.promised_bytes for device in devices if device.kind == group.uses)
    return num_here, -left, host


def _need_bytes(group: ReplicaGroup, device: Device) -> int | None:
    """Bytes that a worker needs of this device; None where it cannot share it."""
    if group.memory_mib is not None:
        return group.memory_mib * _MIB
    return device.total_bytes if device.promised_bytes == 0 else None
