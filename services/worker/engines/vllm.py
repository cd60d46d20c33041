"""The `vllm` engine: `vllm serve` as a watched child, with the user's own arguments."""

import asyncio
import logging
import os
import shlex
import shutil
import sys
from pathlib import Path
from signal import SIGTERM
from typing import Final

import msgspec

from headrace.errors import ConfigError, EngineError, EngineStartError
from headrace.worker.engines.base import EngineFacts
from headrace.worker.engines.child import ServerChild, free_port
from headrace.worker.engines.openai import OpenAIEngine, OpenAIOptions
from headrace.worker.engines.options import PositiveInt, Seconds
from headrace.worker.engines.processes import Process, descendants, process_of
from headrace.worker.engines.served import ServedEngine
from headrace.worker.engines.vllm_args import flags_of, value_of, words_of
from headrace.worker.engines.vllm_demand import demand_of
from headrace.worker.engines.vllm_gpus import VllmGpus

__all__ = ["VllmEngine", "VllmOptions", "serve_argv"]

log = logging.getLogger(__name__)

_GUARD: Final = "headrace.worker.engines.vllm_guard"
_STOP_TIMEOUT_S: Final = 8.0
"""The guard's own grace for the server, and for killing what is left."""
_CORE: Final = "VLLM::"
"""How every process of vLLM but its server calls itself."""
_LOOK_S: Final = 0.1
_MAX_NUM_SEQS: Final = 256
"""Requests vLLM runs at once where nobody says: its own default on most devices, passed so that it is known."""
_OURS: Final = frozenset({"--host", "--port", "--uds", "--served-model-name", "--headless", "--api-key", "--model"})
_NEEDED: Final = frozenset({"--disable-log-stats"})


class VllmOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the `vllm` engine.

    `args` are arguments of `vllm serve`, as in a shell. `command` runs vLLM: a program on the path or a file, after
    others if need be (`taskset -c 0 /venv/bin/vllm`). `model_path` is the model's folder or name on its hub, if that is
    not the model's name here. `max_concurrency` becomes `--max-num-seqs`. `hang_s` is for how long the engine core
    may compute no step while it has work: more than the longest step, with a prompt read in it, can take.
    `memory_check`: a start that cannot fit into its GPUs is refused before it is tried.
    """

    model_path: str | None = None
    args: str = ""
    command: str = "vllm"
    kv_tokens: PositiveInt | None = None
    max_concurrency: PositiveInt | None = None
    connect_s: Seconds = 5.0
    stall_s: Seconds = 30.0
    hang_s: Seconds = 20.0
    start_timeout_s: Seconds = 900.0
    memory_check: bool = True

    def __post_init__(self) -> None:
        """Raises ConfigError for arguments that are ours to set, or that take away what is needed."""
        flags = flags_of(words_of("args", self.args))
        words_of("command", self.command)
        for flag in flags:
            if flag in _OURS or flag.startswith("--ssl-"):
                raise ConfigError(f"engine vllm: option args: {flag} is set by the worker")
            if flag in _NEEDED:
                raise ConfigError(f"engine vllm: option args: {flag} takes away the capacity that the worker reads")
        if self.max_concurrency is not None and "--max-num-seqs" in flags:
            raise ConfigError("engine vllm: --max-num-seqs and max_concurrency: one of them, not both")


def serve_argv(model: str, options: VllmOptions, *, port: int) -> list[str]:
    """The command line: what the worker needs, then what the user says. Raises `EngineStartError` without vLLM."""
    command = words_of("command", options.command)
    program = _found(command[0])
    own = words_of("args", options.args)
    flags = flags_of(own)
    argv = [program, *command[1:], "serve", options.model_path or model, "--served-model-name", model]
    argv += ["--host", "127.0.0.1", "--port", str(port)]
    if "--scheduling-policy" not in flags:
        argv += ["--scheduling-policy", "priority"]
    if "--max-num-seqs" not in flags:
        argv += ["--max-num-seqs", str(options.max_concurrency or _MAX_NUM_SEQS)]
    return argv + own


class VllmEngine(ServedEngine):
    """A vLLM server that lives and dies with this process, its engine core too; its death is `wait_died`."""

    def __init__(
        self, model: str, options: VllmOptions, *, worker: str = "worker", shared_folder: Path | None = None
    ) -> None:
        super().__init__("vllm")
        self._model = model
        self._options = options
        self._core: list[Process] = []
        self._gpus = VllmGpus(name=worker, shared_folder=shared_folder)

    async def stop(self) -> None:
        """End the child, generating or not, and leave its memory to others."""
        try:
            await super().stop()
        finally:
            self._gpus.release()

    async def check_health(self) -> None:
        """By the server's word, by whether it computes, and by whether all its processes are there and may run."""
        self._gpus.keep()
        if self._child is not None:
            self._child.check_alive()
            if why := self._ended():
                raise EngineError(why)
            for process in await asyncio.to_thread(descendants, self._child.pid):
                if process.is_stopped:
                    raise EngineError(f"{process.name} (process {process.pid}) of the vLLM server is stopped")
        await super().check_health()

    async def wait_died(self) -> str:
        """Also once a process of the engine core has ended, with the server alive and its streams still open."""
        dying = asyncio.ensure_future(super().wait_died())
        try:
            while True:
                await asyncio.wait({dying}, timeout=_LOOK_S)
                if dying.done():
                    return dying.result()
                if why := self._ended():
                    return why
        finally:
            dying.cancel()

    def _ended(self) -> str:
        """Which process of the engine core has ended; empty if none has."""
        for process in self._core:
            now = process_of(process.pid)
            if now is None or now.has_ended:
                return f"{process.name} (process {process.pid}) of the vLLM server ended"
        return ""

    async def _launch(self) -> EngineFacts:
        """Its block pool is the capacity. Refused where it does not fit into its GPUs."""
        options = self._options
        self._core = []
        port = free_port()
        served = serve_argv(self._model, options, port=port)
        if options.memory_check:
            await self._require_fit(served)
        log.info("starting %s", shlex.join(served))
        child = self._child = ServerChild(
            [sys.executable, "-P", "-m", _GUARD, *served],
            name="vLLM server",
            env={"VLLM_NO_USAGE_STATS": "1", **os.environ},
            on_line=lambda line: log.debug("vllm: %s", line),
            stop_timeout_s=_STOP_TIMEOUT_S,
            death_signal=SIGTERM,
        )
        await child.start()
        attached = self._attached = OpenAIEngine(
            self._model,
            OpenAIOptions(
                url=f"http://127.0.0.1:{port}",
                served_model=self._model,
                kv_tokens=options.kv_tokens,
                max_concurrency=_max_num_seqs(served),
                priority=value_of("--scheduling-policy", served) == "priority",
                connect_s=options.connect_s,
                stall_s=options.stall_s,
                hang_s=options.hang_s,
                start_timeout_s=options.start_timeout_s,
            ),
            name="vllm",
        )
        await child.until(attached.start(), timeout_s=options.start_timeout_s)
        if why := attached.lacking:
            raise EngineStartError(why)
        below = await asyncio.to_thread(descendants, child.pid)
        self._core = [each for each in below if each.name.startswith(_CORE)]
        self._gpus.settle()
        return attached.facts

    async def _require_fit(self, served: list[str]) -> None:
        folder = Path(self._options.model_path or self._model)
        demand = await asyncio.to_thread(demand_of, served, folder)
        if demand is None:
            log.info("whether vLLM fits into a GPU is not checked: its arguments do not say what it takes")
            return
        own = (word.partition("=") for word in words_of("command", self._options.command))
        environ = {**os.environ, **{name: value for name, _, value in own if name.startswith("CUDA_")}}
        await self._gpus.take(demand, environ)


def _max_num_seqs(argv: list[str]) -> int:
    value = value_of("--max-num-seqs", argv) or ""
    if not value.isdigit() or not int(value):
        raise ConfigError(f"engine vllm: --max-num-seqs is {value[:60]!r}; a number from 1 is needed")
    return int(value)


def _found(program: str) -> str:
    """The file that runs it: on the path, or beside this Python."""
    found = shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent))
    if found is None:
        raise EngineStartError(
            f"vLLM is not installed ({program!r} is not found): pip install vllm, or name its program (option command)"
        )
    return found
