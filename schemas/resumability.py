"""Whether another engine can take up an answer in the middle."""

from typing import Any, Final

from headrace.schemas.chat_messages import MEDIA_PARTS

__all__ = ["is_resumable"]

_CONSTRAINING: Final = frozenset(
    {
        "tools",
        "functions",
        "structured_outputs",
        "structural_tag",
        "grammar",
        "ebnf",
        "json_schema",
        "regex",
        "logprobs",
        "continue_final_message",
        "truncate_prompt_tokens",
    }
)
"""The state these keep (a grammar's position, a tool call half written, logprobs by position, where the prompt ends)
does not come back when an answer is continued from its text."""


def is_resumable(op: str, body: dict[str, Any]) -> bool:
    """Whether the answer to a validated body can be continued from its text or token ids alone.

    That takes one choice of unconstrained text. A chat must also have no media, which a prompt of token ids
    would lose, and must not end with the beginning of the answer (role `assistant`), which templates take once.
    """
    if op == "embeddings" or body.get("n", 1) != 1 or _is_constrained(body):
        return False
    if op == "completions":
        return True
    messages = body["messages"]
    return messages[-1]["role"] != "assistant" and not any(_has_media(message) for message in messages)


def _is_constrained(body: dict[str, Any]) -> bool:
    if body.get("response_format", {"type": "text"})["type"] != "text":
        return True
    if body.get("add_generation_prompt") is False:
        return True
    return any(
        (name in _CONSTRAINING or name.startswith("guided_")) and value is not False and value != []
        for name, value in body.items()
    )


def _has_media(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(part["type"] in MEDIA_PARTS for part in content)
