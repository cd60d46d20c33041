"""Arguments of `vllm serve`, as a shell and vLLM's own parser read them."""

import re
import shlex
from collections.abc import Sequence
from typing import Final

from headrace.errors import ConfigError

__all__ = ["flags_of", "number_of", "value_of", "words_of"]

_NUMBER: Final = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)([kmgt])?|(\d{1,15})([KMGT])?")
_DECIMAL: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def words_of(option: str, text: str) -> list[str]:
    """The words of an option's text. Raises ConfigError naming the option."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"engine vllm: option {option}={text[:60]!r}: {error}") from None
    if option == "command" and not words:
        raise ConfigError("engine vllm: option command is empty")
    return words


def flags_of(words: Sequence[str]) -> set[str]:
    """The flags among arguments, long ones spelled with hyphens: vLLM takes underscores for them."""
    return {_name_of(word) for word in words if word.startswith("-")}


def value_of(flags: str | tuple[str, ...], argv: Sequence[str]) -> str | None:
    """The last value given for a flag, or for one of several names of it, as `--flag value` or `--flag=value`."""
    names = (flags,) if isinstance(flags, str) else flags
    found = None
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        if word.startswith("-") and _name_of(word) in names:
            _, is_joined, value = word.partition("=")
            found = value if is_joined else following
    return found


def number_of(text: str | None) -> int | None:
    """A number as vLLM reads it: `k`, `m`, `g`, `t` are powers of 1,000, in capitals of 1,024. None for others."""
    found = _NUMBER.fullmatch(text or "")
    if found is None:
        return None
    if found[3] is not None:
        return int(found[3]) * _BINARY[found[4] or ""]
    return int(float(found[1]) * _DECIMAL[found[2]]) if found[2] else int(found[1]) if found[1].isdigit() else None


def _name_of(word: str) -> str:
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name
