"""How tenants are listed, as JSON and as a table."""

from typing import Final

import msgspec

from headrace.cli.render import console, safe, table
from headrace.schemas.config import TenantConfig

__all__ = ["ListedKey", "ListedTenant", "listed_tenant", "print_tenants"]

_ALL: Final = "-"


class ListedKey(msgspec.Struct, frozen=True):
    """A key as it is listed."""

    name: str
    id: str


class ListedTenant(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant as it is listed; None is no limit, no pool of its own, and for `models` all of them."""

    tenant: str
    weight: float
    max_in_flight: int | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    pool: str | None
    models: tuple[str, ...] | None
    keys: tuple[ListedKey, ...]


def listed_tenant(name: str, entry: TenantConfig) -> ListedTenant:
    """A tenant as it is listed."""
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


def print_tenants(listed: list[ListedTenant]) -> None:
    """A table of them."""
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
