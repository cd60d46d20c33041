"""Exact prompt counts for routers, before anything is stored, where an estimate leaves a doubt."""

from headrace.bus.connection import Bus
from headrace.bus.services import Endpoint, IncomingRequest, refuse, reply_with
from headrace.errors import EngineError, EngineRequestError
from headrace.schemas.openai import OPERATIONS, Operation, RequestLimits, parse_request
from headrace.schemas.refusals import Refusal
from headrace.schemas.subjects import WORKER_GROUP
from headrace.schemas.workers import TokenCount
from headrace.worker.engines.base import Engine

__all__ = ["tokenize_endpoint"]

_HDR_OP = "Headrace-Op"


def tokenize_endpoint(bus: Bus, model: str, engine: Engine) -> Endpoint:
    """An endpoint that counts the prompt tokens of a request body by the engine's tokenizer."""

    async def handle(request: IncomingRequest) -> None:
        op = _operation(request)
        if op is None:
            await refuse(bus, request, Refusal(code="invalid_value", message="the operation is not known", param="op"))
            return
        parsed = parse_request(op, request.data, limits=RequestLimits())
        if isinstance(parsed, Refusal):
            await refuse(bus, request, parsed)
            return
        try:
            count = await engine.count_prompt_tokens(parsed)
        except EngineRequestError as error:
            await refuse(bus, request, error.refusal)
            return
        except EngineError:
            await refuse(bus, request, Refusal(code="engine_error", message="the engine cannot count tokens now"))
            return
        facts = engine.facts
        answer = TokenCount(
            num_prompt_tokens=count,
            max_model_len=facts.max_model_len,
            kv_capacity_tokens=facts.kv_capacity_tokens,
        )
        await reply_with(bus, request, answer)

    return Endpoint(name="tokenize", subject=bus.names.tokenize(model), handler=handle, queue_group=WORKER_GROUP)


def _operation(request: IncomingRequest) -> Operation | None:
    op = request.headers.get(_HDR_OP, "chat")
    return next((known for known in OPERATIONS if known == op), None)
