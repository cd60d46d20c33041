"""Bytes of one token in the KV cache, from a model's own `config.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.discipline.capacity import bytes_per_token
from headrace.errors import ConfigError

__all__ = ["KV_DTYPES", "kv_bytes_per_token", "read_model_config"]

KV_DTYPES: Final = {
    "float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1,
}  # fmt: skip
"""Bytes of a number, by the names that models and engines have for its type."""
_MAX_BYTES: Final = 4 << 20
_MAX_FACTOR: Final = 1 << 20
_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
_HEAD_DIM: Final = ("head_dim", "kv_channels", "attention_head_dim")
_WITHOUT_CACHE: Final = frozenset({"linear_attention", "mamba", "recurrent", "conv"})
"""Types of layers whose state does not grow with the tokens."""


def read_model_config(path: Path) -> dict[str, Any]:
    """What stands in the file, or in the `config.json` of the folder. Raises ConfigError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        data = file.read_bytes()[: _MAX_BYTES + 1]
        config = msgspec.json.decode(data, type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is no model's configuration: {error}") from None
    return config


def kv_bytes_per_token(config: Mapping[str, Any], *, kv_dtype: str | None = None) -> int:
    """2 · layers · KV heads · head dimension · bytes of a number, all layers together.

    The keys are those of Hugging Face's transformers (`PretrainedConfig`) in today's and older spellings. A model
    without KV heads of its own has as many as heads (multi-head attention), one with `multi_query` one; without a head
    dimension that is hidden size / heads. Models with latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)
    cache `kv_lora_rank + qk_rope_head_dim` numbers a layer in place of keys and values. Layers with a window count as
    if they had none, for a short prompt takes as much there; layers with a state of fixed size count nothing.
    `kv_dtype` is the engine's, where it is not the model's. Raises ConfigError naming what is missing.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**config, **text}
    layers = _num_cached_layers(config)
    dtype_bytes = _dtype_bytes(config, kv_dtype)
    rank = _found(config, "kv_lora_rank")
    if rank is not None:
        return layers * (rank + _needed(config, "qk_rope_head_dim")) * dtype_bytes
    heads = _needed(config, *_HEADS)
    head_dim = _found(config, *_HEAD_DIM)
    if head_dim is None:
        head_dim = max(1, _needed(config, *_HIDDEN) // heads)
    return bytes_per_token(
        layers=layers, kv_heads=_num_kv_heads(config, heads), head_dim=head_dim, dtype_bytes=dtype_bytes
    )


def _num_cached_layers(config: Mapping[str, Any]) -> int:
    types = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(types, list) and types and all(isinstance(each, str) for each in types):
        num_cached = sum(each not in _WITHOUT_CACHE for each in types)
        if not num_cached:
            raise ConfigError("the model's configuration has no layer with a KV cache")
        return num_cached
    return _needed(config, *_LAYERS)


def _num_kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("multi_query") is True and config.get("new_decoder_architecture") is not True:
        return 1
    found = _found(config, *_KV_HEADS)
    return heads if found is None else found


def _dtype_bytes(config: Mapping[str, Any], told: str | None) -> int:
    name = told or config.get("dtype") or config.get("torch_dtype")
    if name is None:
        raise ConfigError("the model's configuration has no dtype; tell the cache's by --kv-dtype")
    size = KV_DTYPES.get(str(name).removeprefix("torch."))
    if size is None:
        raise ConfigError(f"dtype {str(name)[:40]!r} is not known; known: {', '.join(KV_DTYPES)}")
    return size


def _found(config: Mapping[str, Any], *keys: str) -> int | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MAX_FACTOR:
            return value
        if value is not None:
            raise ConfigError(f"the model's configuration has {key} = {str(value)[:40]}; expected a number above 0")
    return None


def _needed(config: Mapping[str, Any], *keys: str) -> int:
    found = _found(config, *keys)
    if found is None:
        raise ConfigError(f"the model's configuration has no {keys[0]}; give --kv-bytes-per-token")
    return found
