"""`headrace models list`: each model and pool with its workers, as declared and as they are, and what waits there."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Final

import click
import msgspec
from rich.text import Text

from headrace.bus.connection import Bus
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.instancelist import Snapshot, read_instances
from headrace.bus.jobqueue import JobQueue, QueueCounts
from headrace.cli.model_alias import shares
from headrace.cli.model_entries import KnownModels, read_known
from headrace.cli.options import connected, with_settings
from headrace.cli.render import console, safe, table
from headrace.discipline.fit import no_room
from headrace.discipline.position import waiting_of
from headrace.discipline.replicas import wanted_replicas
from headrace.errors import NotProvisionedError
from headrace.schemas.config import ModelConfig
from headrace.schemas.instances import GroupName, Slot, SlotName
from headrace.schemas.replicas import ReplicaGroup
from headrace.schemas.subjects import DEFAULT_POOL
from headrace.schemas.workers import Heartbeat
from headrace.settings import Settings

__all__ = ["ListedPool", "list_", "listed"]

_NONE: Final = "-"


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Between which numbers the load decides, and why it is as it is, where somebody has decided."""

    min_replicas: int
    max_replicas: int
    reason: str


class ListedSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that some host has taken."""

    generation: str
    index: int
    host: str
    worker: str
    state: str
    reason: str


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why the workers that are declared do not come up and are not tried again."""

    generation: str
    reason: str
    failures: int
    host: str


class ListedAlias(msgspec.Struct, frozen=True, kw_only=True):
    """A name that leads here with this share of its requests, 0 to 1."""

    alias: str
    share: float


class ListedPool(msgspec.Struct, frozen=True, kw_only=True):
    """One pool of a model, as `list --json` has it.

    `wanted`, `generation` and `autoscale` are None where no workers are declared. `leased` are the replicas that hosts
    have taken, `ready` the live workers that can take requests, `undeclared` those of all live workers that no host
    agent started. `hindrance` says why no host takes more, where fewer are leased than wanted. `running` requests are
    held by workers, `queued` ones are not.
    """

    model: str
    pool: str
    engine: str
    wanted: int | None
    leased: int
    ready: int
    undeclared: int
    generation: str | None
    autoscale: Bounds | None
    paused: bool
    queued: int
    running: int
    failed: Failure | None
    hindrance: str
    aliases: tuple[ListedAlias, ...]
    slots: tuple[ListedSlot, ...]


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="A JSON array, one entry for each model and pool.")
@with_settings
def list_(settings: Settings, as_json: bool) -> None:
    """List models with their pools: workers wanted, taken by hosts, and ready; requests; aliases.

    Workers that were started by hand are counted too.
    """
    pools, problems = asyncio.run(_read(settings))
    for problem in problems:
        click.echo(f"headrace: {safe(problem)}; it is left out", err=True)
    if as_json:
        click.echo(msgspec.json.encode(pools).decode())
    else:
        _print(pools)


async def _read(settings: Settings) -> tuple[list[ListedPool], list[str]]:
    async with connected(settings) as bus:
        known = await read_known(bus)
        seen = (await WorkersBucket(bus).list()).values()
        beats = [each.beat for each in seen if each.beat is not None and not each.beat.is_tombstone]
        counts = {model: await _counts(bus, model) for model in known.names | {beat.model for beat in beats}}
        pools = listed(known, beats, await read_instances(bus), counts)
        problems = [each.problem for key, each in sorted(known.stored.items()) if not key.startswith("tenants.")]
    return pools, [problem for problem in problems if problem]


async def _counts(bus: Bus, model: str) -> QueueCounts:
    try:
        return await JobQueue(bus, model).counts()
    except NotProvisionedError:
        return {}


def listed(
    known: KnownModels, beats: Iterable[Heartbeat], snapshot: Snapshot, counts: Mapping[str, QueueCounts]
) -> list[ListedPool]:
    """Every pool of every model that is known, by name; `counts` are messages, queued and running alike."""
    live = list(beats)
    leads_to = _leads_to(known)
    pools: list[ListedPool] = []
    for model in sorted(known.names | counts.keys()):
        entry = known.models.get(model, ModelConfig())
        of_model = [beat for beat in live if beat.model == model]
        messages = counts.get(model, {})
        waiting = waiting_of(messages, of_model)
        declared = {group.pool: group for group in entry.instances}
        named = {queue.pool for queue in messages} | {pool.name for pool in entry.pools}
        named |= declared.keys() | {beat.pool for beat in of_model}
        named |= {name.group.pool for name in snapshot.slots if name.group.model == model}
        for pool in sorted(named or {DEFAULT_POOL}, key=lambda name: (name != DEFAULT_POOL, name)):
            queued = sum(number for queue, number in waiting.items() if queue.pool == pool)
            stored = sum(number for queue, number in messages.items() if queue.pool == pool)
            of_pool = [beat for beat in of_model if beat.pool == pool]
            shown = _workers(GroupName(model, pool), declared.get(pool), of_pool, snapshot)
            pools.append(
                msgspec.structs.replace(
                    shown,
                    paused=entry.paused,
                    queued=queued,
                    running=stored - queued,
                    aliases=leads_to.get(model, ()),
                )
            )
    return pools


