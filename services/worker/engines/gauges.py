"""Figures read from an engine's Prometheus text: live load, and how much its KV cache holds.

Names of vLLM's V1 engine and of llama.cpp's server. vLLM called the usage of its cache `gpu_cache_usage_perc` before it
called it `kv_cache_usage_perc`; some versions write both. With data parallelism vLLM has one line per engine: counts
and capacities add up, of the usage ratios the highest counts.
"""

import math
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from headrace.worker.engines.base import EngineUsage

__all__ = ["CACHE_CONFIG", "KV_USAGE", "KvFacts", "kv_facts_of", "steps_of", "usage_of_metrics"]

_LINE: Final = re.compile(r"^(vllm:[a-z_]+|llamacpp:[a-z_]+)(?:\{(.*)\})?\s+(\S+)", re.MULTILINE)
_LABEL: Final = re.compile(r'([a-zA-Z_]\w*)="([^"]*)"')
_RUNNING: Final = ("vllm:num_requests_running", "llamacpp:requests_processing")
_WAITING: Final = ("vllm:num_requests_waiting", "llamacpp:requests_deferred")
KV_USAGE: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""The usage of the KV cache by its name of today and the one before."""
_PREEMPTIONS: Final = ("vllm:num_preemptions_total", "vllm:num_preemptions")
CACHE_CONFIG: Final = "vllm:cache_config_info"
_STEPS: Final = (
    *KV_USAGE,
    *_PREEMPTIONS,
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:iteration_tokens_total_count",
)
"""What the engine core sends after a step. None of them changes while it computes nothing."""


class KvFacts(NamedTuple):
    """KV-cache tokens that requests can use, and the block they are given in."""

    capacity_tokens: int
    block_size: int


def usage_of_metrics(text: str) -> EngineUsage | None:
    """The live figures; None if the text has none of them."""
    running: list[float] = []
    waiting: list[float] = []
    usage: list[float] = []
    preemptions: list[float] = []
    for name, _, value in _samples(text):
        if name in _RUNNING:
            running.append(value)
        elif name in _WAITING:
            waiting.append(value)
        elif name in KV_USAGE:
            usage.append(value)
        elif name in _PREEMPTIONS:
            preemptions.append(value)
    if not running:
        return None
    return EngineUsage(
        num_running=int(sum(running)),
        num_waiting=int(sum(waiting)),
        kv_usage_ratio=max(usage) if usage else None,
        num_preemptions=int(sum(preemptions)) if preemptions else None,
    )


def steps_of(text: str) -> tuple[tuple[str, str, float], ...]:
    """Figures of vLLM that are other ones after every step of its engine core; empty if the text has none."""
    return tuple(sample for sample in _samples(text) if sample[0] in _STEPS)


def kv_facts_of(text: str) -> KvFacts | None:
    """`(num_gpu_blocks - 1) * block_size` of every engine, added up (one block is never given out).

    A model whose layers keep unlike caches gets less out of its blocks; where `kv_cache_size_tokens` says so, that less
    one block counts.
    """
    capacity_tokens = 0
    block_size = 0
    for name, labels, _ in _samples(text):
        if name != CACHE_CONFIG:
            continue
        found = dict(_LABEL.findall(labels))
        try:
            size, num_blocks = int(found["block_size"]), int(found["num_gpu_blocks"])
        except (KeyError, ValueError):
            continue
        told = found.get("kv_cache_size_tokens", "")
        tokens = min(num_blocks * size, int(told)) if told.isdigit() and int(told) else num_blocks * size
        capacity_tokens += max(0, tokens - size)
        block_size = max(block_size, size)
    return KvFacts(capacity_tokens, block_size) if capacity_tokens > 0 else None


def _samples(text: str) -> Iterator[tuple[str, str, float]]:
    for match in _LINE.finditer(text):
        try:
            value = float(match[3])
        except ValueError:
            continue
        if math.isfinite(value):
            yield match[1], match[2] or "", value
