"""`headrace tenant set`: a tenant's limits, share, pool and models, changed one by one; its keys stay."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import click
import msgspec

from headrace.bus.configuration import read_entries
from headrace.cli.entries import (
    check_tenant_name,
    checked_tenant,
    find_tenant,
    tenant_of_entry,
    warn_of_unknown_models,
    write_tenant,
)
from headrace.cli.options import connected, with_settings
from headrace.cli.tenant_keys import json_option
from headrace.cli.tenant_table import listed_tenant, print_tenants
from headrace.schemas.config import TenantConfig
from headrace.settings import Settings

__all__ = ["set_"]

_UNSET: Final = {
    "max_in_flight": "--no-max-in-flight",
    "requests_per_minute": "--no-requests-per-minute",
    "tokens_per_minute": "--no-tokens-per-minute",
    "pool": "--no-pool",
    "models": "--all-models",
}
"""What can be without a value, and the flag that takes it."""


@click.command("set")
@click.argument("name")
@click.option("--weight", type=float, metavar="X", help="Share of a lane against other tenants.")
@click.option("--max-in-flight", type=int, metavar="N", help="Requests of a model queued and running at once.")
@click.option("--no-max-in-flight", is_flag=True, help="As many at once as come.")
@click.option("--requests-per-minute", type=int, metavar="N", help="Requests in any 60 seconds.")
@click.option("--no-requests-per-minute", is_flag=True, help="As many as come.")
@click.option("--tokens-per-minute", type=int, metavar="N", help="Tokens, of prompts and answers, in any 60 seconds.")
@click.option("--no-tokens-per-minute", is_flag=True, help="As many as come.")
@click.option("--pool", metavar="POOL", help="Where its requests go unless a rule or header says otherwise.")
@click.option("--no-pool", is_flag=True, help="No pool of its own.")
@click.option("--model", "models", multiple=True, metavar="MODEL", help="A model it may use, in place of those before.")
@click.option("--all-models", is_flag=True, help="It may use every model.")
@json_option
@with_settings
def set_(settings: Settings, name: str, as_json: bool, **options: Any) -> None:
    """Change what is said of tenant NAME, and leave the rest of it and its API keys as they are.

    Routers and gateways follow within a second. Where somebody else changes the tenant in the same moment it fails and
    changes nothing.

    \b
    headrace tenant set acme --tokens-per-minute 100000 --no-max-in-flight
    headrace tenant set acme --model org/m-3.1 --model smollm2-135m
    """  # noqa: D301  # click reads the backspaces
    check_tenant_name(name)
    changes = _changes(options)
    entry = asyncio.run(_set(settings, name, changes))
    if as_json:
        click.echo(msgspec.json.encode(listed_tenant(name, entry)).decode())
    else:
        print_tenants([listed_tenant(name, entry)])


def _changes(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields to change; None takes a value away. Raises UsageError where nothing is said, or two things of one."""
    changes: dict[str, Any] = {}
    for field in ("weight", *_UNSET):
        value = options[field]
        if field == "models":
            value = list(dict.fromkeys(value)) or None
        flag = _UNSET.get(field, "")
        is_unset = bool(flag) and options[flag.removeprefix("--").replace("-", "_")]
        if is_unset and value is not None:
            raise click.UsageError(f"{flag} contradicts the value that is given")
        if is_unset or value is not None:
            changes[field] = value
    if not changes:
        raise click.UsageError("nothing to change: name at least one option")
    return changes


async def _set(settings: Settings, name: str, changes: Mapping[str, Any]) -> TenantConfig:
    async with connected(settings) as bus:
        known = find_tenant(await read_entries(bus), name)
        entry = checked_tenant(name, {**msgspec.to_builtins(tenant_of_entry(known)), **changes})
        await write_tenant(bus, name, entry, known)
        if "models" in changes:
            await warn_of_unknown_models(bus, entry)
        return entry
