"""Engines by name."""

from collections.abc import Mapping
from typing import Final

from headrace.errors import ConfigError
from headrace.worker.engines.base import Engine
from headrace.worker.engines.llama import LlamaEngine, LlamaOptions
from headrace.worker.engines.openai import OpenAIEngine, OpenAIOptions
from headrace.worker.engines.options import parse_options
from headrace.worker.engines.sim import SimEngine, SimOptions
from headrace.worker.engines.vllm import VllmEngine, VllmOptions

__all__ = ["ENGINES", "make_engine"]

ENGINES: Final = ("llama", "openai", "sim", "vllm")
"""Names `make_engine` knows."""


def make_engine(kind: str, model: str, options: Mapping[str, str]) -> Engine:
    """An engine, not yet started, with the options of its Struct as strings. Raises `ConfigError` naming the key."""
    if kind == "llama":
        return LlamaEngine(model, parse_options(kind, options, LlamaOptions))
    if kind == "openai":
        return OpenAIEngine(model, parse_options(kind, options, OpenAIOptions))
    if kind == "sim":
        return SimEngine(model, parse_options(kind, options, SimOptions))
    if kind == "vllm":
        return VllmEngine(model, parse_options(kind, options, VllmOptions))
    raise ConfigError(f"no engine {kind[:60]!r}; there are {', '.join(ENGINES)}")
