"""Prompt tokens counted by the engine's own tokenizer, chat template included."""

from collections.abc import Iterator
from typing import Any, Final

from headrace.errors import EngineError
from headrace.schemas.openai import InferenceRequest
from headrace.worker.engines.bodies import Dialect
from headrace.worker.engines.http import HttpAdapter, Target

__all__ = ["count_prompt_tokens", "prompt_token_ids"]

_TEMPLATE_KEYS: Final = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


async def count_prompt_tokens(
    http: HttpAdapter, target: Target, request: InferenceRequest, *, timeout_s: float
) -> int | None:
    """The exact number; None if the server has no tokenizer for us or will not count this request.

    Raises `EngineError` when the server does not answer or fails.
    """
    if target.dialect is Dialect.OTHER:
        return None
    if request.op == "chat":
        return await _count_chat(http, target, request.body, timeout_s)
    num_tokens = 0
    for prompt in _prompts(request):
        if not isinstance(prompt, str):
            num_tokens += len(prompt)
            continue
        counted = await _count_text(http, target, prompt, timeout_s)
        if counted is None:
            return None
        num_tokens += counted
    return num_tokens


async def prompt_token_ids(
    http: HttpAdapter, target: Target, request: InferenceRequest, *, timeout_s: float
) -> tuple[int, ...]:
    """The tokens of a request's one prompt as vLLM makes them; empty if it does not tell.

    Raises `EngineError` when the server does not answer or fails.
    """
    if request.op == "chat":
        asked = _template_of(request.body)
    elif isinstance(request.body.get("prompt"), list):
        return tuple(request.body["prompt"])
    else:
        asked = {key: request.body[key] for key in ("prompt", "add_special_tokens") if key in request.body}
    tokens = (await _post(http, "/tokenize", {"model": target.model, **asked}, timeout_s)).get("tokens")
    return tuple(tokens) if isinstance(tokens, list) and all(isinstance(each, int) for each in tokens) else ()


def _prompts(request: InferenceRequest) -> Iterator[str | list[int]]:
    """Each prompt of a completions or embeddings body: one or several, as text or as token ids."""
    prompts: Any = request.body.get("input" if request.op == "embeddings" else "prompt")
    is_one = isinstance(prompts, str) or (isinstance(prompts, list) and prompts and isinstance(prompts[0], int))
    yield from [prompts] if is_one else prompts or ()


async def _count_chat(http: HttpAdapter, target: Target, body: dict[str, Any], timeout_s: float) -> int | None:
    asked = _template_of(body)
    if target.dialect is Dialect.VLLM:
        return _count_of(await _post(http, "/tokenize", {"model": target.model, **asked}, timeout_s), "count")
    rendered = await _post(http, "/apply-template", asked, timeout_s)
    prompt = rendered.get("prompt")
    return await _count_text(http, target, prompt, timeout_s) if isinstance(prompt, str) else None


def _template_of(body: dict[str, Any]) -> dict[str, Any]:
    return {key: body[key] for key in _TEMPLATE_KEYS if body.get(key) is not None}


async def _count_text(http: HttpAdapter, target: Target, text: str, timeout_s: float) -> int | None:
    if target.dialect is Dialect.VLLM:
        return _count_of(await _post(http, "/tokenize", {"model": target.model, "prompt": text}, timeout_s), "count")
    asked = {"content": text, "add_special": True, "parse_special": True}
    return _count_of(await _post(http, "/tokenize", asked, timeout_s), "tokens")


def _count_of(reply: dict[str, Any], key: str) -> int | None:
    value = reply.get(key)
    if isinstance(value, list):
        return len(value)
    return value if isinstance(value, int) else None


async def _post(http: HttpAdapter, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """The server's answer; empty if it refuses. Generation says better why a request is refused than counting does."""
    reply = await http.post(path, body, timeout_s=timeout_s)
    if reply.status >= 500 and reply.status != 501:
        raise EngineError(f"the engine answered HTTP {reply.status} to {path}")
    answer = reply.json() if reply.status == 200 else {}
    return answer if isinstance(answer, dict) else {}
