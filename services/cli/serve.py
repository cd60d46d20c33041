"""`headrace serve`: one part of Headrace as a process of its own."""

import asyncio
import secrets
from typing import Any, Final

import click

from headrace.bus.connection import Bus
from headrace.cli.host import host
from headrace.cli.http import load_gateway
from headrace.cli.memory_options import memory_options
from headrace.cli.options import parse_assignments, with_settings
from headrace.cli.serving import LogFormat, log_format_option, run_part
from headrace.errors import ConfigError
from headrace.schemas.subjects import DEFAULT_POOL, is_model_name, is_name, is_worker_id
from headrace.settings import Settings
from headrace.worker.engines.factory import ENGINES, make_engine
from headrace.worker.memory import shared_folder

__all__ = ["DEFAULT_MODEL", "serve"]

DEFAULT_MODEL: Final = "smollm2-135m"
"""What the `llama` engine serves when no model is named."""

_KV_TOKENS_OPTION: Final = {"llama": "n_ctx", "openai": "kv_tokens", "sim": "kv_tokens", "vllm": "kv_tokens"}


@click.group()
def serve() -> None:
    """Run one part: router, worker, monitor, gateway, or the agent of a host that runs workers.

    Parts meet only at the broker (HEADRACE_NATS_URL), so they may run on any machine, and any number of each.
    SIGTERM drains: a worker finishes what fits in HEADRACE_GRACE_S, hands the rest back, and exits 0.
    """


@serve.command()
@log_format_option
@with_settings
def router(settings: Settings, log_format: LogFormat) -> None:
    """Take requests in: validate, admit, queue; answer status and cancel requests."""
    from headrace.router import run_router  # a part imports no other: each start is that much sooner

    run_part("router", settings, lambda bus, stop: run_router(bus, stop=stop), log_format=log_format)


@serve.command()
@log_format_option
@with_settings
def monitor(settings: Settings, log_format: LogFormat) -> None:
    """Watch the workers: who lives, who changed, who is lost.

    Prometheus finds the metrics of all parts at /metrics on HEADRACE_MONITOR_PORT; a port that is taken is waited for.
    """
    from headrace.monitor import run_monitor

    run_part("monitor", settings, lambda bus, stop: run_monitor(bus, stop=stop, has_http=True), log_format=log_format)


@serve.command()
@log_format_option
@with_settings
def gateway(settings: Settings, log_format: LogFormat) -> None:
    """Answer OpenAI's API over HTTP, on HEADRACE_HTTP_HOST and HEADRACE_HTTP_PORT; port 0 is any free one.

    Needs the extra `gateway`. SIGTERM lets open answers come to their end within HEADRACE_GRACE_S.
    """
    run_gateway = load_gateway()
    run_part("gateway", settings, lambda bus, stop: run_gateway(bus, stop=stop), log_format=log_format)


@serve.command()
@click.option("--engine", type=click.Choice(ENGINES), required=True, help="What computes the tokens.")
@click.option("--model", metavar="NAME", help=f"The model's name for clients; default with llama: {DEFAULT_MODEL}.")
@click.option("--engine-url", metavar="URL", help="Where the server of engine openai answers, with or without /v1.")
@click.option(
    "--kv-tokens", type=click.IntRange(min=1), help="KV-cache tokens it may hold, if the engine does not say."
)
@memory_options
@click.option("--max-concurrency", type=click.IntRange(min=1), help="Requests it runs at once, at most.")
@click.option("--pool", metavar="NAME", default=DEFAULT_POOL, show_default=True, help="Pool whose queues it serves.")
@click.option("--worker-id", metavar="ID", help="Default: HEADRACE_WORKER_ID, else made up.")
@click.option(
    "-o", "--option", "options", multiple=True, callback=parse_assignments, metavar="KEY=VALUE",
    help="An option of the engine; repeatable.",
)  # fmt: skip
@log_format_option
@with_settings
def worker(
    settings: Settings,
    engine: str,
    model: str | None,
    engine_url: str | None,
    kv_tokens: int | None,
    memory: dict[str, Any],
    max_concurrency: int | None,
    pool: str,
    worker_id: str | None,
    options: dict[str, str],
    log_format: LogFormat,
) -> None:
    """Pull requests that fit the engine's memory, run them, stream their tokens.

    \b
    headrace serve worker --engine llama
    headrace serve worker --engine openai --engine-url http://localhost:8000 --model NAME --max-concurrency 32
    headrace serve worker --engine openai --engine-url http://localhost:8000 --model NAME \\
        --kv-layout 32,8,128,2 --memory-device gpu --memory-reserve 4GiB
    headrace serve worker --engine vllm --model NAME -o model_path=/models/NAME -o args="--dtype bfloat16"
    headrace serve worker --engine sim --model test -o tokens_per_second=100
    """  # noqa: D301  # click reads the backspaces
    from headrace.worker.worker import WorkerOptions, run_worker

    model = model or (DEFAULT_MODEL if engine == "llama" else None)
    if model is None:
        raise click.UsageError(f"engine {engine} needs --model NAME")
    if not is_model_name(model):
        raise ConfigError("--model: allowed are 1 to 100 bytes without control characters")
    if not is_name(pool):
        raise ConfigError(f"--pool is {pool[:60]!r}; allowed: 1 to 40 of a-z 0-9 -")
    derived = {
        "url": engine_url,
        _KV_TOKENS_OPTION[engine]: kv_tokens,
        "max_concurrency": max_concurrency,
        **memory,
    }
    identity = _checked_id(worker_id or settings.worker_id or f"{engine}-{secrets.token_hex(3)}")
    told = {**_as_options(derived), **options}
    built = make_engine(engine, model, told, worker=identity, shared_folder=shared_folder(settings.state_dir))
    wanted = WorkerOptions(
        worker=identity, model=model, pool=pool, max_concurrency=max_concurrency, kv_tokens=kv_tokens
    )

    async def part(bus: Bus, stop: asyncio.Event) -> None:
        await run_worker(bus, built, wanted, stop=stop)

    run_part("worker", settings, part, log_format=log_format, worker=identity)


serve.add_command(host)


def _as_options(values: dict[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in values.items() if value is not None}


def _checked_id(worker_id: str) -> str:
    if not is_worker_id(worker_id):
        raise ConfigError(f"--worker-id is {worker_id[:80]!r}; allowed: 1 to 64 of A-Z a-z 0-9 _ -")
    return worker_id
