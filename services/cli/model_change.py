"""`headrace models add`, `set` and `restart`: declaring the workers that host agents keep running."""

import asyncio
from typing import Any

import click
import msgspec

from headrace.bus.connection import Bus
from headrace.bus.instancelist import read_instances
from headrace.cli.model_entries import check_model_name, checked_model, group_in, read_known, write_model
from headrace.cli.model_options import check_args, pool_option, worker_options
from headrace.cli.model_report import Changed, changed, print_changes
from headrace.cli.options import connected, with_settings
from headrace.cli.render import safe
from headrace.cli.rollout import follow, timeout_option, wait_option
from headrace.errors import ConfigError, HeadraceError
from headrace.schemas.config import ModelConfig
from headrace.schemas.replicas import ReplicaGroup
from headrace.schemas.subjects import DEFAULT_POOL
from headrace.settings import Settings

__all__ = ["add", "restart", "set_"]

_json = click.option("--json", "as_json", is_flag=True, help="One JSON object: what it was, what it is.")
_WITHOUT_BOUNDS = "changes nothing while the number is fixed; give --max-replicas too, so that it follows the load"


@click.command()
@click.argument("model", metavar="NAME")
@worker_options
@pool_option("Pool whose queues they serve; one that the model does not have yet is made.")
@wait_option
@timeout_option
@_json
@with_settings
def add(
    settings: Settings, model: str, told: dict[str, Any], pool: str, waits: bool, timeout_s: float, as_json: bool
) -> None:
    """Declare model NAME and the workers that host agents keep running for it.

    \b
    headrace models add m --engine vllm --replicas 2 --args "-o model_path=/models/m" --memory 40GiB
    headrace models add m --engine llama --uses host --memory 2GiB --min-replicas 0 --max-replicas 4
    headrace models add m --pool long --engine vllm --args "-o model_path=/models/m" --wait
    """  # noqa: D301  # click reads the backspaces
    check_model_name(model)
    if "engine" not in told:
        raise click.UsageError("--engine is missing: what computes the tokens")
    _require_bounds(told, None)
    check_args(told["engine"], told.get("args", ()))
    _run(settings, _add, model, pool, told, waits=waits, timeout_s=timeout_s, as_json=as_json)


