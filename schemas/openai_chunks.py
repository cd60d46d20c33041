"""OpenAI's stream chunks: the bytes of a `delta` event, written and read back without loss.

A worker that continues a job reads what earlier attempts wrote, so the form is exact both ways. Token ids stand in
each choice as `token_ids`, the name vLLM gives them.
"""

from typing import Any, Final

import msgspec

from headrace.schemas.chunks import ChoiceDelta, ToolCallDelta
from headrace.schemas.openai import Operation

__all__ = ["ChunkEncoder", "decode_chunk"]

_CHUNK_OBJECTS: Final = {"chat": "chat.completion.chunk", "completions": "text_completion", "embeddings": "list"}
"""An embeddings call has no chunks; its one answer is the response."""


class ChunkEncoder:
    """Writes the chunks of one attempt of one job.

    Id, type and name of a tool call are each written once per (choice, call), however often the engine repeats them:
    clients join what they get.
    """

    def __init__(self, op: Operation, *, id: str, created: int, model: str) -> None:
        self._write_choice = self._chat_choice if op == "chat" else _completions_choice
        self._head = {"id": id, "object": _CHUNK_OBJECTS[op], "created": created, "model": model}
        self._written: set[tuple[int, int, str]] = set()

    def encode(self, choices: tuple[ChoiceDelta, ...]) -> bytes:
        """One chunk. `num_tokens` is not in it: the event's headers carry it."""
        written = [self._write_choice(choice) for choice in choices]
        for choice_object, choice in zip(written, choices, strict=True):
            if choice.token_ids:
                choice_object["token_ids"] = choice.token_ids
        return msgspec.json.encode({**self._head, "choices": written})

    def _chat_choice(self, choice: ChoiceDelta) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if choice.role is not None:
            delta["role"] = choice.role
        if choice.text or choice.role is not None:
            delta["content"] = choice.text
        if choice.reasoning:
            delta["reasoning_content"] = choice.reasoning
        if choice.tool_calls:
            delta["tool_calls"] = [self._tool_call(choice.index, call) for call in choice.tool_calls]
        return {
            "index": choice.index,
            "delta": delta,
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
        }

    def _tool_call(self, choice_index: int, call: ToolCallDelta) -> dict[str, Any]:
        head: dict[str, str] = {}
        for field, value in (("id", call.id), ("type", call.type), ("name", call.name)):
            key = (choice_index, call.index, field)
            if value and key not in self._written:
                self._written.add(key)
                head[field] = value
        function = {"name": head.pop("name"), "arguments": call.arguments} if "name" in head else None
        return {"index": call.index, **head, "function": function or {"arguments": call.arguments}}


def _completions_choice(choice: ChoiceDelta) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": choice.logprobs,
        "finish_reason": choice.finish_reason,
    }


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str = ""


class _ToolCall(msgspec.Struct):
    index: int
    function: _Function
    id: str | None = None
    type: str | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[_ToolCall] = []


class _Choice(msgspec.Struct):
    index: int
    text: str = ""
    delta: _Delta | None = None
    logprobs: dict[str, Any] | None = None
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


_DECODER: Final = msgspec.json.Decoder(_Chunk)


def decode_chunk(data: bytes, *, num_tokens: int) -> tuple[ChoiceDelta, ...]:
    """The choices of a chunk that `ChunkEncoder` wrote; raises `msgspec.DecodeError` for anything else.

    `num_tokens` is the event's count for all its choices. A choice with token ids counts those; what is left over
    goes to the first choice without, so with several of them only the sum is right.
    """
    choices = [_read_choice(choice) for choice in _DECODER.decode(data).choices]
    left = num_tokens - sum(choice.num_tokens for choice in choices)
    for position, choice in enumerate(choices):
        if left > 0 and not choice.token_ids:
            choices[position] = msgspec.structs.replace(choice, num_tokens=left)
            break
    return tuple(choices)


def _read_choice(choice: _Choice) -> ChoiceDelta:
    delta = choice.delta or _Delta(content=choice.text)
    return ChoiceDelta(
        index=choice.index,
        role=delta.role,
        text=delta.content,
        reasoning=delta.reasoning_content,
        tool_calls=tuple(
            ToolCallDelta(
                index=call.index,
                id=call.id,
                type=call.type,
                name=call.function.name,
                arguments=call.function.arguments,
            )
            for call in delta.tool_calls
        ),
        logprobs=choice.logprobs,
        token_ids=choice.token_ids,
        num_tokens=len(choice.token_ids),
        finish_reason=choice.finish_reason,
    )
