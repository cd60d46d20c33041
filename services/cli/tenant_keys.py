"""`headrace tenant key`: API keys of a tenant, made, shown once, and revoked."""

import asyncio
import secrets
from typing import Final

import click
import msgspec

from headrace.bus.configuration import read_entries
from headrace.cli.entries import (
    check_tenant_name,
    checked_tenant,
    find_tenant,
    has_keys,
    tenant_of_entry,
    warn_if_opened,
    write_tenant,
)
from headrace.cli.options import connected, with_settings
from headrace.errors import ConfigError, HeadraceError
from headrace.schemas.keys import KEY_BYTES, ApiKey, hash_of, key_from
from headrace.schemas.subjects import is_name
from headrace.settings import Settings

__all__ = ["json_option", "key", "make_key", "print_made"]


class MadeKey(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints of a new key; `key` is nowhere else, and never shown again."""

    tenant: str
    key: str
    key_name: str
    key_id: str


json_option: Final = click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")
"""Of every command that prints something."""


@click.group()
def key() -> None:
    """API keys of a tenant: to change one, add the next, give it out, and revoke the one before."""


@key.command("add")
@click.argument("name")
@click.option("--key-name", required=True, metavar="KEY", help="What the key is called in lists.")
@json_option
@with_settings
def add_key(settings: Settings, name: str, key_name: str, as_json: bool) -> None:
    """Make another API key for tenant NAME and print it, this once. Those it has stay good."""
    check_tenant_name(name)
    made, kept = make_key(name, key_name)
    asyncio.run(_add_key(settings, name, kept))
    print_made(made, f"tenant {name} has another key", as_json=as_json)


@key.command()
@click.argument("name")
@click.argument("key")
@click.option("--open-gateway", is_flag=True, help="Revoke it even if no tenant has a key then.")
@with_settings
def revoke(settings: Settings, name: str, key: str, open_gateway: bool) -> None:
    """Revoke the KEY, by its name or id, of tenant NAME; it is refused within a second. Open responses go on.

    The last key of a deployment is revoked only if told so: without any, the gateway lets everybody in.
    """
    check_tenant_name(name)
    revoked = asyncio.run(_revoke(settings, name, key, open_gateway=open_gateway))
    click.echo(f"key {revoked.name} ({revoked.id}) of tenant {name} is revoked")


async def _add_key(settings: Settings, name: str, kept: ApiKey) -> None:
    async with connected(settings) as bus:
        known = find_tenant(await read_entries(bus), name)
        entry = tenant_of_entry(known)
        values = msgspec.to_builtins(msgspec.structs.replace(entry, keys=None))
        keys = [msgspec.to_builtins(each) for each in (*(entry.keys or ()), kept)]
        await write_tenant(bus, name, checked_tenant(name, {**values, "keys": keys}), known)


async def _revoke(settings: Settings, name: str, key: str, *, open_gateway: bool) -> ApiKey:
    async with connected(settings) as bus:
        stored = await read_entries(bus)
        known = find_tenant(stored, name)
        keys = tenant_of_entry(known).keys or ()
        named = [each for each in keys if each.name == key] or [each for each in keys if each.id == key]
        if len(named) != 1:
            have = ", ".join(f"{each.name} ({each.id})" for each in keys) or "none"
            raise HeadraceError(f"tenant {name} has no such key; it has: {have}")
        left = tuple(each for each in keys if each is not named[0])
        others = (each for each in stored.values() if each is not known)
        if not open_gateway and not left and not has_keys(others):
            raise HeadraceError(
                "it is the only key of the deployment, and without any the gateway lets everybody in; add another one "
                "first (`headrace tenant key add`), or say --open-gateway"
            )
        await write_tenant(bus, name, msgspec.structs.replace(tenant_of_entry(known), keys=left or None), known)
        await warn_if_opened(bus, stored)
        return named[0]


def make_key(tenant: str, name: str) -> tuple[MadeKey, ApiKey]:
    """A new key: what to print, this once, and what to keep. Raises ConfigError for a name that cannot be."""
    if not is_name(name):
        raise ConfigError(f"--key-name is {name[:80]!r}; allowed: 1 to 40 of a-z 0-9 -")
    key = key_from(secrets.token_bytes(KEY_BYTES))
    kept = ApiKey(name=name, sha256=hash_of(key.encode()))
    return MadeKey(tenant=tenant, key=key, key_name=name, key_id=kept.id), kept


def print_made(made: MadeKey, text: str, *, as_json: bool) -> None:
    """The key alone on stdout, so that a script can take it from there; what people want to know on stderr."""
    if as_json:
        click.echo(msgspec.json.encode(made).decode())
        return
    click.echo(f"{text}: {made.key_name} ({made.key_id}). It is shown this once; only its hash is kept.", err=True)
    click.echo(made.key)
