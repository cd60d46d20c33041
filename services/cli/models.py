"""`headrace models`: which models there are, the workers that are kept running for them, and pausing."""

import asyncio
import sys
from typing import Final

import click
import msgspec

from headrace.bus.connection import Bus, Refused, Stored
from headrace.bus.instancelist import read_instances
from headrace.bus.keyvalue import Bucket
from headrace.bus.occupancy import num_messages
from headrace.cli.model_alias import alias
from headrace.cli.model_change import add, restart, set_
from headrace.cli.model_entries import KnownModels, group_in, read_known, write_model
from headrace.cli.model_list import list_
from headrace.cli.model_options import pool_option
from headrace.cli.options import connected, with_settings
from headrace.cli.render import safe
from headrace.cli.rollout import follow, timeout_option, wait_option
from headrace.errors import BrokerUnavailableError, ConfigError, HeadraceError, NotProvisionedError
from headrace.schemas.config import ModelConfig
from headrace.schemas.instances import GroupName, failed_key
from headrace.schemas.replicas import ReplicaGroup
from headrace.settings import Settings

__all__ = ["models"]

_REMOVED_TTL_S: Final = 60


@click.group()
def models() -> None:
    """Models: the workers that host agents keep running for them, pausing, and aliases.

    Every change is one key of the configuration, written only if nobody else wrote it meanwhile; services follow within
    a second.
    """


for _command in (list_, add, set_, restart, alias):
    models.add_command(_command)


@models.command()
@click.argument("model", metavar="NAME")
@with_settings
def pause(settings: Settings, model: str) -> None:
    """Have nothing of model NAME started from now on: its requests wait in their places, within their queue timeouts.

    What runs goes on to its end. Its workers stay up.
    """
    asyncio.run(_set_paused(settings, model, is_paused=True))


@models.command()
@click.argument("model", metavar="NAME")
@with_settings
def resume(settings: Settings, model: str) -> None:
    """Have requests of model NAME started again."""
    asyncio.run(_set_paused(settings, model, is_paused=False))


@models.command()
@click.argument("model", metavar="NAME")
@pool_option("Only the workers of this pool; default: of all.", default=None)
@wait_option
@timeout_option
@with_settings
def retry(settings: Settings, model: str, pool: str | None, waits: bool, timeout_s: float) -> None:
    """Try workers again that did not come up and were given up; what was wrong should be put right before."""
    asyncio.run(_retry(settings, model, pool, waits=waits, timeout_s=timeout_s))


@models.command()
@click.argument("model", metavar="NAME")
@pool_option("Only the workers of this pool; default: of all.", default=None)
@click.option("--all", "is_whole", is_flag=True, help="The whole entry: pools, rules, fallback and pausing too.")
@click.option("--yes", "is_sure", is_flag=True, help="Do not ask.")
@with_settings
def remove(settings: Settings, model: str, pool: str | None, is_whole: bool, is_sure: bool) -> None:
    """Stop keeping workers of model NAME running: they drain and leave.

    The model stays known, and its requests wait for workers that somebody starts, within their queue timeouts.
    """
    if is_whole and pool is not None:
        raise click.UsageError("--all removes the workers of every pool; leave --pool away")
    asyncio.run(_remove(settings, model, pool, is_whole=is_whole, is_sure=is_sure))


async def _set_paused(settings: Settings, model: str, *, is_paused: bool) -> None:
    async with connected(settings) as bus:
        known = await read_known(bus)
        entry = known.require(model)
        word = "paused" if is_paused else "resumed"
        if entry.paused == is_paused:
            click.echo(f"model {safe(model)} is {'paused already' if is_paused else 'not paused'}")
            return
        await write_model(bus, known, model, msgspec.structs.replace(entry, paused=is_paused))
        number = await _num_held(bus, model)
        what = "run on or wait" if is_paused else "run or may start"
        click.echo(f"model {safe(model)} is {word}; of its requests {number} {what}")


async def _retry(settings: Settings, model: str, pool: str | None, *, waits: bool, timeout_s: float) -> None:
    async with connected(settings) as bus:
        known = await read_known(bus)
        groups = _groups(model, known.require(model), pool)
        snapshot = await read_instances(bus)
        failed = [group for group in groups if (GroupName(model, group.pool), group.generation) in snapshot.failed]
        if not failed:
            raise HeadraceError(f"no workers of {model} were given up; `headrace models list` shows how they are")
        bucket = Bucket(bus, bus.names.instances_bucket)
        for group in failed:
            key = failed_key(GroupName(model, group.pool), group.generation)
            result = await bucket.remove(key, expected_revision=snapshot.revisions[key], ttl_s=_REMOVED_TTL_S)
            if isinstance(result, Refused) and result.is_lost_race:
                raise HeadraceError(f"{key} was changed by somebody else just now; look at it and try again")
            if not isinstance(result, Stored):
                raise BrokerUnavailableError(f"{key} may still be there; try again")
            click.echo(f"model {safe(model)}, pool {group.pool}: generation {group.generation} is tried again")
        if waits:
            await follow(bus, model, failed, timeout_s=timeout_s)
            click.echo(f"the workers of {safe(model)} are as declared")


async def _remove(settings: Settings, model: str, pool: str | None, *, is_whole: bool, is_sure: bool) -> None:
    async with connected(settings) as bus:
        known = await read_known(bus)
        entry = known.require(model)
        groups = _groups(model, entry, pool) if entry.instances or not is_whole else []
        snapshot = await read_instances(bus)
        num_leased = sum(len(snapshot.slots_of(GroupName(model, group.pool))) for group in groups)
        leaving = "1 worker drains and leaves" if num_leased == 1 else f"{num_leased} workers drain and leave"
        where = f"model {model}" if pool is None else f"model {model}, pool {pool}"
        if not is_sure:
            what = "all that is configured" if is_whole else "what is declared of its workers"
            _ask(f"{safe(where)}: remove {what}? {leaving}.")
        left = tuple(group for group in entry.instances if group not in groups)
        await write_model(bus, known, model, None if is_whole else msgspec.structs.replace(entry, instances=left))
        done = "is configured no more" if is_whole else "keeps no workers running any more"
        click.echo(f"{safe(where)} {done}; {leaving}")
        for line in await _left_behind(bus, known, model, is_whole=is_whole):
            click.echo(safe(line))


async def _left_behind(bus: Bus, known: KnownModels, model: str, *, is_whole: bool) -> list[str]:
    told = []
    if number := await _num_held(bus, model):
        told.append(
            f"{number} of its requests are queued or running; they wait for workers within their queue timeouts"
        )
    leading = [name for name, entry in known.aliases.items() if any(each.name == model for each in entry.targets)]
    if leading and is_whole:
        told.append(f"aliases still lead to it: {', '.join(leading)}; `headrace models alias` changes one")
    return told


async def _num_held(bus: Bus, model: str) -> int:
    try:
        return await num_messages(bus, model, "*")
    except NotProvisionedError:
        return 0


def _groups(model: str, entry: ModelConfig, pool: str | None) -> tuple[ReplicaGroup, ...]:
    """Groups that are meant. Raises HeadraceError where there are none."""
    if pool is not None:
        return (group_in(model, entry, pool),)
    if not entry.instances:
        raise HeadraceError(f"no workers are declared for model {model}; `headrace models add` declares some")
    return entry.instances


def _ask(question: str) -> None:
    """Raise ConfigError where nobody can be asked, HeadraceError where the answer is no."""
    if not sys.stdin.isatty():
        raise ConfigError("nobody can be asked here; give --yes")
    if not click.confirm(question, err=True):
        raise HeadraceError("nothing was removed")
