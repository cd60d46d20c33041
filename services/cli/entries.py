"""Writing the configuration: one key at a time, by compare-and-set, and what has to be said of it."""

from collections.abc import Iterable, Mapping
from typing import Any

import click
import msgspec

from headrace.bus.configuration import StoredEntry, read_config, read_entries
from headrace.bus.connection import Bus, Refused, Stored
from headrace.bus.keyvalue import Bucket
from headrace.bus.overview import list_models
from headrace.cli.render import safe
from headrace.errors import BrokerUnavailableError, ConfigError, HeadraceError
from headrace.schemas.config import TenantConfig
from headrace.schemas.config_text import Entry, InvalidConfig, decode_entry, encode_entry, key_of
from headrace.schemas.subjects import is_name

__all__ = [
    "check_tenant_name",
    "checked_tenant",
    "find_tenant",
    "has_keys",
    "tenant_of_entry",
    "warn_if_opened",
    "warn_of_unknown_models",
    "with_kept_keys",
    "write_entry",
    "write_tenant",
]


async def write_entry(bus: Bus, key: str, entry: Entry | None, *, expected_revision: int) -> None:
    """Write a key of the bucket, or remove it (None), if its revision is still that (0: it was never written).

    Raises HeadraceError where somebody else was faster, BrokerUnavailableError.
    """
    bucket = Bucket(bus, bus.names.config_bucket)
    if entry is None:
        result = await bucket.remove(key, expected_revision=expected_revision)
    else:
        result = await bucket.put(key, encode_entry(entry), expected_revision=expected_revision)
    if isinstance(result, Refused) and result.is_lost_race:
        raise HeadraceError(f"{key} was changed by somebody else just now; look at it and try again")
    if not isinstance(result, Stored):
        raise BrokerUnavailableError(f"{key} may not be written; try again")


def with_kept_keys(entry: Entry, stored: StoredEntry | None) -> Entry:
    """The entry as it is to be written: a tenant without `keys` keeps the API keys it has, an empty list takes them."""
    if not isinstance(entry, TenantConfig):
        return entry
    keys = entry.keys
    if keys is None and stored is not None and isinstance(stored.entry, TenantConfig):
        keys = stored.entry.keys
    return msgspec.structs.replace(entry, keys=keys or None)


def has_keys(stored: Iterable[StoredEntry]) -> bool:
    """Whether any tenant has an API key, so that the gateway wants one."""
    return any(isinstance(each.entry, TenantConfig) and each.entry.keys for each in stored)


async def warn_if_opened(bus: Bus, before: Mapping[str, StoredEntry]) -> None:
    """Say so where there were API keys and now there are none: the gateway lets everybody in then."""
    if has_keys(before.values()) and not has_keys((await read_entries(bus)).values()):
        click.echo(
            "headrace: no tenant has an API key any more: the gateway takes every request, as tenant default", err=True
        )


async def warn_of_unknown_models(bus: Bus, entry: TenantConfig) -> None:
    """Say which of the models that a tenant may use nobody knows of yet."""
    if not entry.models:
        return
    config = await read_config(bus)
    known = {*await list_models(bus), *config.models, *config.aliases}
    for model in entry.models:
        if model not in known:
            click.echo(f"headrace: no model or alias {safe(model)} is known yet", err=True)


async def write_tenant(bus: Bus, name: str, entry: TenantConfig | None, known: StoredEntry | None) -> None:
    """Write a tenant, or remove it, if nobody else did since it was read. Raises as `write_entry` does."""
    revision = known.revision if known is not None else 0
    await write_entry(bus, key_of("tenants", name), entry, expected_revision=revision)


def find_tenant(stored: Mapping[str, StoredEntry], name: str, *, may_be_bad: bool = False) -> StoredEntry:
    """A tenant that is there. Raises HeadraceError where none is, or unless it may, where its value cannot be."""
    known = stored.get(key_of("tenants", name))
    if known is None or (known.entry is None and not known.problem):
        names = sorted(key.partition(".")[2] for key, each in stored.items() if isinstance(each.entry, TenantConfig))
        raise HeadraceError(f"there is no tenant {name}; there are: {', '.join(names) or 'none'}")
    if known.problem and not may_be_bad:
        raise HeadraceError(f"{known.problem}; write it anew with `headrace config apply`")
    return known


def tenant_of_entry(known: StoredEntry) -> TenantConfig:
    """The entry of a tenant that `find_tenant` found."""
    assert isinstance(known.entry, TenantConfig)
    return known.entry


def checked_tenant(name: str, values: Mapping[str, Any]) -> TenantConfig:
    """A tenant of these values. Raises ConfigError, which says what is allowed."""
    try:
        entry = decode_entry(key_of("tenants", name), msgspec.json.encode(values))
    except InvalidConfig as error:
        raise ConfigError(str(error)) from None
    assert isinstance(entry, TenantConfig)
    return entry


def check_tenant_name(name: str) -> None:
    """Raise ConfigError for a name that cannot be."""
    if not is_name(name):
        raise ConfigError(f"NAME is {name[:80]!r}; allowed: 1 to 40 of a-z 0-9 -")
