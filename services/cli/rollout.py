"""How far the workers of a group are from what is declared of them, and waiting until they are there."""

import asyncio
import time
from collections.abc import Sequence
from typing import Final

import click
import msgspec

from headrace.bus.configuration import read_model
from headrace.bus.connection import Bus
from headrace.bus.instancelist import Snapshot, read_instances
from headrace.cli.progress import Progress
from headrace.cli.render import safe
from headrace.discipline.fit import no_room
from headrace.discipline.replicas import wanted_replicas
from headrace.errors import HeadraceError
from headrace.schemas.instances import FailedGeneration, GroupName
from headrace.schemas.replicas import ReplicaGroup

__all__ = ["Rollout", "follow", "rollout_of", "timeout_option", "wait_option"]

_LOOK_S: Final = 0.25

wait_option: Final = click.option(
    "--wait", "waits", is_flag=True, help="Return once the workers are as declared; exit 1 if they do not come up."
)
timeout_option: Final = click.option(
    "--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), default=600.0, show_default=True, metavar="S",
    help="How long --wait waits.",
)  # fmt: skip


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas of one group at one moment. `leased` and `ready` ones are of the generation that is declared.

    `outdated` are leases of other generations, and those of this one beyond what is wanted. `troubles` say why replicas
    fail, `no_room` why no host takes one more.
    """

    generation: str
    wanted: int
    leased: int
    ready: int
    outdated: int
    num_hosts: int
    troubles: tuple[str, ...] = ()
    failed: FailedGeneration | None = None
    no_room: str = ""

    @property
    def is_done(self) -> bool:
        """Whether those that are wanted are there, and no others."""
        return self.ready >= self.wanted and not self.outdated

    def __str__(self) -> str:
        text = f"{self.ready} of {self.wanted} ready (generation {self.generation})"
        if self.outdated:
            text += f", {self.outdated} to go"
        if not self.num_hosts:
            text += "; no host agent runs: start one on each machine"
        elif self.troubles:
            text += f"; {self.troubles[0]}"
        elif self.leased < self.wanted:
            text += f", {self.wanted - self.leased} not yet placed on a host"
            text += f": {self.no_room}" if self.no_room else ""
        return text


def rollout_of(name: GroupName, group: ReplicaGroup, snapshot: Snapshot) -> Rollout:
    """How far a group is."""
    wanted = wanted_replicas(group, snapshot.scales.get(name))
    slots = snapshot.slots_of(name)
    current = [lease for slot, lease in sorted(slots.items()) if slot.generation == group.generation]
    return Rollout(
        generation=group.generation,
        wanted=wanted,
        leased=len(current),
        ready=sum(lease.state == "Ready" for lease in current),
        outdated=len(slots) - min(len(current), wanted),
        num_hosts=len(snapshot.hosts),
        troubles=tuple(f"{lease.reason} (host {lease.host})" for lease in current if lease.reason),
        failed=snapshot.failed.get((name, group.generation)),
        no_room=no_room(group, snapshot.hosts),
    )


async def follow(bus: Bus, model: str, groups: Sequence[ReplicaGroup], *, timeout_s: float) -> None:
    """Wait until the groups are as declared, and say on stderr how far they are; if interrupted, that they go on.

    Raises HeadraceError where a generation fails, where somebody declares something else meanwhile, and after
    `timeout_s`.
    """
    try:
        await _follow(bus, model, groups, timeout_s=timeout_s)
    except asyncio.CancelledError:
        click.echo(f"{safe(model)} stays as it is declared; `headrace models list` shows how far it is", err=True)
        raise


async def _follow(bus: Bus, model: str, groups: Sequence[ReplicaGroup], *, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    with Progress() as progress:
        while True:
            declared = {group.pool: group for group in (await read_model(bus, model)).instances}
            snapshot = await read_instances(bus)
            left: list[tuple[str, Rollout]] = []
            for group in groups:
                now = declared.get(group.pool)
                if now is None or now.generation != group.generation:
                    raise HeadraceError(f"somebody else changed the workers of {model} meanwhile; look at it again")
                rollout = rollout_of(GroupName(model, group.pool), now, snapshot)
                _require_no_failure(model, group.pool, rollout)
                if not rollout.is_done:
                    left.append((group.pool, rollout))
            if not left:
                return
            where = "; ".join(f"pool {pool}: {rollout}" if len(groups) > 1 else str(rollout) for pool, rollout in left)
            progress.say(where)
            if time.monotonic() >= until:
                raise HeadraceError(f"the workers of {model} are not as declared after {timeout_s:g} s: {where}")
            await asyncio.sleep(_LOOK_S)


def _require_no_failure(model: str, pool: str, rollout: Rollout) -> None:
    failed = rollout.failed
    if failed is not None:
        where = f" on host {failed.host}" if failed.host else ""
        raise HeadraceError(
            f"generation {rollout.generation} of {model} (pool {pool}) has failed{where}: {failed.reason}; what "
            f"ran before goes on. Change it with `headrace models set`, or try it again with `headrace models retry`"
        )
