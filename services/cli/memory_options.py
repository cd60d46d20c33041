"""Options for an engine that allocates its KV cache as it goes, in the units in which people know them."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from headrace.discipline.capacity import bytes_per_token
from headrace.worker.modelconfig import KV_DTYPES, kv_bytes_per_token, read_model_config

__all__ = ["memory_options", "parse_size"]

_F = TypeVar("_F", bound=Callable[..., Any])

_SIZE: Final = re.compile(r"(\d{1,15})(B|KiB|MiB|GiB|TiB)?")
_UNITS: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_LAYOUT: Final = re.compile(r"(\d{1,5}),(\d{1,5}),(\d{1,5}),([1-8])")


def memory_options(function: _F) -> Callable[..., Any]:
    """Give the command these options as the argument `memory`: options of the engine, those that were given."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        size, layout, config = (kwargs.pop(name) for name in ("kv_bytes_per_token", "kv_layout", "model_config"))
        kv_dtype = kwargs.pop("kv_dtype")
        if sum(each is not None for each in (size, layout, config)) > 1:
            raise click.UsageError(
                "--kv-bytes-per-token, --kv-layout and --model-config say the same; give one of them"
            )
        if kv_dtype is not None and config is None:
            raise click.UsageError("--kv-dtype is only for --model-config")
        if config is not None:
            size = kv_bytes_per_token(read_model_config(Path(config)), kv_dtype=kv_dtype)
        told = {
            "kv_bytes_per_token": layout if size is None else size,
            "memory_reserve_bytes": kwargs.pop("memory_reserve"),
            "memory_device": kwargs.pop("memory_device"),
            "keeps_memory": kwargs.pop("keeps_memory") or None,
        }
        return function(*args, memory={key: value for key, value in told.items() if value is not None}, **kwargs)

    for option in reversed(_OPTIONS):
        wrapper = option(wrapper)
    return wrapper


def parse_size(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """Bytes of a size such as 4GiB; a callback for click."""
    found = _SIZE.fullmatch(text) if text is not None else None
    if text is not None and found is None:
        raise click.BadParameter(f"{text[:60]!r}: expected a number of {', '.join(_UNITS)}", ctx=ctx, param=param)
    return int(found[1]) * _UNITS[found[2] or "B"] if found is not None else None


def _parse_layout(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    found = _LAYOUT.fullmatch(text)
    size = 0
    if found is not None:
        layers, kv_heads, head_dim, dtype_bytes = (int(part) for part in found.groups())
        size = bytes_per_token(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype_bytes=dtype_bytes)
    if not size:
        raise click.BadParameter(
            f"{text[:60]!r}: expected LAYERS,KV_HEADS,HEAD_DIM,DTYPE_BYTES, such as 32,8,128,2", ctx=ctx, param=param
        )
    return size


_OPTIONS: Final = (
    click.option(
        "--kv-bytes-per-token", type=click.IntRange(1, 1 << 30), metavar="BYTES",
        help="For a server that allocates its KV cache as it goes: bytes of one token in it. Free memory bounds then.",
    ),
    click.option(
        "--kv-layout", metavar="LAYERS,KV_HEADS,HEAD_DIM,DTYPE_BYTES", callback=_parse_layout,
        help="The same from the model's configuration: 2 · layers · heads · dimension · bytes.",
    ),
    click.option(
        "--model-config", metavar="PATH",
        help="The same, computed from the model's config.json (the file, or the folder it is in).",
    ),
    click.option(
        "--kv-dtype", type=click.Choice(tuple(KV_DTYPES)), metavar="NAME",
        help="Type of the cache's numbers where it is not the model's, such as fp8; with --model-config.",
    ),
    click.option(
        "--memory-reserve", metavar="SIZE", callback=parse_size,
        help="Memory to leave free, such as 512MiB or 4GiB; default a tenth of all.",
    ),
    click.option(
        "--memory-device", metavar="DEVICE",
        help="Where it allocates: host, gpu (the only one visible), cuda:N, or a GPU's UUID or number.",
    ),
    click.option(
        "--keeps-memory", is_flag=True,
        help="It keeps what requests allocated when they end, and uses it for others (a caching allocator).",
    ),
)  # fmt: skip
