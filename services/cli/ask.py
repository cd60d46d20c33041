"""`headrace ask`: one question, its answer as it comes."""

import asyncio
import contextlib
import sys
import time
from typing import Any, Final, Literal

import click
import msgspec

from headrace import __version__, telemetry
from headrace.bus.connection import Bus
from headrace.bus.overview import list_models, list_workers
from headrace.cli.answer import Answer, follow
from headrace.cli.options import with_settings
from headrace.cli.screen import Screen
from headrace.client import JobStream, connect
from headrace.errors import BrokerUnavailableError, ConfigError, HeadraceError
from headrace.lifecycle import stop_event, wait_first
from headrace.logs import configure_logging
from headrace.schemas.chunks import Usage
from headrace.schemas.subjects import LANES, is_job_id, is_name
from headrace.settings import Settings

__all__ = ["ask"]

_CANCEL_WITHIN_S: Final = 5.0
_LOG_LEVELS: Final[dict[str, str]] = {"debug": "debug"}
"""What a command for people logs: warnings, unless it was asked for more."""

Finish = Literal["answered", "interrupted"]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What `ask --json` prints. Durations are seconds."""

    job: str
    model: str
    worker: str
    attempt: int
    text: str
    finish_reason: str | None
    usage: Usage | None
    ttft_s: float | None
    tokens_per_second: float | None


@click.command()
@click.argument("text")
@click.option("--model", metavar="NAME", help="Default: the only model there is.")
@click.option("--system", metavar="TEXT", help="A system message before the question.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Longest answer, in tokens.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="0: always the likeliest token.")
@click.option("--top-p", type=click.FloatRange(0, 1), help="Sample from the likeliest tokens that sum up to it.")
@click.option("--seed", type=int, help="The same seed and settings sample the same answer, where the engine can.")
@click.option("--stop", "stops", multiple=True, metavar="TEXT", help="End the answer before this text; repeatable.")
@click.option("--priority", type=click.Choice(LANES), help="Lane to wait in; default normal.")
@click.option("--pool", metavar="NAME", help="Pool of workers; default: what the model's rules choose.")
@click.option("--job-id", metavar="ID", help="Name the job; the same id again attaches to it instead of asking twice.")
@click.option("--queue-timeout", type=click.FloatRange(0, min_open=True), metavar="S", help="Longest wait to start.")
@click.option("--deadline", type=click.FloatRange(0, min_open=True), metavar="S", help="Longest time to the end.")
@click.option("--tenant", default="default", show_default=True, metavar="NAME", help="Whose request it is.")
@click.option("--json", "as_json", is_flag=True, help="No stream: one JSON object at the end, with usage and figures.")
@with_settings
def ask(
    settings: Settings,
    text: str,
    model: str | None,
    system: str | None,
    tenant: str,
    priority: str | None,
    pool: str | None,
    job_id: str | None,
    queue_timeout: float | None,
    deadline: float | None,
    stops: tuple[str, ...],
    as_json: bool,
    **sampling: Any,
) -> None:
    """Ask a model; the answer streams to stdout as it is made. TEXT `-` reads the question from stdin.

    While the request waits, its position and expected wait are shown. Ctrl-C cancels the request.

    \b
    headrace ask "What is a headrace?"
    headrace ask --json --temperature 0 "Name three rivers." | jq -r .text
    git diff | headrace ask --system "Write a commit message." -
    """  # noqa: D301  # click reads the backspaces
    for option, value in (("--tenant", tenant), ("--pool", pool)):
        if value is not None and not is_name(value):
            raise ConfigError(f"{option} is {value[:60]!r}; allowed: 1 to 40 of a-z 0-9 -")
    if job_id is not None and not is_job_id(job_id):
        raise ConfigError(f"--job-id is {job_id[:80]!r}; allowed: 1 to 64 of A-Z a-z 0-9 _ -")
    question = sys.stdin.read() if text == "-" else text
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": question})
    request: dict[str, Any] = {"messages": messages, "priority": priority, "pool": pool, "job_id": job_id}
    request |= {"queue_timeout_s": queue_timeout, "deadline_s": deadline, "stop": list(stops) or None, **sampling}
    configure_logging("ask", _LOG_LEVELS.get(settings.log_level, "warning"), json=False)
    asking = _ask(settings, {k: v for k, v in request.items() if v is not None}, model, tenant=tenant, as_json=as_json)
    with telemetry.configure("headrace-ask", instance_id="", version=__version__):
        finish = asyncio.run(asking)
    if finish == "interrupted":
        raise KeyboardInterrupt


async def _ask(settings: Settings, request: dict[str, Any], model: str | None, *, tenant: str, as_json: bool) -> Finish:
    async with stop_event() as stop, connect(tenant=tenant, settings=settings, name="headrace-ask") as client:
        model = model or await only_model(client.bus)
        answer = Answer(sent_at=time.monotonic())
        async with client.stream(model=model, **request) as stream:
            answer.job = stream.job
            screen = Screen(client, stream, is_quiet=as_json)
            async with screen.waiting():
                if not await _until(stop, follow(aiter(stream), answer, on_text=screen.text, on_event=screen.event)):
                    await _cancel(stream)
                    screen.end(answer)
                    return "interrupted"
        screen.end(answer)
    if as_json:
        click.echo(msgspec.json.encode(_result(answer, model)).decode())
    return "answered"


async def only_model(bus: Bus) -> str:
    """The model to ask when none is named: the only known one, else the only one that a live worker serves.

    Raises HeadraceError where there is none, ConfigError where there are many.
    """
    try:
        models = await list_models(bus)
    except BrokerUnavailableError as error:
        raise BrokerUnavailableError(f"{error}; without --model it must find the only one there is") from None
    if not models:
        raise HeadraceError("no model is known yet: start a worker, with `headrace up` or `headrace serve worker`")
    if len(models) > 1:
        live, _ = await list_workers(bus)
        served = {worker.model for worker in live}
        if len(served) != 1:
            raise ConfigError(f"there are several models; choose with --model: {', '.join(models)}")
        models = list(served)
    return models[0]


async def _until(stop: asyncio.Event, reading: Any) -> bool:
    """Await the reading; False if `stop` came first. Raises what it raises."""
    task = asyncio.ensure_future(reading)
    ended = asyncio.Event()
    task.add_done_callback(lambda _: ended.set())
    try:
        await wait_first(stop, ended)
    finally:
        task.cancel()
        await asyncio.wait([task])
    if task.cancelled():
        return False
    task.result()
    return True


async def _cancel(stream: JobStream) -> None:
    """Cancel what may have been accepted; a job the router does not know was not.

    Without a router or a broker nobody can be told: the deadline ends the job then.
    """
    with contextlib.suppress(HeadraceError, TimeoutError):
        async with asyncio.timeout(_CANCEL_WITHIN_S):
            await stream.cancel()


def _result(answer: Answer, model: str) -> Result:
    assert answer.done is not None
    return Result(
        job=answer.job,
        model=model,
        worker=answer.worker,
        attempt=answer.attempt,
        text=answer.done.text,
        finish_reason=answer.done.finish_reason,
        usage=answer.done.usage,
        ttft_s=answer.ttft_s,
        tokens_per_second=answer.tokens_per_second,
    )
