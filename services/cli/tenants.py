"""`headrace tenant`: who may use the deployment, with which limits, models and API keys."""

import asyncio
from typing import Any, Final

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
    write_tenant,
)
from headrace.cli.options import connected, with_settings
from headrace.cli.render import console, safe, table
from headrace.cli.tenant_keys import json_option, key, make_key, print_made
from headrace.errors import HeadraceError
from headrace.schemas.config import TenantConfig
from headrace.schemas.config_text import key_of, parse_key
from headrace.schemas.subjects import DEFAULT_TENANT
from headrace.settings import Settings

__all__ = ["tenant"]

_ALL: Final = "-"


class ListedKey(msgspec.Struct, frozen=True):
    """A key as `list --json` shows it."""

    name: str
    id: str


class ListedTenant(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant of `list --json`; None is no limit, no pool of its own, and for `models` all of them."""

    tenant: str
    weight: float
    max_in_flight: int | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    pool: str | None
    models: tuple[str, ...] | None
    keys: tuple[ListedKey, ...]


@click.group()
def tenant() -> None:
    """Tenants: their limits, the models they may use, and their API keys for the gateway."""


tenant.add_command(key)


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
            listed.append(_listed(parsed[1], each.entry))
    if as_json:
        click.echo(msgspec.json.encode(listed).decode())
    else:
        _print(listed, is_open=not has_keys(stored.values()))


@tenant.command()
@click.argument("name")
@with_settings
def remove(settings: Settings, name: str) -> None:
    """Remove tenant NAME with its limits and keys; its keys are refused within a second.

    Requests that are queued or running go on to their end, as those of a tenant that is not configured. So do open
    responses. Its batches send nothing more. Its files stay until they expire, and are those of the next tenant of this
    name; so is its credential at a secured broker, until `headrace provision --secure` removes it.
    """
    check_tenant_name(name)
    told = asyncio.run(_remove(settings, name))
    click.echo(f"tenant {name} is removed")
    for line in told:
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
                "`headrace config apply` changes it"
            )
        await write_tenant(bus, name, entry, known)
        if entry.models:
            config = await read_config(bus)
            known_models = {*await list_models(bus), *config.models, *config.aliases}
            for model in entry.models:
                if model not in known_models:
                    click.echo(f"headrace: no model or alias {safe(model)} is known yet", err=True)


async def _remove(settings: Settings, name: str) -> list[str]:
    """Returns what is left of it: requests that have not ended, as far as they wait in a queue of its own, and more."""
    told = []
    async with connected(settings) as bus:
        config, stored = await read_config(bus), await read_entries(bus)
        await write_tenant(bus, name, None, find_tenant(stored, name, may_be_bad=True))
        await warn_if_opened(bus, stored)
        models = await list_models(bus) if config.queue_of(name) == name else []
        if num_left := sum([await num_messages(bus, model, name) for model in models]):
            told.append(f"{num_left} of its requests are queued or running and go on; `headrace jobs cancel` ends one")
        open_batches = [batch for batch in await BatchRecords(bus).batches(name) if not batch.is_over]
        if (num_open := len(open_batches)) and name != DEFAULT_TENANT:
            told.append(f"{num_open} of its batches send nothing more, unless it is added again within their time")
        if num_files := len(await BatchRecords(bus).files(name)):
            told.append(f"{num_files} of its files stay until they expire; a new tenant of this name would have them")
        if bus.settings.is_secured:
            told.append(
                f"its credential, if it has one, is good without limits now: `headrace provision --secure --remove "
                f"tenant-{name}` takes it away"
            )
    return told


def _listed(name: str, entry: TenantConfig) -> ListedTenant:
    return ListedTenant(
        tenant=name,
        weight=entry.weight,
        max_in_flight=entry.max_in_flight,
        requests_per_minute=entry.requests_per_minute,
        tokens_per_minute=entry.tokens_per_minute,
        pool=entry.pool,
        models=entry.models,
        keys=tuple(ListedKey(key.name, key.id) for key in entry.keys or ()),
    )


def _print(listed: list[ListedTenant], *, is_open: bool) -> None:
    out = console()
    columns = ("tenant", "weight", "in flight", "requests/min", "tokens/min", "pool", "models", "keys")
    rows = [
        (
            each.tenant,
            f"{each.weight:g}",
            *(_ALL if n is None else str(n) for n in (each.max_in_flight, each.requests_per_minute)),
            _ALL if each.tokens_per_minute is None else str(each.tokens_per_minute),
            each.pool or _ALL,
            "all" if each.models is None else safe(", ".join(each.models)) or "none",
            ", ".join(f"{key.name} ({key.id})" for key in each.keys) or "none",
        )
        for each in listed
    ]
    if listed:
        out.print(table("Tenants", columns, rows, right=columns[1:5]))
    else:
        out.print("No tenant is configured.")
    if is_open:
        out.print(Text("No tenant has an API key: the gateway takes every request, as tenant default.", style="dim"))
