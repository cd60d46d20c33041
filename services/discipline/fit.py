"""Whether a host's devices have room for one more worker: pure, the same to agents and to those who ask why."""

from collections.abc import Iterable, Mapping

from headrace.schemas.instances import Device, HostBeat
from headrace.schemas.replicas import ReplicaGroup

__all__ = ["has_room", "need_bytes", "need_text", "no_room"]

_MIB = 1 << 20


def has_room(group: ReplicaGroup, devices: Iterable[Device]) -> bool:
    """Whether any of the devices has room for one more worker."""
    return any(
        device.kind == group.uses
        and (need := need_bytes(group, device)) is not None
        and device.promised_bytes + need <= device.total_bytes
        for device in devices
    )


def need_bytes(group: ReplicaGroup, device: Device) -> int | None:
    """Bytes that a worker needs of this device; None where it cannot share it."""
    if group.memory_mib is not None:
        return group.memory_mib * _MIB
    return device.total_bytes if device.promised_bytes == 0 else None


def need_text(group: ReplicaGroup) -> str:
    """What a worker of the group needs, in words."""
    kind = "GPU" if group.uses == "gpu" else "host's memory"
    return f"a {kind} of its own" if group.memory_mib is None else f"{group.memory_mib} MiB of a {kind}"


def no_room(group: ReplicaGroup, hosts: Mapping[str, HostBeat]) -> str:
    """Why no host can take one more worker, by their last beats; empty where one can, or where there is no host."""
    taking = [beat for beat in hosts.values() if not beat.is_draining]
    if not taking or any(has_room(group, beat.devices) for beat in taking):
        return ""
    if not any(device.kind == group.uses for beat in taking for device in beat.devices):
        if group.uses == "host":
            return f"no host lends the machine's memory, and a worker needs {need_text(group)}"
        return f"no host has a GPU, and a worker needs {need_text(group)}; `--uses host` is for the machine's memory"
    return f"no host has room for one more: {need_text(group)}"
