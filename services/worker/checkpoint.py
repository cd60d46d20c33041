"""Bytes of a model's weights, from the files of its folder."""

from pathlib import Path
from typing import Any, Final

import msgspec

__all__ = ["weights_bytes"]

_INDEX: Final = "model.safetensors.index.json"
_MAX_INDEX_BYTES: Final = 64 << 20


class _Index(msgspec.Struct):
    """Which file has which tensor, as Hugging Face's transformers writes it."""

    weight_map: dict[str, str] = {}
    metadata: dict[str, Any] = {}


def weights_bytes(folder: Path) -> int | None:
    """At least so many, as they are stored: by the index and the sizes of its files, else by one file of all.

    None where the folder has no safetensors, or none that can be read.
    """
    try:
        index = folder / _INDEX
        if not index.is_file():
            return _size_of_all(folder)
        if index.stat().st_size > _MAX_INDEX_BYTES:
            return None
        found = msgspec.json.decode(index.read_bytes(), type=_Index)
        files = [folder / name for name in set(found.weight_map.values()) if Path(name).name == name]
        sizes = [file.stat().st_size for file in files if file.is_file()]
    except (OSError, msgspec.DecodeError, RecursionError):
        return None
    told = found.metadata.get("total_size")
    known = [told] if isinstance(told, int) and not isinstance(told, bool) and told > 0 else []
    if sizes and len(sizes) == len(files):
        known.append(sum(sizes))
    return min(known, default=None)


def _size_of_all(folder: Path) -> int | None:
    single = folder / "model.safetensors"
    return single.stat().st_size if single.is_file() else None
