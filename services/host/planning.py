"""What a host agent does next: a pure function of what it sees, which may be stale, and of what it has.

Stale sight may cost time, never capacity or memory. A slot is taken by compare-and-set, so who was wrong loses. Memory
is counted from what this host has itself. And of a group's ready workers the first `wanted` in one order that all
agents share are left alone by each: whoever sees fewer of them than there are stops fewer.
"""

from collections.abc import Iterator, Mapping, Set

import msgspec

from headrace.discipline.fit import has_room, need_text
from headrace.discipline.replicas import wanted_replicas
from headrace.host.placing import choose_device, rank
from headrace.schemas.instances import Device, GroupName, HostBeat, Scale, Slot, SlotName, SlotState
from headrace.schemas.replicas import ReplicaGroup

__all__ = ["MAX_FAILURES", "Action", "Claim", "Drain", "GiveUp", "Holding", "MarkFailed", "Plan", "Release", "Sight",
           "Start", "plan"]  # fmt: skip

MAX_FAILURES = 3
"""Failures in a row after which a slot is left to other hosts, or its generation to nobody."""


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """A slot that this host has or had, with the memory it was promised here.

    `is_leased`: the lease is ours, as far as we know. `has_child`: a process of it runs. `may_start`: the pause after
    its last end is over. `group` is how its workers are started, whatever is configured now.
    """

    group: ReplicaGroup
    device: str
    need_bytes: int
    state: SlotState = "Claimed"
    reason: str = ""
    failures: int = 0
    is_leased: bool = True
    has_child: bool = False
    may_start: bool = True


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """What one agent sees: configured groups, the bucket as last read, and its own devices and holdings.

    `failed` are generations that nobody starts, `proven` those that once were ready, `avoided` the (group, generation,
    device) that failed here a moment ago. `waiting` says since when a free slot has been seen, by the clock of `now`.
    """

    host: str
    now: float
    beat_s: float
    groups: Mapping[GroupName, ReplicaGroup] = {}
    scales: Mapping[GroupName, Scale] = {}
    slots: Mapping[SlotName, Slot] = {}
    hosts: Mapping[str, HostBeat] = {}
    failed: Set[tuple[GroupName, str]] = frozenset()
    proven: Mapping[GroupName, str] = {}
    devices: tuple[Device, ...] = ()
    holdings: Mapping[SlotName, Holding] = {}
    avoided: Set[tuple[GroupName, str, str]] = frozenset()
    waiting: Mapping[SlotName, float] = {}
    may_claim: bool = True


class Claim(msgspec.Struct, frozen=True):
    """Take the lease of a free slot."""

    slot: SlotName
    group: ReplicaGroup
    device: str
    need_bytes: int


class Start(msgspec.Struct, frozen=True):
    """Start a worker for a slot that is held."""

    slot: SlotName


class Drain(msgspec.Struct, frozen=True):
    """Let the worker finish, and start none for the slot again."""

    slot: SlotName
    why: str


class Release(msgspec.Struct, frozen=True):
    """Give the lease back: the worker is gone."""

    slot: SlotName


class GiveUp(msgspec.Struct, frozen=True):
    """Give the lease back, and leave it to others for a while: it fails here."""

    slot: SlotName
    why: str


class MarkFailed(msgspec.Struct, frozen=True):
    """Tell all hosts that a generation does not come up."""

    slot: SlotName
    why: str
    failures: int


