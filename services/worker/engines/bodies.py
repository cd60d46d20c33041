"""What is sent to an OpenAI-compatible server for a request, first time or resumed."""

import enum
from typing import Any, Final

import msgspec

from headrace.errors import EngineRequestError
from headrace.schemas.openai import InferenceRequest
from headrace.schemas.refusals import Refusal
from headrace.worker.engines.base import Resume

__all__ = ["PATHS", "Dialect", "as_completion", "request_body", "stops_to_cut"]

PATHS: Final = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "embeddings": "/v1/embeddings"}
"""Path of each operation below the server's root."""

_OURS: Final = ("model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "stop", "priority")
_CHAT_ONLY: Final = frozenset(
    {
        "messages", "tools", "tool_choice", "functions", "function_call", "parallel_tool_calls", "response_format",
        "logprobs", "top_logprobs", "echo", "add_generation_prompt", "continue_final_message", "add_special_tokens",
        "chat_template", "chat_template_kwargs", "documents", "reasoning_effort", "include_reasoning",
    }
)  # fmt: skip
"""What a completion does not know, or takes for something else. Its part in the prompt is in the prompt's tokens."""


class Dialect(enum.StrEnum):
    """What a server understands beyond OpenAI's own parameters."""

    VLLM = "vllm"
    LLAMA = "llama"
    OTHER = "other"


def stops_to_cut(request: InferenceRequest) -> tuple[str, ...]:
    """Stop strings no text may show; none where the client asked the engine to leave them in."""
    return () if request.body.get("include_stop_str_in_output") is True else request.stop


def as_completion(request: InferenceRequest, prompt_token_ids: tuple[int, ...]) -> InferenceRequest:
    """A request to be resumed, as the completion that can go on after exactly the tokens it had.

    Its text alone would be split into tokens anew, and not always into the same ones.
    """
    kept = {key: value for key, value in request.body.items() if request.op != "chat" or key not in _CHAT_ONLY}
    return msgspec.structs.replace(request, op="completions", body={**kept, "prompt": list(prompt_token_ids)})


def request_body(
    request: InferenceRequest,
    *,
    model: str,
    dialect: Dialect,
    max_tokens: int,
    wants_token_ids: bool = False,
    priority: int = 0,
    resume: Resume | None = None,
) -> dict[str, Any]:
    """The body to post: the client's, with model, limit, stops and streaming set by us.

    Raises `EngineRequestError` (`not_resumable`) if there is text to go on after and no way to say so.
    """
    body = {key: value for key, value in request.body.items() if key not in _OURS}
    body["model"] = model
    if request.op == "embeddings":
        return body
    if resume is not None and (resume.text or resume.token_ids):
        _go_on(body, request, resume, dialect)
    body["max_tokens"] = max_tokens
    body["stream"] = True
    body["stream_options"] = {"include_usage": True}
    if request.stop:
        body["stop"] = list(request.stop)
    if wants_token_ids:
        body["return_token_ids"] = True
    if priority:
        body["priority"] = priority
    if dialect is Dialect.LLAMA:
        body["return_progress"] = True  # a long prompt is otherwise silent for as long as it is read
    return body


def _go_on(body: dict[str, Any], request: InferenceRequest, resume: Resume, dialect: Dialect) -> None:
    if request.n != 1:
        raise _not_resumable("an answer with more than one choice")
    if request.op == "completions":
        body["prompt"] = _longer_prompt(body.get("prompt"), resume, dialect)
        body.pop("echo", None)
        return
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not resume.text:
        raise _not_resumable("an answer without text")
    if isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
        raise _not_resumable("an answer whose beginning the client gave")
    body["messages"] = [*messages, {"role": "assistant", "content": resume.text}]
    body["continue_final_message"] = True
    body["add_generation_prompt"] = False


def _longer_prompt(prompt: Any, resume: Resume, dialect: Dialect) -> str | list[Any]:
    """Token ids where both halves have them (exact), else text after text; llama.cpp takes a list of both."""
    if resume.prompt_token_ids and resume.token_ids:
        return [*resume.prompt_token_ids, *resume.token_ids]
    if isinstance(prompt, str):
        return prompt + resume.text
    if isinstance(prompt, list) and resume.token_ids:
        return [*prompt, *resume.token_ids]
    if isinstance(prompt, list) and dialect is Dialect.LLAMA:
        return [*prompt, resume.text]
    raise _not_resumable("a prompt of token ids whose answer's ids are not known")


def _not_resumable(what: str) -> EngineRequestError:
    message = f"the attempt before was lost, and this engine cannot continue {what}"
    return EngineRequestError(Refusal(code="not_resumable", message=message))
