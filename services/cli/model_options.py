"""What `headrace models add` and `set` can say of a model's workers, checked as it is said."""

import functools
import math
import shlex
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, get_args

import click

from headrace.cli.memory_options import parse_size
from headrace.errors import ConfigError
from headrace.schemas.replicas import EngineName
from headrace.schemas.subjects import DEFAULT_POOL, is_name

__all__ = ["check_args", "pool_option", "worker_options"]

_F = TypeVar("_F", bound=Callable[..., Any])

_MIB: Final = 1 << 20
_WHOLE: Final = "whole"

_SET_BY_AGENT: Final = {
    "engine": "--engine",
    "model": "--model",
    "pool": "--pool",
    "worker_id": "--worker-id",
    "log_format": "--log-format",
    "nats_url": "--nats-url",
    "prefix": "--prefix",
    "state_dir": "--state-dir",
}
"""Flags of a worker that stand in its group, or are its host agent's own."""

_AUTOSCALE: Final = {
    "min_replicas": "--min-replicas",
    "max_replicas": "--max-replicas",
    "target_wait_s": "--target-wait",
    "idle_s": "--idle",
    "up_cooldown_s": "--up-cooldown",
    "down_cooldown_s": "--down-cooldown",
}


def worker_options(function: _F) -> Callable[..., Any]:
    """Give the command these options as `told`: fields of `ReplicaGroup` that were given, as a dictionary.

    Of them `autoscale` is a dictionary of what was given of it, `memory_mib` None for a whole device. Raises
    ConfigError.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        told = {name: value for name in ("engine", "replicas", "uses") if (value := kwargs.pop(name)) is not None}
        if (texts := kwargs.pop("args_texts")) != ():
            told["args"] = _split(texts)
        memory = kwargs.pop("memory")
        if memory is not None:
            told["memory_mib"] = None if memory == _WHOLE else memory
        bounds = {name: value for name in _AUTOSCALE if (value := kwargs.pop(name)) is not None}
        if bounds:
            told["autoscale"] = bounds
        return function(*args, told=told, **kwargs)

    for option in reversed(_OPTIONS):
        wrapper = option(wrapper)
    return wrapper


def check_args(engine: str, args: Sequence[str]) -> None:
    """Raise ConfigError where `headrace serve worker` would not take these flags, or others have the say on them."""
    from headrace.cli.serve import worker  # imports the engines

    context = click.Context(worker, info_name="headrace serve worker")
    try:
        given, _, _ = worker.make_parser(context).parse_args(list(args))
    except click.UsageError as error:
        raise ConfigError(f"--args: {error.format_message()}") from None
    for name, flag in _SET_BY_AGENT.items():
        if name in given:
            raise ConfigError(f"--args has {flag}, which is not said there: {_INSTEAD[name]}")
    asks_for_help = worker.get_help_option(context)
    if asks_for_help is not None and asks_for_help.name in given:
        raise ConfigError("--args has --help; see `headrace serve worker --help`")
    try:
        worker.make_context("headrace serve worker", ["--engine", engine, "--model", "m", *args])
    except click.UsageError as error:
        raise ConfigError(f"--args: {error.format_message()}") from None


_INSTEAD: Final = {
    "engine": "it is the option --engine of this command",
    "model": "it is NAME",
    "pool": "it is the option --pool of this command",
    "worker_id": "the host agent gives each worker its own",
    "log_format": "the host agent sets it",
    "nats_url": "workers use their host agent's broker",
    "prefix": "workers are of their host agent's deployment",
    "state_dir": "workers use their host agent's",
}


def _split(texts: Sequence[str]) -> list[str]:
    words: list[str] = []
    for text in texts:
        try:
            words += shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"--args {text[:80]!r}: {error}") from None
    return words


def _parse_memory(ctx: click.Context, param: click.Parameter, text: str | None) -> int | str | None:
    """MiB, rounded up."""
    if text == _WHOLE:
        return text
    size = parse_size(ctx, param, text)
    return math.ceil(size / _MIB) if size is not None else None


def _checked_pool(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and not is_name(value):
        raise click.BadParameter(f"{value[:60]!r}; allowed: 1 to 40 of a-z 0-9 -", ctx=ctx, param=param)
    return value


def pool_option(text: str, *, default: str | None = DEFAULT_POOL) -> Callable[[_F], _F]:
    """The pool that a command is about."""
    return click.option(
        "--pool", metavar="POOL", default=default, show_default=default is not None, callback=_checked_pool, help=text
    )


_OPTIONS: Final = (
    click.option("--engine", type=click.Choice(get_args(EngineName)), help="What computes the tokens."),
    click.option("--replicas", type=int, metavar="N", help="Workers to keep running."),
    click.option(
        "--args", "args_texts", multiple=True, metavar="TEXT",
        help="Flags of `headrace serve worker` for each of them, as in a shell; repeatable. "
        'Example: --args "--max-concurrency 32 -o model_path=/models/m"',
    ),
    click.option(
        "--memory", callback=_parse_memory, metavar="SIZE",
        help=f"Memory that one worker needs of its device, such as 20GiB; `{_WHOLE}` (default): a device of its own.",
    ),
    click.option("--uses", type=click.Choice(("gpu", "host")), help="Whose memory that is; default gpu."),
    click.option(
        "--min-replicas", type=int, metavar="N",
        help="Fewest workers, if their number follows the load; 0 lets the last one go; default 1.",
    ),
    click.option("--max-replicas", type=int, metavar="N", help="Most workers; with it their number follows the load."),
    click.option(
        "--target-wait", "target_wait_s", type=float, metavar="S",
        help="One more while a request would wait longer than this for its start; default 5.",
    ),
    click.option(
        "--idle", "idle_s", type=float, metavar="S", help="One less when all had nothing to do so long; default 300."
    ),
    click.option(
        "--up-cooldown", "up_cooldown_s", type=float, metavar="S", help="Seconds between two steps up; default 15."
    ),
    click.option(
        "--down-cooldown", "down_cooldown_s", type=float, metavar="S", help="The same for steps down; default 60."
    ),
)  # fmt: skip
