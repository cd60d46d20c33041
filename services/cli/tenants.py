"""`headrace tenant`: who may use the deployment, with which limits, models and API keys."""

import asyncio
from collections.abc import Iterator
from typing import Any

import click
import msgspec
from rich.text import Text

from headrace.bus.batches import BatchRecords
from headrace.bus.configuration import StoredEntry, read_config, read_entries
from headrace.bus.occupancy import num_messages
from headrace.bus.overview import list_models
from headrace.cli.entries import (
    check_tenant_name,
    checked_tenant,
    find_tenant,
    has_keys,
    warn_if_opened,
    warn_of_unknown_models,
    write_tenant,
)
from headrace.cli.options import connected, with_settings
from headrace.cli.render import console, safe
from headrace.cli.tenant_keys import json_option, key, make_key, print_made
from headrace.cli.tenant_set import set_
from headrace.cli.tenant_table import listed_tenant, print_tenants
from headrace.errors import HeadraceError
from headrace.schemas.config import TenantConfig
from headrace.schemas.config_text import key_of, parse_key
from headrace.schemas.subjects import DEFAULT_TENANT
from headrace.settings import Settings

__all__ = ["tenant"]


class RemovedTenant(msgspec.Struct, frozen=True, kw_only=True):
    """What `remove --json` prints: what is left of it. Requests are counted where they had a queue of its own."""

    tenant: str
    num_requests: int
    num_batches: int
    num_files: int


@click.group()
def tenant() -> None:
    """Tenants: their limits, the models they may use, and their API keys for the gateway."""


tenant.add_command(key)
tenant.add_command(set_)


@tenant.command()
@click.argument("name")
@click.option("--weight", type=float, metavar="X", help="Share of a lane against other tenants; default 1.")
@click.option("--max-in-flight", type=int, metavar="N", help="Requests of a model queued and running at once.")
@click.option("--requests-per-minute", type=int, metavar="N", help="Requests in any 60 seconds.")
@click.option("--tokens-per-minute", type=int, metavar="N", help="Tokens, of prompts and answers, in any 60 seconds.")
@click.option("--pool", metavar="POOL", help="Where its requests go unless a rule or header says otherwise.")
@click.option("--model", "models", multiple=True, metavar="MODEL", help="A model or alias it may use; default: all.")
@click.option(
    "--key-name", default="default", show_default=True, metavar="KEY", help="What its key is called in lists."
)
@click.option("--no-key", is_flag=True, help="Make no API key: for tenants that come over NATS alone.")
@json_option
@with_settings
def add(
    settings: Settings, name: str, models: tuple[str, ...], key_name: str, no_key: bool, as_json: bool, **others: Any
) -> None:
    """Add tenant NAME, and print its API key, which is shown this once.

    Only a hash of the key is kept. As soon as any tenant has a key, the gateway lets nobody in without one; it follows
    within a second.
    """
    check_tenant_name(name)
    values: dict[str, Any] = {field: value for field, value in others.items() if value is not None}
    if models:
        values["models"] = list(dict.fromkeys(models))
    entry = checked_tenant(name, values)
    if no_key:
        asyncio.run(_add(settings, name, entry))
        click.echo(msgspec.json.encode({"tenant": name}).decode() if as_json else f"tenant {name} is added")
        return
    made, kept = make_key(name, key_name)
    asyncio.run(_add(settings, name, msgspec.structs.replace(entry, keys=(kept,))))
    print_made(made, f"tenant {name} is added", as_json=as_json)


@tenant.command("list")
@json_option
@with_settings
def list_(settings: Settings, as_json: bool) -> None:
    """List tenants, with limits, models and the names and ids of their keys."""
    stored = asyncio.run(_stored(settings))
    listed = []
    for each in sorted(stored.values(), key=lambda each: each.key):
        parsed = parse_key(each.key)
        if each.problem and each.key.startswith("tenants."):
            click.echo(f"headrace: {safe(each.problem)}; it is left out", err=True)
        if parsed is not None and isinstance(each.entry, TenantConfig):
            listed.append(listed_tenant(parsed[1], each.entry))
    if as_json:
        click.echo(msgspec.json.encode(listed).decode())
        return
    print_tenants(listed)
    if not has_keys(stored.values()):
        said = "No tenant has an API key: the gateway takes every request, as tenant default."
        console().print(Text(said, style="dim"))


@tenant.command()
@click.argument("name")
@json_option
@with_settings
def remove(settings: Settings, name: str, as_json: bool) -> None:
    """Remove tenant NAME with its limits and keys; its keys are refused within a second.

    Requests that are queued or running go on to their end, as those of a tenant that is not configured. So do open
    responses. Its batches send nothing more. Its files stay until they expire, and are those of the next tenant of this
    name; so is its credential at a secured broker, until `headrace provision --secure` removes it.
    """
    check_tenant_name(name)
    removed, is_secured = asyncio.run(_remove(settings, name))
    if as_json:
        click.echo(msgspec.json.encode(removed).decode())
        return
    click.echo(f"tenant {name} is removed")
    for line in _what_is_left(removed, is_secured=is_secured):
        click.echo(line)


async def _stored(settings: Settings) -> dict[str, StoredEntry]:
    async with connected(settings) as bus:
        return await read_entries(bus)


async def _add(settings: Settings, name: str, entry: TenantConfig) -> None:
    async with connected(settings) as bus:
        known = (await read_entries(bus)).get(key_of("tenants", name))
        if known is not None and (known.entry is not None or known.problem):
            raise HeadraceError(
                f"tenant {name} is there already: `headrace tenant key add` makes it a key, "
                "`headrace tenant set` changes it"
            )
        await write_tenant(bus, name, entry, known)
        await warn_of_unknown_models(bus, entry)


async def _remove(settings: Settings, name: str) -> tuple[RemovedTenant, bool]:
    """What is left of it, and whether the broker asks for credentials."""
    async with connected(settings) as bus:
        config, stored = await read_config(bus), await read_entries(bus)
        await write_tenant(bus, name, None, find_tenant(stored, name, may_be_bad=True))
        await warn_if_opened(bus, stored)
        models = await list_models(bus) if config.queue_of(name) == name else []
        records = BatchRecords(bus)
        removed = RemovedTenant(
            tenant=name,
            num_requests=sum([await num_messages(bus, model, name) for model in models]),
            num_batches=sum(not batch.is_over for batch in await records.batches(name)),
            num_files=len(await records.files(name)),
        )
        return removed, bus.settings.is_secured


def _what_is_left(removed: RemovedTenant, *, is_secured: bool) -> Iterator[str]:
    if removed.num_requests:
        yield (
            f"{removed.num_requests} of its requests are queued or running and go on; `headrace jobs cancel` ends one"
        )
    if removed.num_batches and removed.tenant != DEFAULT_TENANT:
        yield f"{removed.num_batches} of its batches send nothing more, unless it is added again within their time"
    if removed.num_files:
        yield f"{removed.num_files} of its files stay until they expire; a new tenant of this name would have them"
    if is_secured:
        yield (
            f"its credential, if it has one, is good without limits now: `headrace provision --secure --remove "
            f"tenant-{removed.tenant}` takes it away"
        )