@click.command("set")
@click.argument("model", metavar="NAME")
@worker_options
@click.option("--no-autoscale", "is_fixed", is_flag=True, help="Keep exactly --replicas running from now on.")
@pool_option("Pool whose workers are meant.")
@wait_option
@timeout_option
@_json
@with_settings
def set_(
    settings: Settings,
    model: str,
    told: dict[str, Any],
    is_fixed: bool,
    pool: str,
    waits: bool,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Change what is declared of a model's workers: what is named here, and nothing else.

    What changes how a worker is started replaces them one by one, each new one being ready before an old one drains. A
    change of their number restarts none. --args replaces all flags there were; --args "" removes them.

    \b
    headrace models set m --replicas 3
    headrace models set m --args "-o model_path=/models/m-2" --wait
    headrace models set m --min-replicas 1 --max-replicas 4 --target-wait 2
    """  # noqa: D301  # click reads the backspaces
    if is_fixed:
        if "autoscale" in told:
            raise click.UsageError("--no-autoscale keeps a fixed number; the bounds are for one that follows the load")
        told["autoscale"] = None
    if not told and not waits:
        raise click.UsageError("nothing to change: name what shall be different, such as --replicas N")
    _run(settings, _set, model, pool, told, waits=waits, timeout_s=timeout_s, as_json=as_json)


@click.command()
@click.argument("model", metavar="NAME")
@pool_option("Only the workers of this pool; default: of all.", default=None)
@wait_option
@timeout_option
@_json
@with_settings
def restart(settings: Settings, model: str, pool: str | None, waits: bool, timeout_s: float, as_json: bool) -> None:
    """Start a model's workers anew, one by one, each new one being ready before an old one drains."""
    _run(settings, _restart, model, pool, {}, waits=waits, timeout_s=timeout_s, as_json=as_json)


def _run(
    settings: Settings, change: Any, model: str, pool: str | None, told: dict[str, Any], *,
    waits: bool, timeout_s: float, as_json: bool,
) -> None:  # fmt: skip
    async def go() -> None:
        async with connected(settings) as bus:
            changes: list[Changed] = await change(bus, model, pool, told)
            print_changes(changes, as_json=as_json)
            if waits:
                await follow(bus, model, [each.after for each in changes], timeout_s=timeout_s)
                if not as_json:
                    click.echo(f"the workers of {safe(model)} are as declared")

    asyncio.run(go())


async def _add(bus: Bus, model: str, pool: str, told: dict[str, Any]) -> list[Changed]:
    known = await read_known(bus)
    if model in known.aliases:
        raise HeadraceError(f"{model} is an alias; `headrace models alias {model} --remove` frees the name")
    entry = known.entry_of(model)
    if any(group.pool == pool for group in entry.instances):
        raise HeadraceError(
            f"model {model} has workers declared for the pool {pool} already; change them with `headrace models set`"
        )
    values = msgspec.to_builtins(entry)
    is_new_pool = pool not in (DEFAULT_POOL, *(each.name for each in entry.pools))
    if is_new_pool:
        values["pools"] = [*values.get("pools", ()), {"name": pool}]
    values["instances"] = [*values.get("instances", ()), {"pool": pool, **told}]
    after = checked_model(model, values)
    await write_model(bus, known, model, after)
    change = changed(model, pool, entry, after, await read_instances(bus))
    if is_new_pool:
        new = f"the pool {pool} is new; a request goes there by the header Headrace-Pool, or by a rule"
        change = msgspec.structs.replace(change, follows=(*change.follows, new))
    return [change]


async def _set(bus: Bus, model: str, pool: str, told: dict[str, Any]) -> list[Changed]:
    known = await read_known(bus)
    entry = known.require(model)
    group = group_in(model, entry, pool)
    _require_bounds(told, group)
    values = msgspec.to_builtins(group)
    for name, value in told.items():
        values[name] = {**(values.get(name) or {}), **value} if isinstance(value, dict) else value
    after = _with_group(model, entry, pool, values)
    changed_group = group_in(model, after, pool)
    if "engine" in told or "args" in told:
        check_args(changed_group.engine, changed_group.args)
    if after != entry:
        await write_model(bus, known, model, after)
    return [changed(model, pool, entry, after, await read_instances(bus))]


async def _restart(bus: Bus, model: str, pool: str | None, _: dict[str, Any]) -> list[Changed]:
    known = await read_known(bus)
    entry = after = known.require(model)
    pools = [pool] if pool is not None else [group.pool for group in entry.instances] or [DEFAULT_POOL]
    for each in pools:
        group = group_in(model, after, each)
        raised = msgspec.structs.replace(group, restarts=group.restarts + 1)
        after = _with_group(model, after, each, msgspec.to_builtins(raised))
    await write_model(bus, known, model, after)
    snapshot = await read_instances(bus)
    return [changed(model, each, entry, after, snapshot) for each in pools]


def _with_group(model: str, entry: ModelConfig, pool: str, group: dict[str, Any]) -> ModelConfig:
    values = msgspec.to_builtins(entry)
    others = [msgspec.to_builtins(each) if each.pool != pool else group for each in entry.instances]
    return checked_model(model, {**values, "instances": others})


def _require_bounds(told: dict[str, Any], group: ReplicaGroup | None) -> None:
    """Raise ConfigError for a pace of a number that stands still."""
    bounds = told.get("autoscale")
    if bounds and "max_replicas" not in bounds and (group is None or group.autoscale is None):
        flag = "--" + next(iter(bounds)).removesuffix("_s").replace("_", "-")
        raise ConfigError(f"{flag} {_WITHOUT_BOUNDS}")
