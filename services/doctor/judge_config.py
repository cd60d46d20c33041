"""The live configuration: values that cannot be read, names that lead nowhere, limits that cannot work."""

from collections.abc import Iterator
from typing import Final

from headrace.doctor.facts import Facts, Known
from headrace.doctor.finding import Check, Finding, counted, listed
from headrace.schemas.config import MAX_QUEUES
from headrace.schemas.subjects import LANES

__all__ = ["judge_config"]

_MAX_CONSUMERS: Final = 1000
"""What nats-server lets a stream have by default."""
_APPLY: Final = "headrace config get, then headrace config apply FILE"


def judge_config(facts: Facts) -> Iterator[Finding]:
    """Findings about tenants, models and aliases; none where they could not be read."""
    if not isinstance(facts.entries, Known):
        return
    yield from _unreadable(facts)
    if isinstance(facts.beats, Known):
        yield from _aliases(facts)
        yield from _pools(facts)
    if isinstance(facts.stream_names, Known):
        yield from _fallbacks(facts)
        yield from _tenants(facts)
    yield from _limits(facts)


def _unreadable(facts: Facts) -> Iterator[Finding]:
    assert isinstance(facts.entries, Known)
    entries = facts.entries.value
    bad = {key: entry.problem for key, entry in entries.items() if entry.problem}
    if bad:
        key, problem = next(iter(bad.items()))
        yield Finding(
            id=Check.CONFIG_KEY,
            severity="error",
            found=f"{counted(len(bad), 'key')} of the configuration cannot be read: {listed(bad)} ({problem})",
            remedy=f"headrace config apply FILE with them set right, or nats kv del {facts.names.config_bucket} {key}",
        )
        return
    number = sum(entry.entry is not None for entry in entries.values())
    yield Finding(
        id=Check.CONFIG_KEY, severity="ok", found=f"{counted(number, 'key')} of the configuration, all readable"
    )


def _aliases(facts: Facts) -> Iterator[Finding]:
    served = {each.beat.model for each in facts.live}
    lost = [
        f"{alias} → {target.name}"
        for alias, entry in facts.config.aliases.items()
        for target in entry.targets
        if target.weight > 0 and target.name not in served and target.name not in facts.config.models
    ]
    if lost:
        yield Finding(
            id=Check.ALIAS_TARGET,
            severity="warning",
            found=f"aliases lead to models that nobody serves and that are not configured: {listed(lost)}",
            remedy=f"start a worker of the model, or give the target the weight 0: {_APPLY}",
        )


def _pools(facts: Facts) -> Iterator[Finding]:
    for model, config in facts.config.models.items():
        pools = {each.beat.pool for each in facts.live if each.beat.model == model}
        empty = sorted({rule.pool for rule in config.rules if not pools & config.servers_of(rule.pool)})
        if empty:
            yield Finding(
                id=Check.POOL,
                severity="warning",
                found=f"rules of model {model} send requests to pools without a worker: {listed(empty)}",
                remedy=f"headrace serve worker --engine ENGINE --model {model} --pool {empty[0]}",
            )
    known = {pool for config in facts.config.models.values() for pool in config.pool_names} | {"default"}
    lost = [
        f"{name} ({entry.pool})" for name, entry in facts.config.tenants.items() if entry.pool not in {None, *known}
    ]
    if lost:
        yield Finding(
            id=Check.POOL,
            severity="warning",
            found=f"the pools of these tenants are no model's: {listed(lost)}",
            remedy=_APPLY,
        )


def _fallbacks(facts: Facts) -> Iterator[Finding]:
    known = facts.models | facts.config.aliases.keys()
    lost = [
        f"{model} → {config.fallback}"
        for model, config in facts.config.models.items()
        if config.fallback is not None and config.fallback not in known
    ]
    if lost:
        yield Finding(
            id=Check.FALLBACK,
            severity="warning",
            found=f"fallbacks are no known model or alias: {listed(lost)}",
            remedy=f"start a worker of the model, or {_APPLY}",
        )


def _tenants(facts: Facts) -> Iterator[Finding]:
    known = facts.models | facts.config.aliases.keys()
    lost = [
        f"{tenant} ({model})"
        for tenant, config in facts.config.tenants.items()
        for model in config.models or ()
        if model not in known
    ]
    if lost:
        yield Finding(
            id=Check.TENANT_MODEL,
            severity="warning",
            found=f"tenants may use models that do not exist: {listed(lost)}",
            remedy=f"start a worker of the model, or {_APPLY}",
        )


def _limits(facts: Facts) -> Iterator[Finding]:
    config, settings = facts.config, facts.settings
    troubles: list[str] = []
    limits = {
        stream.model: stream.info.config.get("max_msgs", -1) for stream in facts.streams if stream.info is not None
    }
    for model, of_model in config.models.items():
        limit = limits.get(model, -1)
        if of_model.queue_limit is not None and 0 <= limit < of_model.queue_limit:
            troubles.append(f"model {model} has a queue_limit of {of_model.queue_limit}, its stream takes {limit}")
        num_queues = min(MAX_QUEUES, len(config.tenants.keys() | {"default"}))
        num_consumers = len(of_model.pool_names) * len(LANES) * num_queues
        if num_consumers > _MAX_CONSUMERS:
            troubles.append(
                f"model {model} may come to need {num_consumers} consumers ({len(of_model.pool_names)} pools, "
                f"{len(LANES)} lanes, {num_queues} queues), and a stream has {_MAX_CONSUMERS}"
            )
    highest = max([settings.queue_limit, *(each.queue_limit or 0 for each in config.models.values())])
    for tenant, of_tenant in config.tenants.items():
        if of_tenant.max_in_flight is not None and of_tenant.max_in_flight > highest:
            troubles.append(
                f"tenant {tenant} may have {of_tenant.max_in_flight} requests in flight, and no model takes more than "
                f"{highest}"
            )
        tokens = of_tenant.tokens_per_minute
        if tokens is not None and tokens < settings.default_max_tokens:
            troubles.append(
                f"tenant {tenant} may use {tokens} tokens a minute, and a chat that names no limit needs "
                f"{settings.default_max_tokens} (HEADRACE_DEFAULT_MAX_TOKENS), so each is refused"
            )
    if troubles:
        yield Finding(
            id=Check.LIMITS,
            severity="warning",
            found=f"limits that cannot work: {listed(troubles)}",
            remedy=_APPLY,
        )
