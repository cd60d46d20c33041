"""What running a job takes, by the engine's own tokenizer and limits: the guard of last resort before it runs."""

import logging

import msgspec

from headrace.errors import EngineBusyError, EngineError, EngineRequestError
from headrace.schemas.jobs import Job
from headrace.schemas.openai import (
    InferenceRequest,
    RequestLimits,
    num_kv_tokens_needed,
    parse_request,
    resolve_max_tokens,
)
from headrace.schemas.refusals import Refusal
from headrace.worker.engines.base import Engine
from headrace.worker.enginewatch import why_unhealthy

__all__ = ["NotNow", "Plan", "Planner"]

log = logging.getLogger(__name__)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Exact prompt tokens, new tokens at most, KV tokens to the last of them."""

    request: InferenceRequest
    num_prompt_tokens: int
    max_tokens: int
    need_tokens: int


class NotNow(msgspec.Struct, frozen=True):
    """The engine cannot say at the moment; the job goes back. `is_busy`: it has no room, nothing is wrong."""

    is_busy: bool


class Planner:
    """Plans jobs for one engine."""

    def __init__(self, engine: Engine, *, default_max_tokens: int) -> None:
        self._engine = engine
        self._default_max_tokens = default_max_tokens

    async def plan(self, job: Job) -> Plan | Refusal | NotNow:
        """What the job takes, or why it can never run, or that it must be asked again."""
        request = parse_request(job.op, job.body, limits=RequestLimits())
        if isinstance(request, Refusal):
            return request
        try:
            num_prompt_tokens = await self._engine.count_prompt_tokens(request)
        except EngineRequestError as error:
            return error.refusal
        except EngineBusyError:
            return NotNow(is_busy=True)
        except EngineError as error:
            log.warning("job %s: the engine cannot count its tokens: %s", job.job, error)
            if not await why_unhealthy(self._engine):  # then it is the request that it cannot take
                return Refusal(code="engine_error", message="the engine cannot read this request's prompt")
            return NotNow(is_busy=False)
        facts = self._engine.facts
        max_tokens = resolve_max_tokens(
            request,
            num_prompt_tokens=num_prompt_tokens,
            max_model_len=facts.max_model_len,
            default_max_tokens=self._default_max_tokens,
        )
        if isinstance(max_tokens, Refusal):
            return max_tokens
        need = num_kv_tokens_needed(num_prompt_tokens, max_tokens, request.n, facts.block_size)
        return Plan(request=request, num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens, need_tokens=need)
