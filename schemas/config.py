"""What operators configure of a running deployment: tenants, models with their pools, and aliases.

Each is one key of the config bucket, written by `headrace config apply` and followed live by routers (and by workers,
for weights and lending). Everything has a default; an empty configuration is a whole one.
"""

import functools
import hashlib
import math
from collections.abc import Iterable
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from headrace.schemas.keys import MAX_KEYS, ApiKey, owners_of
from headrace.schemas.openai import Operation
from headrace.schemas.replicas import ReplicaGroup
from headrace.schemas.subjects import DEFAULT_POOL, DEFAULT_QUEUE, is_model_name

__all__ = [
    "MAX_QUEUES",
    "AliasConfig",
    "AliasTarget",
    "Config",
    "ModelConfig",
    "PoolConfig",
    "PoolRule",
    "TenantConfig",
]

MAX_QUEUES: Final = 64
"""Queue names of a model at most. Each is a consumer per pool and lane, and the broker takes 1,000 a stream."""

Name = Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,40}\Z", description="1 to 40 of a-z 0-9 -")]
Weight = Annotated[float, Meta(ge=0.01, le=1000)]
Limit = Annotated[int, Meta(ge=1, le=1_000_000_000)]
PromptTokens = Annotated[int, Meta(ge=0, le=100_000_000)]


class TenantConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits and share of one tenant; key `tenants.<tenant>`. A configured tenant has a queue of its own.

    `weight` is its share of a lane against the other queues. `max_in_flight` bounds its queued and running requests of
    one model. The two others bound what is taken in during any 60 seconds; tokens are those a request may come to need,
    less what it turned out not to. `models` are the models and aliases it may name, None is all; an alias that it may
    name leads to its targets whether they are there or not. `pool` is where its requests go that no rule and no header
    sends elsewhere, at models that have such a pool for it. `keys` are those of the HTTP edge; in a file, None leaves
    them as they are.
    """

    weight: Weight = 1.0
    max_in_flight: Limit | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    pool: Name | None = None
    models: Annotated[tuple[str, ...], Meta(max_length=1000)] | None = None
    keys: Annotated[tuple[ApiKey, ...], Meta(max_length=MAX_KEYS)] | None = None

    def __post_init__(self) -> None:
        """Rules between keys. Raises ValueError."""
        for model in self.models or ():
            if not is_model_name(model):
                raise ValueError(
                    f"models has {model[:80]!r}, no model name; allowed: 1 to 100 bytes without control characters"
                )
        names = [key.name for key in self.keys or ()]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"keys has the name {twice!r} twice; allowed: each name once")

    def may_name(self, model: str) -> bool:
        """Whether it may use a model, or alias, of this name."""
        return self.models is None or model in self.models


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A group of workers that serves some of a model's requests.

    `lends_to` are pools whose requests its workers take while it has none of its own. `tenants` are those who may use
    it; None is everybody.
    """

    name: Name
    lends_to: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    tenants: Annotated[tuple[Name, ...], Meta(max_length=1000)] | None = None


class PoolRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Requests for which everything that is set holds go to `pool`. Prompt tokens are estimated, both bounds included.

    `header` is the value of Headrace-Pool. A request with that header is matched by rules with `header` only, one
    without it by the others only.
    """

    pool: Name
    op: Operation | None = None
    stream: bool | None = None
    min_prompt_tokens: PromptTokens | None = None
    max_prompt_tokens: PromptTokens | None = None
    tenant: Name | None = None
    header: Name | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for bounds that nothing can meet."""
        low, high = self.min_prompt_tokens, self.max_prompt_tokens
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_prompt_tokens is {low}; allowed: at most max_prompt_tokens ({high})")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How requests for a model are queued; key `models.<model, encoded>`. A configured model is known.

    The first rule that matches chooses the pool, else it is `default`, which always exists. `on_no_worker` says what
    becomes of a request while no worker is ready. `queue_limit` None is the setting of that name. `fallback` is a
    model or alias to use when this one cannot start a request in time. Of a model that is `paused` nothing is started:
    its requests wait. `instances` are the workers that host agents keep running, one group a pool at most.
    """

    pools: Annotated[tuple[PoolConfig, ...], Meta(max_length=16)] = ()
    rules: Annotated[tuple[PoolRule, ...], Meta(max_length=64)] = ()
    on_no_worker: Literal["queue", "refuse"] = "queue"
    queue_limit: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    fallback: str | None = None
    paused: bool = False
    instances: Annotated[tuple[ReplicaGroup, ...], Meta(max_length=17)] = ()

    def __post_init__(self) -> None:
        """Rules between keys. Raises ValueError."""
        names = [pool.name for pool in self.pools]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"pools has {twice!r} twice; allowed: each name once")
        known = {DEFAULT_POOL, *names}
        for rule in self.rules:
            if rule.pool not in known:
                raise ValueError(f"rules name the pool {rule.pool!r}; allowed: {', '.join(sorted(known))}")
        for pool in self.pools:
            for other in pool.lends_to:
                if other not in known or other == pool.name:
                    allowed = ", ".join(sorted(known - {pool.name}))
                    raise ValueError(f"lends_to of the pool {pool.name!r} is {other!r}; allowed: {allowed}")
        grouped = [group.pool for group in self.instances]
        for pool_name in grouped:
            if pool_name not in known:
                raise ValueError(f"instances name the pool {pool_name!r}; allowed: {', '.join(sorted(known))}")
            if grouped.count(pool_name) > 1:
                raise ValueError(f"instances have the pool {pool_name!r} twice; allowed: each once")
        if self.fallback is not None and not is_model_name(self.fallback):
            raise ValueError("fallback is no model name; allowed: 1 to 100 bytes without control characters")

    @property
    def pool_names(self) -> frozenset[str]:
        """Pools that exist by configuration."""
        return frozenset({DEFAULT_POOL, *(pool.name for pool in self.pools)})

    def pool(self, name: str) -> PoolConfig:
        """The pool's configuration; the defaults for one that is not configured."""
        return next((pool for pool in self.pools if pool.name == name), PoolConfig(name=name))

    def comes_up_for(self, pool: str) -> bool:
        """Whether the number of replicas of a pool may be 0 and rises from there when a request waits."""
        bounds = (group.autoscale for group in self.instances if group.pool == pool)
        return any(each is not None and each.min_replicas == 0 for each in bounds)

    def servers_of(self, pool: str) -> frozenset[str]:
        """Pools whose workers may run a request of `pool`: itself and those that lend to it."""
        return frozenset({pool, *(other.name for other in self.pools if pool in other.lends_to)})


class AliasTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model, or one version of it, and its share of the alias's requests; 0 takes it out."""

    model: str
    version: str | None = None
    weight: Annotated[float, Meta(ge=0, le=1000)] = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not is_model_name(self.name) or self.version == "":
            raise ValueError(f"{self.name[:80]!r} is no model name; allowed: 1 to 100 bytes without control characters")

    @property
    def name(self) -> str:
        """The name its workers serve."""
        return self.model if self.version is None else f"{self.model}@{self.version}"


class AliasConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A name that stands for one of several models; key `aliases.<alias, encoded>`. No target is an alias itself."""

    targets: Annotated[tuple[AliasTarget, ...], Meta(min_length=1, max_length=16)]

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not any(target.weight > 0 for target in self.targets):
            raise ValueError("targets have the weight 0 all; allowed: at least one above 0")
        names = [target.name for target in self.targets]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"targets has {twice!r} twice; allowed: each once")

    def choose(self, job: str) -> str:
        """The model for a job: always the same for the same id, and in proportion to the weights over many.

        Weighted rendezvous hashing (score -w / ln u): where weights change, only as many ids move as must.
        """
        return max(
            (target for target in self.targets if target.weight > 0),
            key=lambda target: (-target.weight / math.log(_uniform(job, target.name)), target.name),
        ).name


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything configured, at one moment.

    `owners` have a queue of their own; the other configured tenants share `shared`; `key_owners` are the tenants of the
    hashes of keys, and `has_keys` says whether there is any key. All of that is found here.
    """

    tenants: dict[str, TenantConfig] = {}
    models: dict[str, ModelConfig] = {}
    aliases: dict[str, AliasConfig] = {}
    owners: frozenset[str] = frozenset()
    shared: tuple[str, ...] = ()
    key_owners: dict[str, str] = {}
    has_keys: bool = False

    def __post_init__(self) -> None:
        """Find who owns and who shares once, for all requests."""
        others: Iterable[str] = (tenant for tenant in self.tenants if tenant != DEFAULT_QUEUE)
        ranked = sorted(others, key=lambda tenant: (self.tenants[tenant].max_in_flight is None, tenant))
        owners = ranked[: MAX_QUEUES - 1]
        sharing = (owner for owner in owners if self.tenants[owner].max_in_flight is None)
        msgspec.structs.force_setattr(self, "owners", frozenset(owners))
        msgspec.structs.force_setattr(self, "shared", (DEFAULT_QUEUE, *sharing))
        keys = owners_of({tenant: entry.keys or () for tenant, entry in self.tenants.items()})
        msgspec.structs.force_setattr(self, "key_owners", keys)
        msgspec.structs.force_setattr(self, "has_keys", any(entry.keys for entry in self.tenants.values()))

    def tenant(self, tenant: str) -> TenantConfig:
        """A tenant's configuration; the defaults, without limits, for one that is not configured."""
        return self.tenants.get(tenant, _ANY_TENANT)

    def model(self, model: str) -> ModelConfig:
        """A model's configuration; the defaults for one that is not configured."""
        return self.models.get(model, _ANY_MODEL)

    def resolve(self, model: str, job: str) -> str:
        """The model that a name stands for, for this job."""
        alias = self.aliases.get(model)
        return model if alias is None else alias.choose(job)

    def queue_of(self, tenant: str) -> str:
        """The queue a tenant's requests wait in.

        Its own where it is configured, else `default`. Of more than 63 configured tenants, those with `max_in_flight`
        come first, then by name; the rest share, by hash, the queues of tenants without `max_in_flight` and `default`.
        """
        if tenant in self.owners:
            return tenant
        is_shared = tenant not in self.tenants or tenant == DEFAULT_QUEUE
        return DEFAULT_QUEUE if is_shared else _shared_queue(tenant, self.shared)

    def weight_of(self, queue: str) -> float:
        """A queue's share of its lane: its tenant's weight, 1 for the shared queue."""
        return self.tenant(queue).weight


_ANY_TENANT: Final = TenantConfig()
_ANY_MODEL: Final = ModelConfig()


@functools.lru_cache(maxsize=4096)
def _shared_queue(tenant: str, shared: tuple[str, ...]) -> str:
    return min(shared, key=lambda queue: _uniform(tenant, queue))


def _uniform(*parts: str) -> float:
    """A number between 0 and 1, neither included, from a hash."""
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2**64
