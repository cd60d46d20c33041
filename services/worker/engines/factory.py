"""Engines by name; each is imported when it is asked for, so that no worker loads what others need."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from headrace.errors import ConfigError
from headrace.worker.engines.base import Engine
from headrace.worker.engines.options import parse_options

__all__ = ["ENGINES", "make_engine"]

ENGINES: Final = ("llama", "openai", "sim", "vllm")
"""Names `make_engine` knows."""


def make_engine(
    kind: str, model: str, options: Mapping[str, str], *, worker: str = "worker", shared_folder: Path | None = None
) -> Engine:
    """An engine, not yet started, with the options of its Struct as strings. Raises `ConfigError` naming the key.

    One that takes its memory at its start tells the `worker`'s neighbours so, in the tables in `shared_folder`.
    """
    if kind == "llama":
        from headrace.worker.engines.llama import LlamaEngine, LlamaOptions

        return LlamaEngine(model, parse_options(kind, options, LlamaOptions))
    if kind == "openai":
        from headrace.worker.engines.openai import OpenAIEngine, OpenAIOptions

        return OpenAIEngine(model, parse_options(kind, options, OpenAIOptions))
    if kind == "sim":
        from headrace.worker.engines.sim import SimEngine, SimOptions

        return SimEngine(model, parse_options(kind, options, SimOptions))
    if kind == "vllm":
        from headrace.worker.engines.vllm import VllmEngine, VllmOptions

        told = parse_options(kind, options, VllmOptions)
        return VllmEngine(model, told, worker=worker, shared_folder=shared_folder)
    raise ConfigError(f"no engine {kind[:60]!r}; there are {', '.join(ENGINES)}")
