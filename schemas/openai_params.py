"""The parameters of OpenAI's request bodies: which are checked, refused, or ours and not the engine's.

Ranges are those OpenAI documents; `stop` takes more strings, as vLLM does. A name in none of these tables is an
engine's own (`top_k`, `min_p`, `ignore_eos`, …) and goes to the engine as it is, within bounds of number and size.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from headrace.schemas.chat_messages import check_messages
from headrace.schemas.json_bounds import INT64_MAX, INT64_MIN
from headrace.schemas.json_checks import (
    Check,
    anything,
    boolean,
    described,
    each,
    fields,
    integer,
    invalid,
    kind,
    mapping,
    number,
    one_of,
    or_null,
    schema_of,
    string,
    unsupported,
)
from headrace.schemas.refusals import Refusal

__all__ = ["INTEGERS", "OURS", "REFUSED", "TOKEN_LISTS", "body_schema", "check_parameters"]

MAX_TOKENS: Final = 2**31 - 1
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_LOGIT_BIASES: Final = 1_024
MAX_EMBEDDING_INPUTS: Final = 2_048
MAX_EXTRAS: Final = 64
MAX_EXTRA_NAME_CHARS: Final = 64
MAX_EXTRAS_BYTES: Final = 262_144

OURS: Final = frozenset(
    {"model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "best_of", "return_token_ids"}
)
"""Accepted from the client and never handed on: the worker sets its own for the engine."""

_REFUSED_EVERYWHERE: Final[Mapping[str, str]] = {
    "request_id": "name the job with the header Headrace-Id",
    "rid": "name the job with the header Headrace-Id",
    "priority": "choose a lane with the header Headrace-Priority (high, normal or low)",
    "prompt_logprobs": "it cannot be streamed",
    "use_beam_search": "it cannot be streamed",
    "n_predict": "use max_tokens",
    "max_new_tokens": "use max_tokens",
    "n_cmpl": "use n",
    "id_slot": "the queue decides where a request runs",
    "kv_transfer_params": "the queue decides where a request runs",
    "chat_template": "the template is the model's own",
    "prompt_embeds": "send the prompt as text or token ids",
    "audio": "answers are text",
}

REFUSED: Final[Mapping[str, Mapping[str, str]]] = {
    "chat": {**_REFUSED_EVERYWHERE, "prompt": "a chat has messages", "input": "a chat has messages"},
    "completions": {
        **_REFUSED_EVERYWHERE,
        "max_completion_tokens": "completions have max_tokens",
        "messages": "completions have a prompt; send messages as a chat",
        "input": "completions have a prompt",
        "echo": "put the prompt before the answer yourself",
        "suffix": "write the model's own fill-in-the-middle marks into the prompt",
    },
    "embeddings": {
        **_REFUSED_EVERYWHERE,
        "messages": "embeddings have an input",
        "prompt": "embeddings have an input",
    },
}
"""By operation, what is refused and what to do instead: parameters that would escape the token limit, the stream or
the queue if an engine saw them, or that an engine would silently ignore. Null, false and "" ask for nothing; they are
dropped.
"""


_ONE_STOP: Final = string(min_chars=1, max_chars=MAX_STOP_CHARS)
_STOPS: Final = each(_ONE_STOP, max_items=MAX_STOPS)


@described(anyOf=[schema_of(_ONE_STOP), schema_of(_STOPS)])
def _check_stop(value: Any, path: str) -> Refusal | None:
    return _ONE_STOP(value, path) if isinstance(value, str) else _STOPS(value, path)


_BIAS: Final = number(-100, 100)


@described(
    type="object",
    propertyNames={"pattern": "^[0-9]{1,10}$"},
    additionalProperties=schema_of(_BIAS),
    maxProperties=MAX_LOGIT_BIASES,
)
def _check_logit_bias(value: Any, path: str) -> Refusal | None:
    if refusal := mapping(value, path):
        return refusal
    if len(value) > MAX_LOGIT_BIASES:
        return invalid(path, f"must have at most {MAX_LOGIT_BIASES} entries, not {len(value)}")
    for token, bias in value.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            return invalid(path, "must have token ids as keys")
        if refusal := _BIAS(bias, f"{path}.{token}"):
            return refusal
    return None


_FORMAT: Final = fields({"type": one_of("text", "json_object", "json_schema", "structural_tag")})
_JSON_SCHEMA_FORMAT: Final = fields({"type": one_of("json_schema"), "json_schema": mapping})
_OTHER_FORMAT: Final = fields({"type": one_of("text", "json_object", "structural_tag")})


@described(anyOf=[schema_of(_JSON_SCHEMA_FORMAT), schema_of(_OTHER_FORMAT)])
def _check_response_format(value: Any, path: str) -> Refusal | None:
    if refusal := _FORMAT(value, path):
        return refusal
    return _JSON_SCHEMA_FORMAT(value, path) if value["type"] == "json_schema" else None


_CHECK_NAMED: Final = fields({"name": string(min_chars=1, max_chars=256)}, {"parameters": mapping})


_CHOICE_WORDS: Final = one_of("none", "auto", "required")
_CHOSEN_TOOL: Final = fields({"type": one_of("function"), "function": _CHECK_NAMED})
_CALL_WORDS: Final = one_of("none", "auto")


@described(anyOf=[schema_of(_CHOICE_WORDS), schema_of(_CHOSEN_TOOL)])
def _check_tool_choice(value: Any, path: str) -> Refusal | None:
    return _CHOICE_WORDS(value, path) if isinstance(value, str) else _CHOSEN_TOOL(value, path)


@described(anyOf=[schema_of(_CALL_WORDS), schema_of(_CHECK_NAMED)])
def _check_function_call(value: Any, path: str) -> Refusal | None:
    return _CALL_WORDS(value, path) if isinstance(value, str) else _CHECK_NAMED(value, path)


_TOKENS: Final = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKENS}, "minItems": 1}


def _check_tokens(value: list[Any], path: str) -> Refusal | None:
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= MAX_TOKENS:
        return None
    return invalid(path, "must be an array of token ids, all of them integers from 0")


@described(
    anyOf=[
        {"type": "string"},
        _TOKENS,
        {"type": "array", "items": {"anyOf": [{"type": "string"}, _TOKENS]}, "minItems": 1, "maxItems": 1},
    ]
)
def _check_prompt(value: Any, path: str) -> Refusal | None:
    if isinstance(value, str):
        return None
    if not isinstance(value, list):
        return invalid(path, f"must be a string or an array, not {kind(value)}")
    if not value:
        return invalid(path, "must not be empty")
    if not isinstance(value[0], str | list):
        return _check_tokens(value, path)
    if len(value) > 1:
        return unsupported(path, "a job has one prompt; send one request for each")
    return None if isinstance(value[0], str) else _check_tokens(value[0], f"{path}[0]")


_INPUT_TEXT: Final = string(min_chars=1)


@described(anyOf=[schema_of(_INPUT_TEXT), _TOKENS])
def _check_one_input(item: Any, path: str) -> Refusal | None:
    return _check_tokens(item, path) if isinstance(item, list) else _INPUT_TEXT(item, path)


_INPUTS: Final = each(_check_one_input, min_items=1, max_items=MAX_EMBEDDING_INPUTS)


@described(anyOf=[schema_of(_INPUT_TEXT), _TOKENS, schema_of(_INPUTS)])
def _check_input(value: Any, path: str) -> Refusal | None:
    if isinstance(value, str):
        return _INPUT_TEXT(value, path)
    if isinstance(value, list) and value and not isinstance(value[0], str | list):
        return _check_tokens(value, path)
    return _INPUTS(value, path)


_GENERATION: Final[Mapping[str, Check]] = {
    "model": string(max_chars=256),
    "max_tokens": integer(1, MAX_TOKENS),
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "seed": integer(INT64_MIN, INT64_MAX),
    "stop": _check_stop,
    "include_stop_str_in_output": boolean,
    "min_tokens": integer(0, MAX_TOKENS),
    "stream": boolean,
    "stream_options": fields({}, {"include_usage": boolean}),
    "logit_bias": _check_logit_bias,
    "response_format": _check_response_format,
    "user": string(),
    "service_tier": one_of("auto", "default", "flex", "priority", "scale"),
    "best_of": integer(1, MAX_TOKENS),
    "return_token_ids": boolean,
}

_CHECKS: Final[Mapping[str, Mapping[str, Check]]] = {
    "chat": {
        **_GENERATION,
        "messages": check_messages,
        "max_completion_tokens": integer(1, MAX_TOKENS),
        "logprobs": boolean,
        "top_logprobs": integer(0, 20),
        "tools": each(fields({"type": one_of("function"), "function": _CHECK_NAMED})),
        "tool_choice": _check_tool_choice,
        "parallel_tool_calls": boolean,
        "functions": each(_CHECK_NAMED),
        "function_call": _check_function_call,
        "reasoning_effort": string(max_chars=32),
        "modalities": each(one_of("text")),
        "chat_template_kwargs": mapping,
        "documents": each(anything),
        "continue_final_message": boolean,
        "add_generation_prompt": boolean,
    },
    "completions": {**_GENERATION, "prompt": _check_prompt, "logprobs": integer(0, 5)},
    "embeddings": {
        "model": string(max_chars=256),
        "input": _check_input,
        "encoding_format": one_of("float", "base64"),
        "dimensions": integer(1, MAX_TOKENS),
        "user": string(),
        "stream": boolean,
    },
}

_REQUIRED: Final = {"chat": "messages", "completions": "prompt", "embeddings": "input"}


INTEGERS: Final[Mapping[str, frozenset[str]]] = {
    op: frozenset({"n"} | {name for name, check in checks.items() if schema_of(check).get("type") == "integer"})
    for op, checks in _CHECKS.items()
}
"""By operation, the parameters that are integers."""

TOKEN_LISTS: Final = frozenset({"prompt", "input"})
"""Parameters that may be token ids."""


def body_schema(op: str, *, max_n: int) -> dict[str, Any]:
    """The JSON Schema of a body. What parameters must hold among each other it does not say; see `check_parameters`."""
    checks = {**_CHECKS[op], **({} if op == "embeddings" else {"n": integer(1, max_n)})}
    required = _REQUIRED[op]
    return {
        "type": "object",
        "required": ["model", required],
        "properties": {
            name: schema_of(check) if name in ("model", required) else or_null(schema_of(check))
            for name, check in checks.items()
        },
    }


def check_parameters(op: str, body: dict[str, Any], *, max_n: int) -> Refusal | None:
    """The first thing wrong with a body that has no null at its top level, or None."""
    refused, checks = REFUSED[op], _CHECKS[op]
    if _REQUIRED[op] not in body:
        return invalid(_REQUIRED[op], "is required")
    extras: dict[str, Any] = {}
    for name, value in body.items():
        if name in refused:
            if value is not False and value != "":
                return unsupported(name, refused[name])
        elif check := checks.get(name):
            if refusal := check(value, name):
                return refusal
        elif name == "n":
            if refusal := integer(1, max_n)(value, name):
                return refusal
        else:
            extras[name] = value
    return _check_extras(extras) or _TOGETHER[op](body)


def _check_extras(extras: dict[str, Any]) -> Refusal | None:
    if len(extras) > MAX_EXTRAS:
        return unsupported(next(iter(extras)), f"the body has more than {MAX_EXTRAS} unknown parameters")
    for name in extras:
        if len(name) > MAX_EXTRA_NAME_CHARS:
            return unsupported(name[:MAX_EXTRA_NAME_CHARS], "the name is too long")
    if extras and len(msgspec.json.encode(extras)) > MAX_EXTRAS_BYTES:
        return unsupported(next(iter(extras)), f"unknown parameters have more than {MAX_EXTRAS_BYTES} bytes")
    return None


def _check_generation(body: dict[str, Any]) -> Refusal | None:
    if "stream_options" in body and body.get("stream") is False:
        return invalid("stream_options", "is only allowed when stream is true")
    num_choices = body.get("n", 1)
    if body.get("best_of", num_choices) != num_choices:
        return unsupported("best_of", "choosing among answers cannot be streamed; use n")
    return None


def _check_chat(body: dict[str, Any]) -> Refusal | None:
    if refusal := _check_generation(body):
        return refusal
    if body.get("top_logprobs") and not body.get("logprobs"):
        return invalid("top_logprobs", "needs logprobs to be true")
    choice = body.get("tool_choice", "none")
    names = {tool["function"]["name"] for tool in body.get("tools", ())}
    if choice not in ("none", "auto") and not names:
        return invalid("tool_choice", "needs tools")
    if isinstance(choice, dict) and choice["function"]["name"] not in names:
        return invalid("tool_choice.function.name", "must be the name of one of the tools")
    return None


_TOGETHER: Final[Mapping[str, Callable[[dict[str, Any]], Refusal | None]]] = {
    "chat": _check_chat,
    "completions": _check_generation,
    "embeddings": lambda body: None,
}
