"""Who may connect to a secured broker: its users by role, and the accounts they make in nats-server's configuration."""

import json
from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec

from headrace.bus import permissions
from headrace.bus.permissions import Permissions
from headrace.errors import ConfigError
from headrace.schemas.subjects import DEFAULT_POOL, DEFAULT_TENANT, Names, is_model_name, is_name, is_worker_id

__all__ = [
    "ACCOUNT",
    "GATEWAY",
    "HOST",
    "MONITOR",
    "NOTICES",
    "OPERATOR",
    "ROUTER",
    "STANDING",
    "SYSTEM_ACCOUNT",
    "TENANT",
    "Member",
    "Tls",
    "accounts",
    "as_text",
    "check",
]

ACCOUNT: Final = "HEADRACE"
"""The account that everything of a deployment is in."""
SYSTEM_ACCOUNT: Final = "SYS"

Role = Literal["operator", "router", "worker", "monitor", "notices", "gateway", "host", "tenant"]


class Member(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One user. `key` is the public one of its credential. A tenant's has `tenant`, a worker's the other three."""

    role: Role
    tenant: str = ""
    worker: str = ""
    model: str = ""
    pools: tuple[str, ...] = ()
    key: str = ""

    @property
    def name(self) -> str:
        """What its credentials file is called."""
        if self.role == "notices":
            return "monitor-system"
        identity = self.tenant or self.worker
        return f"{self.role}-{identity}" if identity else self.role

    def permissions(self, names: Names) -> Permissions:
        """What it may do."""
        match self.role:
            case "tenant":
                return permissions.tenant(names, self.tenant)
            case "worker":
                return permissions.worker(names, self.worker, self.model, self.pools or (DEFAULT_POOL,))
            case "router":
                return permissions.router(names)
            case "monitor":
                return permissions.monitor(names)
            case "notices":
                return permissions.notices()
            case "gateway":
                return permissions.gateway(names)
            case "host":
                return permissions.host(names)
            case "operator":
                return permissions.operator(names)


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """Files of the broker's certificate. With `ca`, clients may be asked for one of their own: `must_verify`."""

    cert: str
    key: str
    ca: str | None = None
    must_verify: bool = False


OPERATOR: Final = Member(role="operator")
ROUTER: Final = Member(role="router")
MONITOR: Final = Member(role="monitor")
NOTICES: Final = Member(role="notices")
GATEWAY: Final = Member(role="gateway")
HOST: Final = Member(role="host")
TENANT: Final = Member(role="tenant", tenant=DEFAULT_TENANT)

STANDING: Final = (
    OPERATOR,
    ROUTER,
    MONITOR,
    NOTICES,
    GATEWAY,
    HOST,
    TENANT,
)
"""Users that every deployment has."""


def check(member: Member) -> None:
    """Raise ConfigError for a name that cannot be."""
    if member.role == "tenant" and not is_name(member.tenant):
        raise ConfigError(f"--tenant is {member.tenant[:80]!r}; allowed: 1 to 40 of a-z 0-9 -")
    if member.role != "worker":
        return
    if not is_worker_id(member.worker):
        raise ConfigError(f"--worker is {member.worker[:80]!r}; allowed: 1 to 64 of A-Z a-z 0-9 _ -")
    if not is_model_name(member.model):
        raise ConfigError("--model: allowed are 1 to 100 bytes without control characters")
    for pool in member.pools:
        if not is_name(pool):
            raise ConfigError(f"--pool is {pool[:60]!r}; allowed: 1 to 40 of a-z 0-9 -")


def accounts(names: Names, members: Iterable[Member], tls: Tls | None) -> dict[str, Any]:
    """The part of nats-server's configuration that says who may do what; holds public keys, no secret."""
    ours: list[dict[str, Any]] = []
    system: list[dict[str, Any]] = []
    for member in members:
        user = {"nkey": member.key, "permissions": member.permissions(names).as_config()}
        (system if member.role == "notices" else ours).append(user)
    config: dict[str, Any] = {
        "accounts": {
            ACCOUNT: {"jetstream": "enabled", "users": ours},
            SYSTEM_ACCOUNT: {"users": system},
        },
        "system_account": SYSTEM_ACCOUNT,
    }
    if tls is not None:
        config["tls"] = {"cert_file": tls.cert, "key_file": tls.key}
        if tls.ca is not None:
            config["tls"] |= {"ca_file": tls.ca, "verify": tls.must_verify}
    return config


def as_text(config: dict[str, Any]) -> str:
    """A configuration in nats-server's syntax: JSON without the outer braces, so no value can break out of a string."""
    return "".join(
        f"{key}: {json.dumps(value, indent=2, ensure_ascii=False)}\n" for key, value in sorted(config.items())
    )
