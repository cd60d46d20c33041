"""What an engine produces, piece by piece, and how consecutive pieces become one."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import msgspec

__all__ = [
    "ChoiceDelta",
    "EngineChunk",
    "ToolCallDelta",
    "Usage",
    "merge_choices",
    "merge_logprobs",
    "merge_tool_calls",
]


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token counts in OpenAI's form."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, Any] | None = None


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one tool call; `id`, `type` and `name` come only in the first piece of an index."""

    index: int
    id: str | None = None
    type: str | None = None
    name: str | None = None
    arguments: str = ""


class ChoiceDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one choice gained: text (`content` in chat, `text` in completions) and what goes with it.

    `num_tokens` is the number of tokens it stands for: `len(token_ids)` where the engine gives ids,
    else 1 for a piece with any text or tool call, 0 for role-only and finish-only pieces.
    """

    index: int = 0
    role: str | None = None
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: dict[str, Any] | None = None
    token_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    finish_reason: str | None = None


class EngineChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of an engine's answer.

    `usage` comes with the last; `response` is the whole answer of an embeddings call.
    """

    choices: tuple[ChoiceDelta, ...] = ()
    usage: Usage | None = None
    prompt_token_ids: tuple[int, ...] = ()
    response: dict[str, Any] | None = None


def merge_choices(pieces: Iterable[Iterable[ChoiceDelta]]) -> tuple[ChoiceDelta, ...]:
    """Join what came after one another into one delta per choice, in the order the choices first appeared.

    Texts, arguments, token ids and logprobs are joined, `num_tokens` is summed, the last finish reason wins; of a
    role and of a tool call's id, type and name the first wins. Linear in the size of the pieces, and associative:
    merging merged pieces gives the same.
    """
    by_index: dict[int, list[ChoiceDelta]] = {}
    for choices in pieces:
        for choice in choices:
            by_index.setdefault(choice.index, []).append(choice)
    return tuple(group[0] if len(group) == 1 else _merge_group(group) for group in by_index.values())


def _merge_group(group: list[ChoiceDelta]) -> ChoiceDelta:
    return ChoiceDelta(
        index=group[0].index,
        role=next((choice.role for choice in group if choice.role is not None), None),
        text="".join([choice.text for choice in group]),
        reasoning="".join([choice.reasoning for choice in group]),
        tool_calls=merge_tool_calls(call for choice in group for call in choice.tool_calls),
        logprobs=merge_logprobs([choice.logprobs for choice in group if choice.logprobs is not None]),
        token_ids=tuple(chain.from_iterable(choice.token_ids for choice in group)),
        num_tokens=sum(choice.num_tokens for choice in group),
        finish_reason=next((choice.finish_reason for choice in reversed(group) if choice.finish_reason), None),
    )


def merge_tool_calls(calls: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """One delta per tool call, in the order the calls first appeared."""
    by_index: dict[int, list[ToolCallDelta]] = {}
    for call in calls:
        by_index.setdefault(call.index, []).append(call)
    return tuple(
        ToolCallDelta(
            index=index,
            id=next((call.id for call in group if call.id), None),
            type=next((call.type for call in group if call.type), None),
            name=next((call.name for call in group if call.name), None),
            arguments="".join([call.arguments for call in group]),
        )
        for index, group in by_index.items()
    )


def merge_logprobs(parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Join logprobs of consecutive tokens, key by key: lists are joined, of anything else the last non-null stays.

    Serves both of OpenAI's forms: chat (`content`, `refusal`) and completions (`tokens`, `token_logprobs`,
    `top_logprobs`, `text_offset`).
    """
    if not parts:
        return None
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if isinstance(value, list):
                held = merged.get(key)
                if isinstance(held, list):
                    held.extend(value)
                else:
                    merged[key] = list(value)
            elif value is not None or key not in merged:
                merged[key] = value
    return merged
