"""What a vLLM server will take of each GPU's memory at the least, from its arguments and its model's folder."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.errors import ConfigError, EngineStartError
from headrace.worker.allotment import gib
from headrace.worker.checkpoint import weights_bytes
from headrace.worker.engines.vllm_args import flags_of, number_of, value_of
from headrace.worker.memory import Memory
from headrace.worker.modelconfig import KV_DTYPES, kv_bytes_per_token, read_model_config

__all__ = ["ANYWAY", "Demand", "demand_of", "require_fit"]

_UTILISATION: Final = "--gpu-memory-utilization"
_DEFAULT_UTILISATION: Final = 0.9
"""The least that any known version takes where nobody says: 0.9, later 0.92."""
_PARALLEL: Final = (
    ("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp"), ("--data-parallel-size", "-dp"),
)  # fmt: skip
_ELSEWHERE: Final = frozenset({
    "--config", "--nnodes", "--node-rank", "--data-parallel-rank", "--data-parallel-start-rank",
    "--data-parallel-size-local", "--data-parallel-address", "--data-parallel-backend", "--data-parallel-external-lb",
    "--data-parallel-hybrid-lb", "-dpn", "-dpr", "-dpl", "-dpa", "-dpb", "-dpe", "-dph",
})  # fmt: skip
"""Flags by which others may stand in a file, or the GPUs of the server not be the first of this machine."""
_CHANGES_WEIGHTS: Final = ("--quantization", "-q", "--cpu-offload", "--offload", "--load-format", "--hf-overrides")
_UNEVEN: Final = re.compile(r"sliding|chunk|mamba|ssm|hybrid|attn_(layer|type)|shared_layers|linear|layers_block_type")
"""Keys of models whose layers keep unlike caches: what a long request takes there is not known here."""
_LONGEST: Final = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_sequence_length",
    "max_seq_length", "seq_len",
)  # fmt: skip
"""Keys for the longest request of a model; vLLM takes the least."""
_MIN_TOKENS: Final = 16
ANYWAY: Final = "option memory_check=false starts it all the same"
"""What to do about a refusal that is wrong."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Of each of `num_gpus`: the share of its memory that vLLM may use, and of that the least it needs.

    `cache_bytes` are those of its longest request, or of one block where that is not known; `told_cache_bytes` is what
    the user gives to the cache, whatever the share. 0 stands for what is not known.
    """

    utilisation: float
    num_gpus: int
    num_tokens: int = 0
    weights_bytes: int = 0
    cache_bytes: int = 0
    told_cache_bytes: int = 0

    def share_bytes(self, memory: Memory) -> int:
        """What it will have taken once it is up."""
        if self.told_cache_bytes:
            return self.weights_bytes + self.told_cache_bytes
        return int(self.utilisation * memory.total_bytes)


def demand_of(argv: Sequence[str], folder: Path) -> Demand | None:
    """From the arguments after `serve`; None where they do not tell, since they stand in a file or are not vLLM's.

    Weights and cache are lower bounds: nothing is counted for what runs beside them, nor of a folder that cannot be
    read.
    """
    text = value_of(_UTILISATION, argv)
    sizes = [number_of(value_of(flags, argv) or "1") for flags in _PARALLEL]
    tensor, pipeline, data = sizes
    if flags_of(argv) & _ELSEWHERE or value_of("--distributed-executor-backend", argv) == "ray":
        return None
    try:
        utilisation = float(text) if text is not None else _DEFAULT_UTILISATION
    except ValueError:
        return None
    if not tensor or not pipeline or not data or not 0 < utilisation <= 1:
        return None
    known = Demand(
        utilisation=utilisation,
        num_gpus=tensor * pipeline * data,
        told_cache_bytes=number_of(value_of("--kv-cache-memory-bytes", argv)) or 0,
    )
    try:
        config = read_model_config(folder) if folder.is_dir() else None
    except ConfigError:
        config = None
    if config is None:
        return known
    config = {**config, **config["text_config"]} if isinstance(config.get("text_config"), Mapping) else config
    num_tokens, token_bytes = _num_tokens(config, argv), _token_bytes(config, argv)
    return msgspec.structs.replace(
        known,
        num_tokens=num_tokens,
        weights_bytes=_weights_bytes(config, argv, folder) // known.num_gpus,
        cache_bytes=num_tokens * token_bytes // (tensor * pipeline),
    )


def require_fit(demand: Demand, memory: Memory, device: str) -> None:
    """Raises EngineStartError, with what to set, where vLLM could not start, or not serve its longest request.

    That a share of all memory must be free at the start is what vLLM itself asks first (`request_memory` in
    vllm/v1/worker/utils.py), that the longest request must fit into its cache what it asks last.
    """
    wanted_bytes = int(demand.utilisation * memory.total_bytes)
    told = f"{_UTILISATION} {demand.utilisation:g} of the {gib(memory.total_bytes)} of {device} is {gib(wanted_bytes)}"
    if wanted_bytes > memory.free_bytes:
        most = memory.free_bytes * 100 // memory.total_bytes / 100
        raise EngineStartError(
            f"vLLM does not fit: {told}, and {gib(memory.free_bytes)} are free; set it to at most {most:g}, "
            f"or end what has the rest ({ANYWAY})"
        )
    if demand.told_cache_bytes:
        room_bytes, cache_bytes = memory.free_bytes, demand.told_cache_bytes
        told = f"of the {gib(memory.total_bytes)} of {device} {gib(room_bytes)} are free"
    else:
        room_bytes, cache_bytes = wanted_bytes, demand.cache_bytes
    tokens = f"{demand.num_tokens} tokens of KV cache {gib(demand.cache_bytes)}"
    if demand.weights_bytes + cache_bytes > room_bytes:
        cache = f"--kv-cache-memory-bytes {gib(cache_bytes)}" if demand.told_cache_bytes else tokens
        each = f" on each of {demand.num_gpus} GPUs" if demand.num_gpus > 1 else ""
        raise EngineStartError(
            f"the model does not fit: its weights take at least {gib(demand.weights_bytes)} and {cache}{each}, "
            f"and {told}; {_advice(demand)} ({ANYWAY})"
        )
    if demand.told_cache_bytes and demand.cache_bytes > cache_bytes:
        raise EngineStartError(
            f"the model does not fit: {tokens} do not go into --kv-cache-memory-bytes {gib(cache_bytes)}; "
            f"set that higher, or --max-model-len lower ({ANYWAY})"
        )


def _advice(demand: Demand) -> str:
    knobs = (
        "--kv-cache-memory-bytes lower" if demand.told_cache_bytes else f"{_UTILISATION} higher, --max-model-len lower"
    )
    return f"set {knobs} or --tensor-parallel-size higher, or take a smaller or quantized model"


def _weights_bytes(config: Mapping[str, Any], argv: Sequence[str], folder: Path) -> int:
    """As they are computed with: vLLM stores them in its own type, 16 bits where the model has 32 and nobody says."""
    if any(flag.startswith(_CHANGES_WEIGHTS) for flag in flags_of(argv)):
        return 0
    stored_bytes = weights_bytes(folder) or 0
    if config.get("quantization_config") is not None:
        return stored_bytes
    number, own = _number_bytes(config, argv), _dtype_bytes(config)
    return stored_bytes * number // own if own is not None else stored_bytes // 2


def _token_bytes(config: Mapping[str, Any], argv: Sequence[str]) -> int:
    told = value_of("--kv-cache-dtype", argv) or "auto"
    if told == "auto":
        told = {4: "float32", 2: "float16", 1: "fp8"}[
            1 if "quantization_config" in config else _number_bytes(config, argv)
        ]
    try:
        return kv_bytes_per_token(config, kv_dtype=told)
    except ConfigError:
        return 0


def _num_tokens(config: Mapping[str, Any], argv: Sequence[str]) -> int:
    is_sliding = config.get("use_sliding_window") is not False
    is_uneven = any(
        _UNEVEN.search(key) and value and (is_sliding or "sliding" not in key) for key, value in config.items()
    )
    text = value_of("--max-model-len", argv)
    told = [config.get(key) for key in _LONGEST] if text is None else [number_of(text)]
    known = [number for number in told if isinstance(number, int) and not isinstance(number, bool)]
    return _MIN_TOKENS if is_uneven else max(_MIN_TOKENS, min(known, default=0))


def _number_bytes(config: Mapping[str, Any], argv: Sequence[str]) -> int:
    """Bytes of one number as vLLM computes with it."""
    told = value_of("--dtype", argv) or "auto"
    return KV_DTYPES.get(told) or min(2, _dtype_bytes(config) or 2)


def _dtype_bytes(config: Mapping[str, Any]) -> int | None:
    return KV_DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."))
