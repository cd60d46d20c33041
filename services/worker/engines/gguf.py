"""What a GGUF file says of the memory that its model takes."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final

from headrace.discipline.capacity import bytes_per_token
from headrace.errors import EngineStartError
from headrace.worker.memory import Memory

__all__ = ["kv_bytes_per_token", "read_numbers", "require_fit"]

_MAGIC: Final = b"GGUF"
_STRING, _ARRAY = 8, 9
_NUMBERS: Final = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""Types of values, by their number in the format."""
_MAX_KEYS: Final = 4096
_MAX_ITEMS: Final = 1 << 20
_MAX_BYTES: Final = 1 << 24
_CACHE_DTYPE_BYTES: Final = 2
"""llama.cpp's cache has 16-bit numbers unless told otherwise."""


def read_numbers(path: Path) -> dict[str, int]:
    """The whole numbers of its metadata by their keys without the architecture's name; of an array the largest.

    Follows the specification of GGUF, versions 2 and 3 (ggml, docs/gguf.md). Empty where the file is of another format
    or cut off.
    """
    numbers: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            magic, _, _, num_keys = struct.unpack("<4sIQQ", _taken(file, 24))
            if magic != _MAGIC:
                return {}
            for _ in range(min(num_keys, _MAX_KEYS)):
                key = _taken(file, _number(file, "<Q")).decode(errors="replace")
                value = _value(file, _number(file, "<I"))
                if value is not None:
                    numbers[key.partition(".")[2]] = value
    except (OSError, struct.error):
        return numbers
    return numbers


def kv_bytes_per_token(numbers: Mapping[str, int]) -> int | None:
    """Bytes of one token in llama.cpp's KV cache; None where the metadata does not tell."""
    layers, heads = numbers.get("block_count"), numbers.get("attention.head_count")
    if not layers or not heads:
        return None
    kv_heads = numbers.get("attention.head_count_kv", heads)
    head_dim = numbers.get("attention.key_length") or numbers.get("embedding_length", 0) // heads
    return bytes_per_token(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype_bytes=_CACHE_DTYPE_BYTES) or None


def require_fit(path: Path, *, num_tokens: int, memory: Memory | None) -> None:
    """Raises EngineStartError where the weights and so many tokens of KV cache take more than is free.

    Otherwise the system would swap, or end some process, perhaps not this one. What is not told is not refused.
    """
    token_bytes = kv_bytes_per_token(read_numbers(path))
    if memory is None or token_bytes is None:
        return
    weights_bytes, cache_bytes = path.stat().st_size, num_tokens * token_bytes
    if weights_bytes + cache_bytes > memory.free_bytes:
        raise EngineStartError(
            f"{path.name} does not fit: its weights take {_mib(weights_bytes)} and {num_tokens} tokens of KV cache "
            f"(option n_ctx) {_mib(cache_bytes)}, and of this machine's memory {_mib(memory.free_bytes)} are free"
        )


def _value(file: BinaryIO, kind: int) -> int | None:
    if kind == _STRING:
        _taken(file, _number(file, "<Q"))
        return None
    if kind != _ARRAY:
        value: object = _number(file, _NUMBERS.get(kind, ""))
        return value if isinstance(value, int) and not isinstance(value, bool) else None
    item_kind, num_items = _number(file, "<I"), _number(file, "<Q")
    if num_items > _MAX_ITEMS:
        raise struct.error("an array that is too long")
    values = [_value(file, item_kind) for _ in range(num_items)]
    return max((value for value in values if value is not None), default=None)


def _number(file: BinaryIO, form: str) -> int:
    if not form:
        raise struct.error("a value of an unknown type")
    number: int = struct.unpack(form, _taken(file, struct.calcsize(form)))[0]
    return number


def _taken(file: BinaryIO, num_bytes: int) -> bytes:
    if num_bytes > _MAX_BYTES:
        raise struct.error("a text that is too long")
    taken = file.read(num_bytes)
    if len(taken) < num_bytes:
        raise struct.error("the file is cut off")
    return taken


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"