def _workers(name: GroupName, group: ReplicaGroup | None, beats: list[Heartbeat], snapshot: Snapshot) -> ListedPool:
    """The pool as far as its workers go."""
    slots = snapshot.slots_of(name)
    scale = snapshot.scales.get(name)
    ours = {slot.worker for slot in slots.values() if slot.worker}
    bounds = group.autoscale if group is not None else None
    failed = snapshot.failed.get((name, group.generation)) if group is not None else None
    wanted = wanted_replicas(group, scale) if group is not None else None
    return ListedPool(
        model=name.model,
        pool=name.pool,
        engine=group.engine if group is not None else ", ".join(sorted({beat.engine for beat in beats if beat.engine})),
        wanted=wanted,
        leased=len(slots),
        ready=sum(beat.state in ("Ready", "Busy") for beat in beats),
        undeclared=sum(beat.worker not in ours for beat in beats),
        generation=group.generation if group is not None else None,
        autoscale=Bounds(
            min_replicas=bounds.min_replicas,
            max_replicas=bounds.max_replicas,
            reason=scale.reason if scale is not None else "",
        )
        if bounds is not None
        else None,
        paused=False,
        queued=0,
        running=0,
        failed=Failure(generation=group.generation, reason=failed.reason, failures=failed.failures, host=failed.host)
        if group is not None and failed is not None
        else None,
        hindrance=_hindrance(group, wanted, slots, snapshot),
        aliases=(),
        slots=tuple(_listed_slot(slot.generation, slot.index, lease) for slot, lease in sorted(slots.items())),
    )


def _hindrance(
    group: ReplicaGroup | None, wanted: int | None, slots: Mapping[SlotName, Slot], snapshot: Snapshot
) -> str:
    if group is None or not wanted or sum(slot.generation == group.generation for slot in slots) >= wanted:
        return ""
    return no_room(group, snapshot.hosts) if snapshot.hosts else "no host agent runs: `headrace serve host`"


def _listed_slot(generation: str, index: int, lease: Slot) -> ListedSlot:
    return ListedSlot(
        generation=generation,
        index=index,
        host=lease.host,
        worker=lease.worker,
        state=lease.state,
        reason=lease.reason,
    )


def _leads_to(known: KnownModels) -> dict[str, tuple[ListedAlias, ...]]:
    found: dict[str, tuple[ListedAlias, ...]] = {}
    for alias, entry in known.aliases.items():
        for model, share in shares(entry).items():
            found[model] = (*found.get(model, ()), ListedAlias(alias=alias, share=share))
    return found


def _print(pools: list[ListedPool]) -> None:
    out = console()
    if not pools:
        out.print("No model is known yet: `headrace models add` declares one, and a worker makes its own known.")
        return
    columns = ("model", "pool", "engine", "wanted", "leased", "ready", "scales", "queued", "running", "aliases", "")
    rows = [
        (
            each.model,
            each.pool,
            each.engine or _NONE,
            _NONE if each.wanted is None else str(each.wanted),
            _NONE if each.wanted is None and not each.leased else str(each.leased),
            str(each.ready),
            _NONE if each.autoscale is None else f"{each.autoscale.min_replicas} to {each.autoscale.max_replicas}",
            str(each.queued),
            str(each.running),
            ", ".join(f"{alias.alias} {alias.share:.0%}" for alias in each.aliases) or _NONE,
            _remark(each),
        )
        for each in pools
    ]
    out.print(table("Models", columns, rows, right=("wanted", "leased", "ready", "queued", "running")))


def _remark(each: ListedPool) -> Text:
    """What somebody should know: paused, failing, not there."""
    if each.failed is not None:
        where = f" on {each.failed.host}" if each.failed.host else ""
        text = f"generation {each.failed.generation} failed{where}: {each.failed.reason}"
        return Text(safe(("paused; " if each.paused else "") + text), style="red")
    troubles = [slot for slot in each.slots if slot.reason]
    if troubles:
        text = f"{troubles[0].state} on {troubles[0].host}: {troubles[0].reason}"
        return Text(safe(("paused; " if each.paused else "") + text), style="yellow")
    remarks = ["paused"] if each.paused else []
    return Text("; ".join([*remarks, each.hindrance] if each.hindrance else remarks), style="yellow")
