"""How many tokens a prompt has, told from its text alone: a guess to plan with, and a bound that holds.

A byte-level BPE tokenizer never makes more tokens than the text has UTF-8 bytes, and makes about one per four bytes of
prose; chat templates add a few tokens around each message.
"""

from typing import Any, Final, NamedTuple

import msgspec

from headrace.schemas.chat_messages import MEDIA_PARTS

__all__ = ["PromptSize", "prompt_size"]

BYTES_PER_TOKEN: Final = 4
MESSAGE_TOKENS: Final = 4
"""What a template usually adds to each message."""
REPLY_TOKENS: Final = 3
"""What a template usually adds to open the answer."""
MEDIA_TOKENS: Final = 1_024
"""Guess for an image, a sound or a file; how many it really is depends on its pixels and the model."""

MESSAGE_TOKENS_BOUND: Final = 32
"""No template in common use puts more tokens around a message, its role name aside."""
OVERALL_TOKENS_BOUND: Final = 64
"""Begin-of-text marks, the opening of the answer, a short default system prompt."""
TOOLS_TOKENS_BOUND: Final = 512
"""The instructions a template writes around a list of tools."""
TOOLS_BYTES_FACTOR: Final = 2
"""Templates may print tools indented: at most about twice the compact form."""
MEDIA_TOKENS_BOUND: Final = 16_384
"""Largest number of tokens common vision models make of one image."""
INPUT_TOKENS_BOUND: Final = 8
"""Marks around each text that is embedded."""

_TEMPLATE_INPUTS: Final = ("tools", "functions", "documents", "chat_template_kwargs", "response_format")
"""Parameters of a chat, besides its messages, that a template may write into the prompt."""


class PromptSize(NamedTuple):
    """Numbers of prompt tokens: a guess, and a number the true one does not exceed. Both are at least 1."""

    estimate: int
    bound: int


def prompt_size(op: str, body: dict[str, Any]) -> PromptSize:
    """Size of a validated body's prompt. Lists of token ids are exact; images and other media are constants.

    The bound holds for byte-level BPE tokenizers and templates within the constants above.
    """
    match op:
        case "chat":
            return _chat_size(body)
        case "completions":
            return _text_size(body["prompt"], OVERALL_TOKENS_BOUND)
        case _:
            sizes = [_text_size(item, INPUT_TOKENS_BOUND) for item in _inputs(body["input"])]
            return PromptSize(sum(size.estimate for size in sizes), sum(size.bound for size in sizes))


def _chat_size(body: dict[str, Any]) -> PromptSize:
    messages = body["messages"]
    num_bytes = num_media = role_bytes = 0
    for message in messages:
        role_bytes += len(message["role"])
        content = message.get("content")
        if isinstance(content, str):
            num_bytes += _num_bytes(content)
        elif content is not None:
            for part in content:
                if part["type"] in MEDIA_PARTS:
                    num_media += 1
                else:
                    num_bytes += _num_bytes(part[part["type"]])
        if len(message) > 2 or "content" not in message:
            others = {name: value for name, value in message.items() if name not in ("role", "content")}
            num_bytes += len(msgspec.json.encode(others))
    extra_bytes = sum(len(msgspec.json.encode(body[name])) for name in _TEMPLATE_INPUTS if name in body)
    estimate = (
        _tokens(num_bytes + extra_bytes) + MESSAGE_TOKENS * len(messages) + REPLY_TOKENS + MEDIA_TOKENS * num_media
    )
    bound = (
        num_bytes
        + role_bytes
        + MESSAGE_TOKENS_BOUND * len(messages)
        + OVERALL_TOKENS_BOUND
        + MEDIA_TOKENS_BOUND * num_media
    )
    if extra_bytes:
        bound += TOOLS_BYTES_FACTOR * extra_bytes + TOOLS_TOKENS_BOUND
    return PromptSize(estimate, bound)


def _text_size(text: str | list[int], marks: int) -> PromptSize:
    if isinstance(text, list):
        return PromptSize(len(text), len(text))
    num_bytes = _num_bytes(text)
    return PromptSize(max(1, _tokens(num_bytes)), num_bytes + marks)


def _inputs(value: Any) -> list[Any]:
    if isinstance(value, str) or isinstance(value[0], int):
        return [value]
    return list(value)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _tokens(num_bytes: int) -> int:
    return -(-num_bytes // BYTES_PER_TOKEN)
