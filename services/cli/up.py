"""`headrace up`: everything on this machine, from one command."""

import asyncio
import contextlib
import json
import logging
import shlex
import sys
from typing import Final

import click
import msgspec
from rich.console import Console
from rich.text import Text

from headrace.bus.configuration import read_config
from headrace.bus.members import TENANT
from headrace.bus.securing import SecureDirectory
from headrace.cli import http
from headrace.cli.options import parse_assignments, with_settings
from headrace.cli.render import console, is_terminal, safe
from headrace.cli.secure import secure_directory
from headrace.cli.serve import DEFAULT_MODEL
from headrace.cli.serving import run_until
from headrace.cli.stack import Plan, Stack, running_stack
from headrace.errors import BrokerError, ConfigError
from headrace.lifecycle import wait_first
from headrace.logs import configure_logging
from headrace.schemas.subjects import DEFAULT_TENANT, is_model_name
from headrace.settings import Settings, load
from headrace.worker.engines.factory import ENGINES, make_engine

__all__ = ["LogLines", "curl_lines", "nats_one_liner", "up"]

log = logging.getLogger(__name__)

_STYLES: Final = ("cyan", "magenta", "blue", "green", "yellow")


@click.command()
@click.option("--model", metavar="NAME", help=f"Model to serve; default with llama: {DEFAULT_MODEL}.")
@click.option("--engine", type=click.Choice(ENGINES), default="llama", show_default=True, help="What runs it.")
@click.option("--workers", type=click.IntRange(1, 64), default=1, show_default=True, help="Worker processes.")
@click.option("--port", type=click.IntRange(0, 65_535), help="Port of the broker, 0 for any free one; default 4222.")
@click.option("--max-concurrency", type=click.IntRange(min=1), help="Requests each worker runs at once, at most.")
@click.option(
    "-o", "--option", "options", multiple=True, callback=parse_assignments, metavar="KEY=VALUE",
    help="An option of the engine; repeatable.",
)  # fmt: skip
@click.option("--secure", is_flag=True, help="Let nobody use the broker without a credential.")
@with_settings
def up(
    settings: Settings,
    model: str | None,
    engine: str,
    workers: int,
    port: int | None,
    max_concurrency: int | None,
    options: dict[str, str],
    secure: bool,
) -> None:
    """Start broker, router, monitor, workers and gateway here, and keep them running until Ctrl-C.

    The broker is the real nats-server, on loopback, with its store in the state directory; HEADRACE_NATS_URL uses one
    that runs already. A part that dies is started again. Ctrl-C lets the workers drain; a second one ends all at once.
    With --secure the broker asks everybody for a credential, as `headrace provision --secure` makes them; this user's
    commands find the operator's by themselves.

    \b
    headrace up
    headrace up --workers 2 --max-concurrency 8
    headrace up --engine openai --model NAME -o url=http://localhost:8000
    """  # noqa: D301  # click reads the backspaces
    model = model or (DEFAULT_MODEL if engine == "llama" else "sim" if engine == "sim" else None)
    if model is None:
        raise click.UsageError(f"engine {engine} needs --model NAME")
    if secure and settings.nats_url is not None:
        raise click.UsageError("--secure is for the embedded broker; see `headrace provision --secure` for another")
    if not is_model_name(model):
        raise ConfigError("--model: allowed are 1 to 100 bytes without control characters")
    if port is not None:
        settings = msgspec.structs.replace(settings, broker_port=port)
    make_engine(engine, model, options)  # wrong options are told now, not by a worker later
    configure_logging("up", settings.log_level, json=False)
    plan = Plan(
        model=model,
        engine=engine,
        num_workers=workers,
        max_concurrency=max_concurrency,
        options=options,
        http_port=_http_port(settings),
        is_secure=secure,
    )
    asyncio.run(run_until(lambda stop, started: _up(settings, plan, stop, started)))


async def _up(settings: Settings, plan: Plan, stop: asyncio.Event, started: asyncio.Event) -> None:
    lines = LogLines(console(stderr=True))
    async with running_stack(settings, plan, on_line=lines.show, on_step=lines.step) as stack:
        started.set()
        if await stack.wait_ready(stop):
            lines.done()
            click.echo(_next_steps(settings, stack, has_keys=await _has_keys(stack)))
        await wait_first(stop)
    lines.done()


