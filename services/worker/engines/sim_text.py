"""The text of the `sim` engine: every token is a pure function of seed, model, prompt, choice and place."""

import hashlib
from typing import Any, Final

from headrace.schemas.openai import InferenceRequest

__all__ = ["SimText", "num_prompt_tokens_of", "prompt_text", "sim_embedding"]

_TOKENS_PER_MESSAGE: Final = 4
_NUM_DIMENSIONS: Final = 8
_MASK: Final = (1 << 64) - 1
_TEXT: Final = (
    "water river stone wheel gate flow bank mill stream lock weir rain lake spring pool tide "
    "turns runs falls rises holds carries meets leaves follows crosses the a this every some one "
    "slow clear deep cold bright narrow wide quiet old new first last under over through along "
    "and then while where once again still here there down north south east west evening morning"
)
_WORDS: Final = tuple(_TEXT.split())


def prompt_text(request: InferenceRequest) -> str:
    """Every text of the prompt, one after another, without what earlier attempts produced."""
    key = {"chat": "messages", "completions": "prompt", "embeddings": "input"}[request.op]
    return " ".join(_texts(request.body.get(key)))


def num_prompt_tokens_of(request: InferenceRequest) -> int:
    """Words between white space, and 4 for each message; a list of token ids counts its ids."""
    if request.op == "chat":
        messages = request.body.get("messages")
        num_messages = len(messages) if isinstance(messages, list) else 0
        return len(prompt_text(request).split()) + _TOKENS_PER_MESSAGE * num_messages
    prompt = request.body.get("input" if request.op == "embeddings" else "prompt")
    return sum(1 if isinstance(text, int) else len(text.split()) for text in _leaves(prompt))


class SimText:
    """The tokens of one choice."""

    def __init__(self, *, seed: int, model: str, prompt: str, index: int) -> None:
        key = f"{seed}\0{model}\0{index}\0{prompt}".encode(errors="replace")
        self._base = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest())

    def token_id(self, place: int) -> int:
        """The token at `place` (from 0); ids are below the number of words."""
        mixed = (self._base + (place + 1) * 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        return (mixed ^ (mixed >> 31)) % len(_WORDS)

    def piece(self, place: int) -> str:
        """The token's text: a word, with a space before it unless it is the first."""
        word = _WORDS[self.token_id(place)]
        return f" {word}" if place else word


def sim_embedding(*, seed: int, model: str, text: str) -> list[float]:
    """A unit vector of 8 numbers."""
    key = f"{seed}\0{model}\0{text}".encode(errors="replace")
    raw = [byte / 127.5 - 1.0 for byte in hashlib.blake2b(key, digest_size=_NUM_DIMENSIONS).digest()]
    norm = sum(number * number for number in raw) ** 0.5
    return [round(number / norm, 6) for number in raw]


def _leaves(value: Any) -> list[str | int]:
    if isinstance(value, str | int):
        return [value]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaves(item)]
    return []


def _texts(value: Any) -> list[str]:
    """The texts of a prompt, an input, messages or their content parts; token ids as digits."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, int):
        return [str(value)]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    if isinstance(value, dict):
        return _texts(value.get("content", value.get("text")))
    return []