Action = Claim | Start | Drain | Release | GiveUp | MarkFailed


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do now. `waiting` belongs into the next sight; `reason` says what no host has room for."""

    actions: tuple[Action, ...] = ()
    waiting: Mapping[SlotName, float] = {}
    reason: str = ""


def plan(sight: Sight) -> Plan:
    """The next actions, one for each holding and one claim for each group at most."""
    slots = _by_group(sight)
    actions = [
        action
        for name, holding in sorted(sight.holdings.items())
        if (action := _next_of(sight, slots.get(name.group, {}), name, holding)) is not None
    ]
    if not sight.may_claim:
        return Plan(actions=tuple(actions))
    claims, waiting, reason = _claims(sight, slots)
    return Plan(actions=(*actions, *claims), waiting=waiting, reason=reason)


def _by_group(sight: Sight) -> dict[GroupName, dict[SlotName, Slot]]:
    """Leases of all hosts, ours as they are and not as they were read."""
    slots: dict[GroupName, dict[SlotName, Slot]] = {}
    for name, slot in sight.slots.items():
        if name not in sight.holdings:
            slots.setdefault(name.group, {})[name] = slot
    for name, holding in sight.holdings.items():
        if holding.is_leased:
            slots.setdefault(name.group, {})[name] = Slot(host=sight.host, epoch="", state=holding.state)
    return slots


def _next_of(sight: Sight, slots: Mapping[SlotName, Slot], name: SlotName, holding: Holding) -> Action | None:
    if holding.state == "Draining":
        return None if holding.has_child else Release(name)
    if why := _why_not(sight, slots, name, holding):
        return Drain(name, why)
    if holding.has_child:
        return None
    if holding.failures >= MAX_FAILURES and _is_current(sight, name):
        if sight.proven.get(name.group) == name.generation or _may_come_up_elsewhere(sight, slots, name):
            return GiveUp(name, holding.reason)
        return MarkFailed(name, holding.reason, holding.failures)
    return Start(name) if holding.may_start else None


def _why_not(sight: Sight, slots: Mapping[SlotName, Slot], name: SlotName, holding: Holding) -> str:
    """Why a slot is to be held no longer; empty where it stays."""
    if not holding.is_leased:
        return "its lease is lost"
    group = sight.groups.get(name.group)
    if group is None:
        return "it is configured no more"
    wanted = wanted_replicas(group, sight.scales.get(name.group))
    has_failed = (name.group, group.generation) in sight.failed
    if name.generation == group.generation:
        if name.index >= wanted:
            return f"{wanted} are wanted"
        return "its generation does not come up" if has_failed and holding.state != "Ready" else ""
    ready = _ready(group, wanted, slots)
    num_before = ready.index(name) if name in ready else len(ready)
    if num_before >= wanted:
        return f"{num_before} others are ready, {wanted} are wanted"
    return "it is not ready, and another generation is wanted" if holding.state != "Ready" and not has_failed else ""


def _is_current(sight: Sight, name: SlotName) -> bool:
    group = sight.groups.get(name.group)
    return group is not None and group.generation == name.generation


def _may_come_up_elsewhere(sight: Sight, slots: Mapping[SlotName, Slot], name: SlotName) -> bool:
    """Whether another host has a worker of the same generation on its way: it may be this host that is to blame."""
    return any(
        other.generation == name.generation
        and slot.host != sight.host
        and slot.state in ("Claimed", "Starting", "Ready")
        and not slot.failures
        for other, slot in slots.items()
    )


def _ready(group: ReplicaGroup, wanted: int, slots: Mapping[SlotName, Slot]) -> list[SlotName]:
    """Ready replicas of a group, those that stay first: of the wanted generation, then by name."""
    generation = group.generation
    ready = [
        name
        for name, slot in slots.items()
        if slot.state == "Ready" and (name.generation != generation or name.index < wanted)
    ]
    return sorted(ready, key=lambda name: (name.generation != generation, name))


def _claims(
    sight: Sight, slots: Mapping[GroupName, Mapping[SlotName, Slot]]
) -> tuple[list[Claim], Mapping[SlotName, float], str]:
    """Claims to make, one a group; the free slots that wait for their turn; why one of them has no host."""
    promised = {device.name: 0 for device in sight.devices}
    for holding in sight.holdings.values():
        promised[holding.device] = promised.get(holding.device, 0) + holding.need_bytes
    claims: list[Claim] = []
    waiting: dict[SlotName, float] = {}
    reason = ""
    for name, group in _free_slots(sight, slots):
        waiting[name] = sight.waiting.get(name, sight.now)
        all_devices = [
            msgspec.structs.replace(device, promised_bytes=promised[device.name]) for device in sight.devices
        ]
        devices = [each for each in all_devices if (name.group, name.generation, each.name) not in sight.avoided]
        place = choose_device(group, devices)
        if place is None:
            if not has_room(group, all_devices):
                reason = reason or _no_room(sight, name, group)
            continue
        turn = rank(group, host=sight.host, devices=devices, hosts=sight.hosts, slots=slots.get(name.group, {}))
        if sight.now - waiting[name] >= turn * sight.beat_s:
            device, need_bytes = place
            claims.append(Claim(name, group, device, need_bytes))
            promised[device] += need_bytes
    return claims, waiting, reason


def _free_slots(
    sight: Sight, slots: Mapping[GroupName, Mapping[SlotName, Slot]]
) -> Iterator[tuple[SlotName, ReplicaGroup]]:
    """The slot of each group that is to be taken next, if any.

    So many are under way at once as capacity is missing, and one where none is: a new generation comes one by one,
    beside the old.
    """
    for group_name, group in sorted(sight.groups.items()):
        generation = group.generation
        if (group_name, generation) in sight.failed:
            continue
        of_group = slots.get(group_name, {})
        wanted = wanted_replicas(group, sight.scales.get(group_name))
        current = {
            name.index: slot for name, slot in of_group.items() if name.generation == generation and name.index < wanted
        }
        num_under_way = sum(slot.state not in ("Ready", "Draining") for slot in current.values())
        num_missing = wanted - len(_ready(group, wanted, of_group))
        free = next((index for index in range(wanted) if index not in current), None)
        if free is None or num_under_way >= max(1, num_missing):
            continue
        slot = SlotName(group_name, generation, free)
        if slot not in sight.holdings:
            yield slot, group


def _no_room(sight: Sight, name: SlotName, group: ReplicaGroup) -> str:
    """Why nobody takes a slot that does not fit here; empty where it fits another host."""
    others = [beat for beat in sight.hosts.values() if beat.host != sight.host and not beat.is_draining]
    if any(has_room(group, beat.devices) for beat in others):
        return ""
    return f"no host has room for replica {name.index} of {name.group.model} ({name.group.pool}): {need_text(group)}"
