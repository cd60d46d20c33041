"""The one response at the end: every piece of every attempt put together in OpenAI's form."""

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from headrace.schemas.chunks import ChoiceDelta, Usage, merge_choices
from headrace.schemas.openai import Operation

__all__ = ["ResponseAssembler"]

_RESPONSE_OBJECTS: Final = {"chat": "chat.completion", "completions": "text_completion"}


class ResponseAssembler:
    """Collects the deltas of a job, of all its attempts and in order, and renders the response.

    How the answer was cut into deltas changes nothing. Memory grows with the answer; pieces are joined when asked for.
    """

    def __init__(self, op: Operation) -> None:
        self._op = op
        self._pieces: dict[int, list[ChoiceDelta]] = {}
        self._num_tokens = 0
        self._finish_reasons: dict[int, str] = {}

    def add(self, choices: Iterable[ChoiceDelta]) -> None:
        """Take in the next deltas."""
        for choice in choices:
            self._pieces.setdefault(choice.index, []).append(choice)
            self._num_tokens += choice.num_tokens
            if choice.finish_reason:
                self._finish_reasons[choice.index] = choice.finish_reason

    @property
    def num_tokens(self) -> int:
        """New tokens so far, of all choices."""
        return self._num_tokens

    @property
    def finish_reasons(self) -> dict[int, str]:
        """Finish reason of each choice that has one."""
        return dict(self._finish_reasons)

    def is_complete(self, n: int) -> bool:
        """Whether each of `n` choices ended for a reason of its own; `abort` is none."""
        return all(self._finish_reasons.get(index, "abort") != "abort" for index in range(n))

    def choice(self, index: int = 0) -> ChoiceDelta:
        """All of one choice so far as a single delta; an empty one if nothing came yet."""
        pieces = self._pieces.get(index)
        if not pieces:
            return ChoiceDelta(index=index)
        if len(pieces) > 1:
            pieces[:] = merge_choices([pieces])
        return pieces[0]

    def text(self, index: int = 0) -> str:
        """Text of one choice so far."""
        return self.choice(index).text

    def response(self, *, id: str, created: int, model: str, usage: Usage) -> dict[str, Any]:
        """The OpenAI response object. `usage` is over all attempts: the prompt counts once."""
        write = _chat_choice if self._op == "chat" else _completions_choice
        return {
            "id": id,
            "object": _RESPONSE_OBJECTS[self._op],
            "created": created,
            "model": model,
            "choices": [write(self.choice(index)) for index in sorted(self._pieces)],
            "usage": msgspec.to_builtins(usage),
        }


def _chat_choice(choice: ChoiceDelta) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": choice.role or "assistant",
        "content": None if choice.tool_calls and not choice.text else choice.text,
    }
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type or "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in sorted(choice.tool_calls, key=lambda call: call.index)
        ]
    return {
        "index": choice.index,
        "message": message,
        "logprobs": choice.logprobs,
        "finish_reason": choice.finish_reason,
    }


def _completions_choice(choice: ChoiceDelta) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": choice.logprobs,
        "finish_reason": choice.finish_reason,
    }
