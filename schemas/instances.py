"""The instances bucket: who runs which replica of a model, what each host has room for, what the autoscaler decided.

Keys of hosts and slots live by a TTL, as heartbeats do: what is not renewed is gone, and may be had by another. Each is
written by compare-and-set on its revision.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.schemas.subjects import is_name, is_worker_id, model_to_token, token_to_model

__all__ = [
    "Device",
    "FailedGeneration",
    "GroupName",
    "HostBeat",
    "ProvenGeneration",
    "Scale",
    "Slot",
    "SlotName",
    "SlotState",
    "failed_key",
    "group_of_failed_key",
    "group_of_proven_key",
    "host_key",
    "host_of_key",
    "proven_key",
]

SlotState = Literal["Claimed", "Starting", "Ready", "Draining", "Failed"]


class GroupName(msgspec.Struct, frozen=True, order=True):
    """One group of replicas: a model's workers in one pool."""

    model: str
    pool: str

    @property
    def scale_key(self) -> str:
        """Key of what the autoscaler decided."""
        return f"scale.{model_to_token(self.model)}.{self.pool}"

    @classmethod
    def of_scale_key(cls, key: str) -> "GroupName | None":
        """The inverse of `scale_key`; None for another key."""
        match key.split("."):
            case ["scale", model, pool] if is_name(pool):
                return _named(model, pool)
        return None


class SlotName(msgspec.Struct, frozen=True, order=True):
    """One replica that may run, once at any time: number `index` (from 0) of a generation of a group."""

    group: GroupName
    generation: str
    index: int

    def __str__(self) -> str:
        return f"replica {self.index} of {self.group.model} ({self.group.pool}, {self.generation})"

    @property
    def key(self) -> str:
        """Key of the lease."""
        return f"slots.{model_to_token(self.group.model)}.{self.group.pool}.{self.generation}.{self.index}"

    @classmethod
    def of_key(cls, key: str) -> "SlotName | None":
        """The inverse of `key`; None for another key."""
        match key.split("."):
            case ["slots", model, pool, generation, index] if is_name(pool) and index.isascii() and index.isdecimal():
                group = _named(model, pool)
                return cls(group, generation, int(index)) if group is not None else None
        return None


def _named(token: str, pool: str) -> GroupName | None:
    try:
        return GroupName(token_to_model(token), pool)
    except ValueError:
        return None


def host_key(host: str) -> str:
    """Key of a host's beat."""
    return f"hosts.{host}"


def failed_key(group: GroupName, generation: str) -> str:
    """Key that stops a generation whose workers do not come up."""
    return f"failed.{model_to_token(group.model)}.{group.pool}.{generation}"


def proven_key(group: GroupName) -> str:
    """Key of the generation whose workers came up last."""
    return f"proven.{model_to_token(group.model)}.{group.pool}"


def host_of_key(key: str) -> str | None:
    """The inverse of `host_key`; None for another key."""
    match key.split("."):
        case ["hosts", host] if is_worker_id(host):
            return host
    return None


def group_of_failed_key(key: str) -> tuple[GroupName, str] | None:
    """The inverse of `failed_key`; None for another key."""
    match key.split("."):
        case ["failed", model, pool, generation] if is_name(pool):
            group = _named(model, pool)
            return (group, generation) if group is not None else None
    return None


def group_of_proven_key(key: str) -> GroupName | None:
    """The inverse of `proven_key`; None for another key."""
    match key.split("."):
        case ["proven", model, pool] if is_name(pool):
            return _named(model, pool)
    return None


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """A lease: which run (`epoch`) of which host's agent has it, and how far its worker is. `reason` says why it fails.

    `failures` counts the ends of its workers that nobody asked for, in a row. `device` is whose memory it was promised.
    """

    host: str
    epoch: str
    device: str = ""
    worker: str = ""
    state: SlotState = "Claimed"
    reason: str = ""
    failures: int = 0


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that workers share, bytes: a GPU by its UUID, or the `host`'s. `promised` is what its slots need of it."""

    name: str
    kind: Literal["gpu", "host"]
    total_bytes: int
    promised_bytes: int = 0


class HostBeat(msgspec.Struct, frozen=True, kw_only=True):
    """What a host agent says of itself, as often as `interval_s`; `is_draining`: it takes nothing more.

    `reason` says what it would run and no host has room for, or what failed here a moment ago.
    """

    host: str
    epoch: str
    devices: tuple[Device, ...] = ()
    num_slots: int = 0
    interval_s: float = 0.5
    is_draining: bool = False
    reason: str = ""
    version: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for a name that makes no key."""
        if not is_worker_id(self.host):
            raise ValueError(f"host is {self.host[:80]!r}; allowed: 1 to 64 of A-Z a-z 0-9 _ -")


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas the autoscaler wants, why, and since when: seconds since 1970 by the broker's clock.

    `idle_since` is when the group was first seen with so little work that one fewer would do, None while it has more,
    or has no more than its least. `seconds_per_job` and `slots` of a replica are what was measured last, for the time
    when no replica is there to be asked.
    """

    replicas: Annotated[int, Meta(ge=0, le=1000)]
    reason: str = ""
    decided_at: float = 0.0
    up_at: float = 0.0
    down_at: float = 0.0
    idle_since: float | None = None
    seconds_per_job: float | None = None
    slots: float | None = None


class FailedGeneration(msgspec.Struct, frozen=True, kw_only=True):
    """Why a generation is not tried again, until the configuration makes another or somebody removes this."""

    reason: str
    failures: int
    host: str = ""
    failed_at: float = 0.0


class ProvenGeneration(msgspec.Struct, frozen=True, kw_only=True):
    """The last generation of a group that had a worker ready: its failures say something of a host, not of itself."""

    generation: str
