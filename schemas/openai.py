"""OpenAI request bodies, validated before anything is stored."""

from typing import Any, Final, Literal, get_args

import msgspec

from headrace.schemas.json_bounds import decode_object
from headrace.schemas.json_checks import invalid
from headrace.schemas.openai_params import INTEGERS, OURS, REFUSED, TOKEN_LISTS, check_parameters
from headrace.schemas.prompt_size import prompt_size
from headrace.schemas.refusals import Refusal
from headrace.schemas.resumability import is_resumable
from headrace.schemas.whole_numbers import with_whole_numbers

__all__ = [
    "COMPLETIONS_MAX_TOKENS",
    "OPERATIONS",
    "InferenceRequest",
    "Operation",
    "RequestLimits",
    "num_kv_tokens_needed",
    "parse_request",
    "resolve_max_tokens",
]

Operation = Literal["chat", "completions", "embeddings"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)

COMPLETIONS_MAX_TOKENS: Final = 16
"""New tokens of a completion that names no limit; OpenAI's default."""


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds a body must keep."""

    max_body_bytes: int = 900_000
    max_depth: int = 64
    max_n: int = 16


class InferenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request.

    `body` is what the engine is to be given: what the client sent, decoded, without nulls at its top level, without
    `model` and without what the worker decides (`stream`, `stream_options`, `max_tokens`, `max_completion_tokens`,
    `best_of`, `return_token_ids`). A `prompt` in it is a string or a flat list of token ids; where an integer is due it
    has one, also where `16.0` was sent; unknown parameters are kept.
    `max_tokens` is the client's own limit of new tokens, None if it set none.
    `num_prompt_tokens_estimate` is a guess from text length (needs no tokenizer); `num_prompt_tokens_bound`
    is never below the true number (see `prompt_size` for what that supposes).
    `is_resumable` says that another engine can go on in mid-answer (see `resumability`).
    `include_usage` is the client's `stream_options.include_usage`.
    """

    op: Operation
    body: dict[str, Any]
    stream: bool = True
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    num_prompt_tokens_estimate: int = 0
    num_prompt_tokens_bound: int = 0
    is_resumable: bool = True
    include_usage: bool = False


def parse_request(op: Operation, data: bytes, *, limits: RequestLimits) -> InferenceRequest | Refusal:
    """Validate one body. Total: any bytes give a request or a refusal, never an exception, in linear time.

    The refusal is about the first thing found wrong; its message is short and repeats no text of the body.
    """
    if op not in OPERATIONS:
        return invalid("op", f"must be one of {', '.join(OPERATIONS)}")
    decoded = decode_object(data, max_bytes=limits.max_body_bytes, max_depth=limits.max_depth)
    if isinstance(decoded, Refusal):
        return decoded
    sent = {name: value for name, value in decoded.items() if value is not None}
    sent = with_whole_numbers(sent, integers=INTEGERS[op], tokens=TOKEN_LISTS)
    if refusal := check_parameters(op, sent, max_n=limits.max_n):
        return refusal
    body = {name: value for name, value in sent.items() if name not in OURS and name not in REFUSED[op]}
    if op == "completions" and not isinstance(body["prompt"], str):
        body["prompt"] = _only_prompt(body["prompt"])
    size = prompt_size(op, body)
    if op == "embeddings":
        return InferenceRequest(
            op=op,
            body=body,
            stream=False,
            num_prompt_tokens_estimate=size.estimate,
            num_prompt_tokens_bound=size.bound,
            is_resumable=False,
        )
    stop = sent.get("stop", ())
    return InferenceRequest(
        op=op,
        body=body,
        stream=sent.get("stream", True),
        n=sent.get("n", 1),
        max_tokens=sent.get("max_completion_tokens", sent.get("max_tokens")),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        num_prompt_tokens_estimate=size.estimate,
        num_prompt_tokens_bound=size.bound,
        is_resumable=is_resumable(op, body),
        include_usage=sent.get("stream_options", {}).get("include_usage") is True,
    )


def _only_prompt(prompts: list[Any]) -> Any:
    return prompts if isinstance(prompts[0], int) else prompts[0]


def resolve_max_tokens(
    request: InferenceRequest, *, num_prompt_tokens: int, max_model_len: int | None, default_max_tokens: int
) -> int | Refusal:
    """New tokens to ask the engine for, or `context_length_exceeded` naming the model's maximum, prompt and limit.

    The request's own limit, else `default_max_tokens` for a chat and 16 for a completion, these two cut to what the
    model has room for; a client's own limit is never cut. `max_model_len` None: the engine does not tell, nothing is
    refused. Embeddings give 1: their inputs are sequences of their own, whose lengths the engine checks.
    """
    if request.op == "embeddings":
        return 1
    default = default_max_tokens if request.op == "chat" else COMPLETIONS_MAX_TOKENS
    if max_model_len is None:
        return default if request.max_tokens is None else request.max_tokens
    room = max_model_len - num_prompt_tokens
    if room >= 1 and request.max_tokens is None:
        return min(default, room)
    if request.max_tokens is not None and request.max_tokens <= room:
        return request.max_tokens
    prompt = "messages" if request.op == "chat" else "prompt"
    wanted = "at least 1" if request.max_tokens is None else str(request.max_tokens)
    return Refusal(
        code="context_length_exceeded",
        message=f"The model's maximum context length is {max_model_len} tokens, but the prompt has "
        f"{num_prompt_tokens} and {wanted} new were asked for. Shorten the {prompt} or lower max_tokens.",
        param=prompt if room < 1 else "max_tokens",
    )


def num_kv_tokens_needed(num_prompt_tokens: int, max_tokens: int, n: int, block_size: int) -> int:
    """KV-cache tokens a request can come to hold, in whole blocks, for all its `n` choices.

    The last new token is sampled but never stored, hence the minus one.
    """
    num_blocks = -(-(num_prompt_tokens + max_tokens - 1) // block_size)
    return n * num_blocks * block_size
