"""What a change of a model's workers was, and what follows from it, in words."""

import re
from collections.abc import Iterable
from typing import Any, Final

import click
import msgspec
from rich.text import Text

from headrace.bus.instancelist import Snapshot
from headrace.cli.render import console, safe
from headrace.discipline.fit import no_room
from headrace.discipline.replicas import wanted_replicas
from headrace.schemas.config import ModelConfig
from headrace.schemas.instances import GroupName
from headrace.schemas.replicas import ReplicaGroup

__all__ = ["Changed", "changed", "consequences", "differences", "print_changes"]

_NAMES: Final = {"memory_mib": "memory", "target_wait_s": "target-wait", "idle_s": "idle"}
_NONE: Final = "-"
_SECRET: Final = re.compile(r"((?:api[-_]?key|token|password|secret)[= ]+)[^\s'\"]+", re.IGNORECASE)


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one group, as `--json` prints it; `before` is None where there was none."""

    model: str
    pool: str
    before: ReplicaGroup | None
    after: ReplicaGroup
    generation_before: str | None
    generation: str
    follows: tuple[str, ...]


def changed(model: str, pool: str, before: ModelConfig, after: ModelConfig, snapshot: Snapshot) -> Changed:
    """The change of a pool's workers between two entries of a model; the pool has some in the later one."""
    old = next((group for group in before.instances if group.pool == pool), None)
    (new,) = (group for group in after.instances if group.pool == pool)
    return Changed(
        model=model,
        pool=pool,
        before=old,
        after=new,
        generation_before=old.generation if old is not None else None,
        generation=new.generation,
        follows=tuple(consequences(GroupName(model, pool), old, new, snapshot, is_paused=after.paused)),
    )


def consequences(
    name: GroupName, before: ReplicaGroup | None, after: ReplicaGroup, snapshot: Snapshot, *, is_paused: bool = False
) -> list[str]:
    """What follows; nothing where nothing changed."""
    if before == after:
        return []
    scale = snapshot.scales.get(name)
    was, wanted = wanted_replicas(before, scale) if before is not None else 0, wanted_replicas(after, scale)
    slots = snapshot.slots_of(name)
    num_old = sum(slot.generation != after.generation for slot in slots)
    num_current = len(slots) - num_old
    lines: list[str] = []
    if before is None:
        lines.append(f"{_workers(wanted)} started: generation {after.generation}")
    elif before.generation != after.generation:
        num_kept = sum(name.generation == after.generation and slot.state == "Ready" for name, slot in slots.items())
        what = f"{_workers(num_old)} replaced{' one by one' * (num_old > 1)}" if num_old else "no worker runs now"
        if num_kept and not num_old:
            what = f"{_workers(num_kept)} as declared now already"
        lines.append(f"{what}: generation {before.generation} → {after.generation}")
    elif was != wanted:
        lines.append(f"number only, {was} → {wanted}: no worker is restarted")
    else:
        lines.append("no worker is restarted")
    if after.autoscale is not None:
        low, high = after.autoscale.min_replicas, after.autoscale.max_replicas
        lines.append(f"the number follows the load between {low} and {high}; now {wanted}")
    if (failed := snapshot.failed.get((name, after.generation))) is not None:
        lines.append(f"this generation has failed before ({failed.reason}): `headrace models retry` tries it again")
    if not snapshot.hosts:
        lines.append("no host agent runs: start one on each machine that shall run workers")
    elif num_current < wanted and (why := no_room(after, snapshot.hosts)):
        lines.append(why)
    if is_paused:
        lines.append("the model is paused: its workers come up and start no request")
    return lines


def differences(before: ReplicaGroup | None, after: ReplicaGroup) -> list[tuple[str, str, str]]:
    """Name, old and new value of each field that differs; of a new group its engine and what is not the default."""
    new, old = _flat(after), _flat(before if before is not None else ReplicaGroup(engine=after.engine))
    names = dict.fromkeys((*new, *old))
    rows = [(name, old.get(name, _NONE), new.get(name, _NONE)) for name in names if old.get(name) != new.get(name)]
    if before is not None:
        return rows
    return [("engine", _NONE, after.engine), *((name, _NONE, now) for name, _, now in rows if name != "pool")]


def print_changes(changes: Iterable[Changed], *, as_json: bool) -> None:
    """One JSON array, or for each group what it was, what it is, and what follows."""
    if as_json:
        click.echo(msgspec.json.encode(list(changes)).decode())
        return
    out = console()
    for change in changes:
        if change.before == change.after:
            out.print(Text(f"model {safe(change.model)}, pool {change.pool}: nothing changed"), soft_wrap=True)
            continue
        done = "is declared" if change.before is None else "is changed"
        out.print(Text(f"model {safe(change.model)}, pool {change.pool}, {done}"), soft_wrap=True)
        for name, was, now in differences(change.before, change.after):
            old, new = (safe(_without_secrets(each)) for each in (was, now))
            shown = f"{old} → {new}" if change.before is not None else new
            out.print(Text.assemble("    ", (f"{name} ", "dim"), shown), soft_wrap=True)
        for line in change.follows:
            out.print(Text(safe(line)), soft_wrap=True)


def _without_secrets(text: str) -> str:
    """For a screen, which others may see and logs may keep."""
    return _SECRET.sub(r"\1…", text)


def _workers(number: int) -> str:
    return f"{number} worker is" if number == 1 else f"{number} workers are"


def _flat(group: ReplicaGroup) -> dict[str, str]:
    values: dict[str, Any] = {name: getattr(group, name) for name in group.__struct_fields__ if name != "autoscale"}
    if group.autoscale is not None:
        values |= {name: getattr(group.autoscale, name) for name in group.autoscale.__struct_fields__}
    return {
        _NAMES.get(name, name.removesuffix("_s").replace("_", "-")): _shown(name, value)
        for name, value in values.items()
    }


def _shown(name: str, value: Any) -> str:
    if name == "memory_mib":
        return "a whole device" if value is None else f"{value} MiB"
    if isinstance(value, tuple):
        return " ".join(value) or "none"
    return f"{value:g} s" if isinstance(value, float) else str(value)
