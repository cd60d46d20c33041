"""`headrace jobs replay`: a dead-lettered request runs again."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator

import click
import msgspec

from headrace.bus.deadletters import DeadLetter, DeadLetters
from headrace.cli.answer import Answer, follow
from headrace.cli.options import check_job, model_option, tenant_option, with_settings
from headrace.cli.screen import Screen
from headrace.client import Accepted, Client, JobStream, StreamEvent, connect
from headrace.client.control import JobControl
from headrace.client.stream import Submission
from headrace.errors import ConfigError, RequestError
from headrace.logs import configure_logging
from headrace.schemas import subjects
from headrace.schemas.refusals import Refusal
from headrace.schemas.subjects import LANES, is_name
from headrace.settings import Settings

__all__ = ["replay", "submission_of"]


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What `jobs replay --json` prints: the new job, and where it stands in its queue."""

    job: str
    replay_of: str
    tenant: str
    model: str
    position: int | None
    eta_s: float | None
    is_removed: bool


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """How to run it again; None for what the dead letter says."""

    lane: str | None
    pool: str | None
    is_followed: bool
    is_removed: bool
    as_json: bool


@click.command()
@click.argument("job")
@tenant_option
@model_option
@click.option("--priority", type=click.Choice(LANES), help="Lane to wait in; default: the one it had.")
@click.option("--pool", metavar="NAME", help="Pool of workers; default: the one it had.")
@click.option("--follow", "is_followed", is_flag=True, help="Stream the answer; Ctrl-C leaves the job running.")
@click.option("--remove", "is_removed", is_flag=True, help="Remove the dead letter once the request was accepted.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object about the new job; not with --follow.")
@with_settings
def replay(
    settings: Settings,
    job: str,
    tenant: str,
    model: str | None,
    priority: str | None,
    pool: str | None,
    is_followed: bool,
    is_removed: bool,
    as_json: bool,
) -> None:
    """Run a dead-lettered request again, as a new job with a new id.

    The old job has ended for good and its log says so. The request goes the way of any other, so all checks and limits
    apply, with the queue timeout and deadline it had, counted from now. Fails if it is refused; with --follow also if
    the new job fails.

    \b
    headrace jobs replay JOB
    headrace jobs replay JOB --follow --remove
    """  # noqa: D301  # click reads the backspaces
    check_job(job, tenant)
    if is_followed and as_json:
        raise click.UsageError("--json cannot be combined with --follow")
    if pool is not None and not is_name(pool):
        raise ConfigError(f"--pool is {pool[:60]!r}; allowed: 1 to 40 of a-z 0-9 -")
    configure_logging("replay", "debug" if settings.log_level == "debug" else "warning", json=False)
    wish = Wish(lane=priority, pool=pool, is_followed=is_followed, is_removed=is_removed, as_json=as_json)
    asyncio.run(_replay(settings, job, tenant, model, wish))


async def _replay(settings: Settings, job: str, tenant: str, model: str | None, wish: Wish) -> None:
    async with connect(tenant=tenant, settings=settings, name="headrace-replay") as client:
        letter = await _find(client, job, model)
        submission = submission_of(letter, uuid.uuid4().hex, lane=wish.lane, pool=wish.pool)
        new = submission.headers[subjects.HDR_ID]
        stream = JobStream(client.bus, JobControl(client.bus, tenant), tenant=tenant, job=new, submission=submission)
        async with stream:
            events = aiter(stream)
            accepted = await anext(events)
            assert isinstance(accepted, Accepted)
            if wish.is_removed:
                await DeadLetters(client.bus).remove(letter)
            text = f"job {job} runs again as job {new}"
            if wish.is_followed:
                click.echo(text, err=True)
                await _follow(client, stream, accepted, events)
                return
    if wish.as_json:
        shown = Replayed(
            job=new,
            replay_of=job,
            tenant=tenant,
            model=letter.job.model,
            position=accepted.position,
            eta_s=accepted.eta_s,
            is_removed=wish.is_removed,
        )
        click.echo(msgspec.json.encode(shown).decode())
    else:
        click.echo(text)


async def _find(client: Client, job: str, model: str | None) -> DeadLetter:
    found = await DeadLetters(client.bus).find(job, tenant=client.tenant, model=model)
    if not found:
        of_model = f" and model {model}" if model is not None else ""
        message = f"there is no dead letter of job {job} of tenant {client.tenant}{of_model}; see `headrace jobs dead`"
        raise RequestError(Refusal(code="job_not_found", message=message), job=job)
    if len(found) > 1:
        models = ", ".join(letter.job.model for letter in found)
        raise ConfigError(f"several models have a dead letter of job {job}; choose with --model: {models}")
    return found[0]


def submission_of(letter: DeadLetter, job_id: str, *, lane: str | None, pool: str | None) -> Submission:
    """The request of a dead letter to be sent again under another id: the same bytes, limits and fallback.

    Its lane and pool are those given, else those it had.
    """
    job = letter.job
    headers = {
        subjects.HDR_ID: job_id,
        subjects.HDR_PRIORITY: lane or letter.lane,
        subjects.HDR_POOL: pool or letter.pool,
        subjects.HDR_QUEUE_TIMEOUT: f"{job.queue_timeout_s:g}",
        subjects.HDR_DEADLINE: f"{job.deadline_s:g}",
        subjects.HDR_FALLBACK: job.fallback,
    }
    return Submission(
        op=job.op,
        model=job.model,
        body=job.body,
        headers={name: value for name, value in headers.items() if value is not None},
        is_streaming=msgspec.json.decode(job.body).get("stream", True) is not False,
        deadline_s=job.deadline_s,
    )


async def _follow(client: Client, stream: JobStream, accepted: Accepted, events: AsyncIterator[StreamEvent]) -> None:
    answer = Answer(sent_at=time.monotonic(), job=stream.job)
    screen = Screen(client, stream, is_quiet=False)
    screen.event(accepted)
    try:
        async with screen.waiting():
            await follow(events, answer, on_text=screen.text, on_event=screen.event)
        if answer.done is not None and not answer.text:
            screen.text(answer.done.text)  # it asked for no stream
    except asyncio.CancelledError:
        click.echo(f"\njob {stream.job} goes on", err=True)
        raise
    screen.end(answer)
