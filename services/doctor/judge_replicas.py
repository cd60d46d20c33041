"""Workers that the configuration wants: whether host agents are there to run them, have room, and bring them up."""

from collections.abc import Iterator
from typing import Final

from headrace.bus.instancelist import Snapshot
from headrace.discipline.fit import no_room
from headrace.discipline.replicas import wanted_replicas
from headrace.doctor.facts import Facts, Known
from headrace.doctor.finding import Check, Finding, counted, listed
from headrace.schemas.instances import FailedGeneration, GroupName
from headrace.schemas.replicas import ReplicaGroup

__all__ = ["judge_replicas"]

_COMING: Final = ("Claimed", "Starting")


def judge_replicas(facts: Facts) -> Iterator[Finding]:
    """Findings about `instances`; none where they, or what hosts run, are not known, or where none are declared."""
    if not isinstance(facts.instances, Known) or not isinstance(facts.entries, Known):
        return
    snapshot = facts.instances.value
    groups = {
        GroupName(model, group.pool): group
        for model, config in sorted(facts.config.models.items())
        for group in config.instances
    }
    if not groups:
        return
    yield _hosts(groups, snapshot)
    num_troubled = 0
    for name, group in groups.items():
        if (failed := snapshot.failed.get((name, group.generation))) is not None:
            num_troubled += 1
            yield _failed(name, group, failed, snapshot)
        elif snapshot.hosts and (finding := _missing(name, group, snapshot)) is not None:
            num_troubled += 1
            yield finding
    if snapshot.hosts and not num_troubled:
        number = sum(wanted_replicas(group, snapshot.scales.get(name)) for name, group in groups.items())
        yield Finding(
            id=Check.WORKERS_MISSING, severity="ok", found=f"{counted(number, 'worker')} wanted of hosts, all ready"
        )


def _hosts(groups: dict[GroupName, ReplicaGroup], snapshot: Snapshot) -> Finding:
    wanted = {name: wanted_replicas(group, snapshot.scales.get(name)) for name, group in groups.items()}
    shown = (
        f"{counted(sum(wanted.values()), 'worker')} wanted, of {listed(dict.fromkeys(name.model for name in groups))}"
    )
    taking = [beat.host for beat in snapshot.hosts.values() if not beat.is_draining]
    if taking:
        what = counted(len(taking), "host agent")
        return Finding(id=Check.HOSTS, severity="ok", found=f"{what} ({listed(sorted(taking))}) for {shown}")
    draining = f"; draining: {listed(sorted(snapshot.hosts))}" if snapshot.hosts else ""
    return Finding(
        id=Check.HOSTS,
        severity="error" if any(wanted.values()) else "warning",
        found=f"no host agent that starts workers: {shown}{draining}",
        remedy="headrace serve host, on each machine that shall run workers",
    )


def _failed(name: GroupName, group: ReplicaGroup, failed: FailedGeneration, snapshot: Snapshot) -> Finding:
    num_ready = sum(slot.state == "Ready" for slot in snapshot.slots_of(name).values())
    where = f" on host {failed.host}" if failed.host else ""
    goes_on = f"; {num_ready} from before go on" if num_ready else "; none is ready"
    return Finding(
        id=Check.GENERATION_FAILED,
        severity="warning" if num_ready else "error",
        found=f"workers of {_named(name)} did not come up{where} and are not tried again (generation "
        f"{group.generation}): {failed.reason}{goes_on}",
        remedy=f"headrace models set {name.model} … --wait, or once the machine is right headrace models retry "
        f"{name.model} --wait",
    )


def _missing(name: GroupName, group: ReplicaGroup, snapshot: Snapshot) -> Finding | None:
    """What keeps a group from being as declared; None where nothing does."""
    wanted = wanted_replicas(group, snapshot.scales.get(name))
    slots = snapshot.slots_of(name)
    current = [slot for each, slot in slots.items() if each.generation == group.generation and each.index < wanted]
    num_ready = sum(slot.state == "Ready" for slot in current)
    if num_ready >= wanted:
        return None
    serving = [slot for slot in slots.values() if slot.state == "Ready"]
    troubles = list(dict.fromkeys(f"{slot.reason} (host {slot.host})" for slot in current if slot.reason))
    full = no_room(group, snapshot.hosts) if len(current) < wanted else ""
    why = [*troubles, full] if full else troubles
    is_coming = any(slot.state in _COMING for slot in current)
    old = f", {len(serving) - num_ready} as declared before" if len(serving) > num_ready else ""
    return Finding(
        id=Check.WORKERS_MISSING,
        severity="warning" if serving or (is_coming and not why) else "error",
        found=f"{num_ready} of {wanted} workers of {_named(name)} are ready{old}: "
        f"{listed(why) or ('they are starting' if is_coming else 'no host has taken them yet')}",
        remedy=f"another machine with headrace serve host, or headrace models set {name.model} with less --memory, "
        "fewer --replicas or another --uses"
        if full
        else "headrace models list; the logs of the host agents say more",
    )


def _named(name: GroupName) -> str:
    return f"model {name.model}, pool {name.pool}"
