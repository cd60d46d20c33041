"""The command `headrace`: which commands there are, and how every one of them ends when something is wrong."""

import importlib
import sys
import traceback
from collections.abc import Iterator
from typing import Any, Final

import click

from headrace import __version__
from headrace.cli.options import group_options
from headrace.errors import ConfigError, HeadraceError

__all__ = ["command", "main"]

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130

_MAX_ERROR_CHARS: Final = 2000

_COMMANDS: Final = {
    "up": "headrace.cli.up:up",
    "demo": "headrace.cli.demo:demo",
    "ask": "headrace.cli.ask:ask",
    "status": "headrace.cli.status:status",
    "jobs": "headrace.cli.jobs:jobs",
    "batch": "headrace.cli.batch:batch",
    "drain": "headrace.cli.workers:drain",
    "evict": "headrace.cli.workers:evict",
    "serve": "headrace.cli.serve:serve",
    "models": "headrace.cli.models:models",
    "tenant": "headrace.cli.tenants:tenant",
    "config": "headrace.cli.config:config",
    "provision": "headrace.cli.provision:provision",
    "doctor": "headrace.cli.doctor:doctor",
    "bench": "headrace.bench.command:bench",
}
"""In the order of the help; each is imported when it is used, so that no command waits for what others need."""


class _Commands(click.Group):
    """Commands imported on use; an error becomes one line on stderr and an exit code, a bug below its traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        found = getattr(importlib.import_module(module), name)
        assert isinstance(found, click.Command)
        return found

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
            raise  # click's own, which it handles
        except Exception as error:  # the edge of the process: whatever it was, its reason is the last line
            leaves = list(_leaves(error))
            expected = [each for each in leaves if isinstance(each, HeadraceError)]
            unexpected = [each for each in leaves if not isinstance(each, HeadraceError)]
            if unexpected:
                traceback.print_exception(error)
            _say(*expected[:1], *unexpected[:1])
            ctx.exit(EXIT_USAGE if isinstance(leaves[0], ConfigError) and not unexpected else EXIT_FAILED)
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="headrace")
@group_options
def command() -> None:
    """LLM requests brought to GPUs at the rate their memory can take, over NATS JetStream.

    \b
    First steps:
      headrace demo                       see it work: a real model, a worker killed in mid-answer, some seconds
      headrace up                         start everything on this machine, with a small model
      headrace ask "What is a headrace?"  ask it, from another terminal
      headrace status                     who works, what waits
      headrace doctor                     what is wrong, and what to do

    \b
    Onwards:
      headrace up --engine openai --model NAME -o url=http://localhost:8000     your own vLLM, SGLang, llama.cpp
      HEADRACE_NATS_URL=nats://host:4222 headrace serve worker --help           the parts, one by one, on any machine

    Settings come from the TOML file that HEADRACE_CONFIG names, then HEADRACE_* variables, then flags.
    Exit codes: 0 success, 1 failure, 2 wrong usage or setting, 130 interrupted.
    """  # noqa: D301  # click reads the backspaces


def main() -> None:
    """Run the command line of this process and exit."""
    command(prog_name="headrace")


def _leaves(error: Exception) -> Iterator[Exception]:
    """What went wrong: the error itself, or of a task group's failure each that is in it."""
    if isinstance(error, ExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


def _say(*errors: Exception) -> None:
    """The errors on one line: what a message may quote from elsewhere cannot break out of it."""
    text = "; ".join(map(_on_one_line, errors))
    shown = "".join(char if char.isprintable() else "?" for char in text)
    if len(shown) > _MAX_ERROR_CHARS:
        shown = shown[: _MAX_ERROR_CHARS - 1] + "…"
    print(f"headrace: {shown}", file=sys.stderr, flush=True)


def _on_one_line(error: Exception) -> str:
    text = " | ".join(line.strip() for line in str(error).splitlines() if line.strip())
    name = type(error).__name__
    if isinstance(error, HeadraceError):
        return text or name
    return f"unexpected {name}: {text}" if text else f"unexpected {name}"