class LogLines:
    """Lines of all parts on stderr, each under its part's name; what is going on is a spinner on a terminal."""

    def __init__(self, err: Console) -> None:
        self._err = err
        self._status = err.status("") if is_terminal(sys.stderr) else None
        self._names: dict[str, str] = {}

    def show(self, name: str, line: str) -> None:
        """A line that a part printed."""
        style = self._names.setdefault(name, _STYLES[len(self._names) % len(_STYLES)])
        self._err.print(Text.assemble((f"{name:<8} ", style), safe(line)), soft_wrap=True)

    def step(self, text: str) -> None:
        """What is being done now."""
        if self._status is None:
            self._err.print(Text(f"{text} …"), soft_wrap=True)
        else:
            self._status.update(Text(f"{text} …"))
            self._status.start()

    def done(self) -> None:
        """Nothing is being done any more."""
        if self._status is not None:
            self._status.stop()


def _http_port(settings: Settings) -> int | None:
    """Where the gateway is to listen; None where it is not installed.

    Another program on the port that nobody chose must not be in the way; one on a port that was chosen is told.
    """
    host, port = settings.http_host, settings.http_port
    if not http.is_installed():
        log.warning("no HTTP: the gateway's packages are not installed (%s)", http.INSTALL)
        return None
    if (free := http.free_port(host, port)) is not None:
        return free
    if port == load({}, environ={}).http_port and (other := http.free_port(host, 0)) is not None:
        log.warning("port %d is in use; the gateway listens on %d instead", port, other)
        return other
    raise ConfigError(f"HEADRACE_HTTP_PORT is {port}, which is taken, or not to be had on {host}; 0 is any free port")


def nats_one_liner(stack: Stack, directory: SecureDirectory | None = None) -> str:
    """A request that needs nothing but the NATS command line, and on a secured broker the tenant's credential."""
    subject = stack.bus.names.infer(DEFAULT_TENANT, "chat", stack.plan.model)
    body = '{"messages":[{"role":"user","content":"hi"}]}'
    server = "" if stack.url.endswith(":4222") else f"--server {shlex.quote(stack.url)} "
    if directory is not None:
        nkey = shlex.quote(str(directory.file_of(TENANT)))
        server += f"--nkey {nkey} --inbox-prefix=_INBOX.{DEFAULT_TENANT} "
    return f"nats {server}req {shlex.quote(subject)} '{body}' --replies 0 --reply-timeout 60s"


async def _has_keys(stack: Stack) -> bool:
    """Whether the gateway wants an API key."""
    with contextlib.suppress(BrokerError):  # the hint is worth no failure
        return (await read_config(stack.bus)).has_keys
    return False


def _next_steps(settings: Settings, stack: Stack, *, has_keys: bool) -> str:
    """What to type now; with the options that another terminal needs to find this deployment."""
    default = load({}, environ={})
    here = ""
    if settings.nats_url is not None:
        here += f" --nats-url {shlex.quote(_shown(stack.url))}"
    elif settings.state_dir != default.state_dir:
        here += f" --state-dir {shlex.quote(settings.state_dir)}"
    if settings.prefix != default.prefix:
        here += f" --prefix {shlex.quote(settings.prefix)}"
    plan = stack.plan
    broker = f"broker {_shown(stack.url)}"
    edge = "" if plan.http_port is None else f", HTTP {_http_url(settings, plan.http_port)}"
    return "\n".join(
        (
            "",
            f"Headrace is up: {plan.num_workers} × {plan.engine} serving {plan.model}, {broker}{edge}",
            "",
            "Try in another terminal:",
            f'  headrace ask{here} "What is a headrace?"',
            f"  headrace status{here} --watch",
            *curl_lines(settings, plan, has_keys=has_keys),
            f"  {nats_one_liner(stack, secure_directory(settings, None) if plan.is_secure else None)}",
            "",
            "Ctrl-C stops everything.",
        )
    )


def curl_lines(settings: Settings, plan: Plan, *, has_keys: bool) -> list[str]:
    """A request over HTTP, for who has no other client at hand; with a key where the gateway wants one."""
    if plan.http_port is None:
        return []
    url = f"{_http_url(settings, plan.http_port)}/v1/chat/completions"
    body = json.dumps({"model": plan.model, "messages": [{"role": "user", "content": "hi"}]})
    if not has_keys:
        return [f"  curl {url} -d {shlex.quote(body)}"]
    return [
        f"  curl {url} -H 'Authorization: Bearer KEY' -d {shlex.quote(body)}",
        "    (KEY is a tenant's API key, which is shown once; `headrace tenant key add NAME` makes another)",
    ]


def _http_url(settings: Settings, port: int) -> str:
    host = "127.0.0.1" if settings.http_host in ("0.0.0.0", "::") else settings.http_host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _shown(url: str) -> str:
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
