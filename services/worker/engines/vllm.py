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
from headrace.worker.engines.openai import OpenAIEngine, OpenAIOptions, no_capacity
from headrace.worker.engines.options import PositiveInt, Seconds
from headrace.worker.engines.processes import Process, descendants, process_of
from headrace.worker.engines.served import ServedEngine

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

    def __post_init__(self) -> None:
        """Raises ConfigError for arguments that are ours to set, or that take away what is needed."""
        flags = _flags(_words("args", self.args))
        _words("command", self.command)
        for flag in flags:
            if flag in _OURS or flag.startswith("--ssl-"):
                raise ConfigError(f"engine vllm: option args: {flag} is set by the worker")
            if flag in _NEEDED:
                raise ConfigError(f"engine vllm: option args: {flag} takes away the capacity that the worker reads")
        if self.max_concurrency is not None and "--max-num-seqs" in flags:
            raise ConfigError("engine vllm: --max-num-seqs and max_concurrency: one of them, not both")


def serve_argv(model: str, options: VllmOptions, *, port: int) -> list[str]:
    """The command line: what the worker needs, then what the user says. Raises `EngineStartError` without vLLM."""
    command = _words("command", options.command)
    program = _found(command[0])
    own = _words("args", options.args)
    flags = _flags(own)
    argv = [program, *command[1:], "serve", options.model_path or model, "--served-model-name", model]
    argv += ["--host", "127.0.0.1", "--port", str(port)]
    if "--scheduling-policy" not in flags:
        argv += ["--scheduling-policy", "priority"]
    if "--max-num-seqs" not in flags:
        argv += ["--max-num-seqs", str(options.max_concurrency or _MAX_NUM_SEQS)]
    return argv + own


class VllmEngine(ServedEngine):
    """A vLLM server that lives and dies with this process, its engine core too; its death is `wait_died`."""

    def __init__(self, model: str, options: VllmOptions) -> None:
        super().__init__("vllm")
        self._model = model
        self._options = options
        self._core: list[Process] = []

    async def check_health(self) -> None:
        """By the server's word, by whether it computes, and by whether all its processes are there and may run."""
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
        """Its block pool is the capacity."""
        options = self._options
        self._core = []
        port = free_port()
        served = serve_argv(self._model, options, port=port)
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
                priority=_value_of("--scheduling-policy", served) == "priority",
                connect_s=options.connect_s,
                stall_s=options.stall_s,
                hang_s=options.hang_s,
                start_timeout_s=options.start_timeout_s,
            ),
            name="vllm",
        )
        await child.until(attached.start(), timeout_s=options.start_timeout_s)
        if attached.facts.kv_capacity_tokens is None:
            raise EngineStartError(no_capacity(attached.facts.version))
        below = await asyncio.to_thread(descendants, child.pid)
        self._core = [each for each in below if each.name.startswith(_CORE)]
        return attached.facts


def _words(option: str, text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"engine vllm: option {option}={text[:60]!r}: {error}") from None
    if option == "command" and not words:
        raise ConfigError("engine vllm: option command is empty")
    return words


def _flags(words: list[str]) -> set[str]:
    """The flags among arguments, spelled with hyphens: vLLM takes underscores for them."""
    return {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}


def _value_of(flag: str, argv: list[str]) -> str | None:
    """The last value given for a flag, as `--flag value` or `--flag=value`."""
    found = None
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        name, is_joined, value = word.partition("=")
        if name.replace("_", "-") == flag and word.startswith("--"):
            found = value if is_joined else following
    return found


def _max_num_seqs(argv: list[str]) -> int:
    value = _value_of("--max-num-seqs", argv) or ""
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
