"""Where a request waits: the model a name stands for, its pool by the model's rules, its tenant's queue. Pure."""

from headrace.schemas import subjects
from headrace.schemas.config import Config, ModelConfig, PoolRule
from headrace.schemas.openai import InferenceRequest
from headrace.schemas.refusals import Refusal
from headrace.schemas.subjects import DEFAULT_POOL, Lane, QueueName

__all__ = ["choose_pool", "choose_queue"]


def choose_queue(
    config: Config,
    model: str,
    request: InferenceRequest,
    *,
    tenant: str,
    header: str | None,
    lane: Lane,
    served: frozenset[str],
) -> QueueName | Refusal:
    """The queue of a request for `model`; refuses a pool that does not exist. `served` are pools with workers."""
    own = config.tenant(tenant).pool
    pool = choose_pool(config.model(model), request, tenant=tenant, header=header, served=served, own=own)
    return pool if isinstance(pool, Refusal) else QueueName(pool, lane, config.queue_of(tenant))


def choose_pool(
    model: ModelConfig,
    request: InferenceRequest,
    *,
    tenant: str,
    header: str | None,
    served: frozenset[str],
    own: str | None = None,
) -> str | Refusal:
    """The pool of the first rule that matches; else the one the header names, else the tenant's `own` where the model
    has it, else `default`.

    A pool reserved for other tenants is refused in the same words as one that does not exist.
    """

    def is_open(pool: str) -> bool:
        tenants = model.pool(pool).tenants
        return (pool in model.pool_names or pool in served) and (tenants is None or tenant in tenants)

    rule = next((rule for rule in model.rules if _matches(rule, request, tenant, header)), None)
    pool = rule.pool if rule is not None else header or (own if own is not None and is_open(own) else DEFAULT_POOL)
    if not is_open(pool):
        return Refusal(
            code="invalid_value",
            message=f"{subjects.HDR_POOL} names a pool that does not exist"
            if header is not None
            else "the request's pool does not exist for this tenant",
            param=subjects.HDR_POOL,
        )
    return pool


def _matches(rule: PoolRule, request: InferenceRequest, tenant: str, header: str | None) -> bool:
    num_prompt_tokens = request.num_prompt_tokens_estimate
    return (
        rule.header == header
        and rule.op in (None, request.op)
        and rule.stream in (None, request.stream)
        and rule.tenant in (None, tenant)
        and (rule.min_prompt_tokens is None or num_prompt_tokens >= rule.min_prompt_tokens)
        and (rule.max_prompt_tokens is None or num_prompt_tokens <= rule.max_prompt_tokens)
    )
