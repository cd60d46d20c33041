"""`headrace jobs dead` and `headrace jobs replay`: jobs that were given up, and how to run one again."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import click
import msgspec
from rich.text import Text

from headrace.bus.deadletters import DeadLetter, DeadLetters
from headrace.cli.answer import Answer, follow
from headrace.cli.options import check_job, connected, model_option, tenant_option, with_settings
from headrace.cli.render import console, duration, table
from headrace.cli.screen import Screen
from headrace.client import Accepted, Client, JobStream, connect
from headrace.client.control import JobControl
from headrace.client.stream import Submission
from headrace.errors import ConfigError, HeadraceError, RequestError
from headrace.schemas import subjects
from headrace.schemas.refusals import Refusal
from headrace.schemas.subjects import LANES, Lane, is_name
from headrace.settings import Settings

__all__ = ["dead", "replay", "submission_of"]


class ShownLetter(msgspec.Struct, frozen=True, kw_only=True):
    """One dead letter of `jobs dead --json`. `faults` name what it cost, as worker/epoch/engine run."""

    job: str
    tenant: str
    model: str
    op: str
    reason: str
    attempts: int
    faults: tuple[str, ...]
    died_at: str
    age_s: float
    pool: str | None
    lane: Lane | None


class ShownLetters(msgspec.Struct, frozen=True, kw_only=True):
    """What `jobs dead --json` prints. `total` counts those that are not listed too."""

    total: int
    dead_letters: list[ShownLetter]


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What `jobs replay --json` prints: the new job, and where it stands in its queue."""

    job: str
    replay_of: str
    tenant: str
    model: str
    position: int | None
    eta_s: float | None
    is_removed: bool


@click.command()
@model_option
@click.option("--tenant", metavar="NAME", help="Only this tenant's; default: all.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="The newest so many.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: {total, dead_letters}.")
@with_settings
def dead(settings: Settings, model: str | None, tenant: str | None, limit: int, as_json: bool) -> None:
    """List the dead letters, newest last: jobs given up because workers or engines failed while running them.

    Each keeps its request until it is removed. `headrace jobs show JOB` has the history while the log lasts.

    \b
    headrace jobs dead
    headrace jobs dead --json | jq -r '.dead_letters[].job' | xargs -n1 headrace jobs replay --remove
    """  # noqa: D301  # click reads the backspaces
    if tenant is not None and not is_name(tenant):
        raise ConfigError(f"--tenant is {tenant[:80]!r}; allowed: 1 to 40 of a-z 0-9 -")
    shown = asyncio.run(_dead(settings, model, tenant, limit))
    if as_json:
        click.echo(msgspec.json.encode(shown).decode())
    else:
        _print(shown)


@click.command()
@click.argument("job")
@tenant_option
@model_option
@click.option("--priority", type=click.Choice(LANES), help="Lane to wait in; default: the one it had.")
@click.option("--pool", metavar="NAME", help="Pool of workers; default: the one it had.")
@click.option("--follow", is_flag=True, help="Stream the answer; Ctrl-C leaves the job running.")
@click.option("--remove", is_flag=True, help="Remove the dead letter once the request was accepted.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object about the new job; not with --follow.")
@with_settings
def replay(
    settings: Settings,
    job: str,
    tenant: str,
    model: str | None,
    priority: str | None,
    pool: str | None,
    follow: bool,
    remove: bool,
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
    if follow and as_json:
        raise click.UsageError("--json cannot be combined with --follow")
    if pool is not None and not is_name(pool):
        raise ConfigError(f"--pool is {pool[:60]!r}; allowed: 1 to 40 of a-z 0-9 -")
    asyncio.run(
        _replay(
            settings, job, tenant, model, lane=priority, pool=pool, is_followed=follow, is_removed=remove,
            as_json=as_json,
        )
    )  # fmt: skip


async def _dead(settings: Settings, model: str | None, tenant: str | None, limit: int) -> ShownLetters:
    async with connected(settings) as bus:
        letters = DeadLetters(bus)
        total = await letters.count(tenant=tenant, model=model)
        await bus.sync_clock()
        now = bus.clock.now()
        found = await letters.newest(limit=limit, tenant=tenant, model=model) if total else []
    return ShownLetters(total=total, dead_letters=[_shown(letter, now) for letter in found])


def _shown(letter: DeadLetter, now: float) -> ShownLetter:
    return ShownLetter(
        job=letter.job.job,
        tenant=letter.job.tenant,
        model=letter.job.model,
        op=letter.job.op,
        reason=letter.reason,
        attempts=letter.attempts,
        faults=letter.faults,
        died_at=datetime.fromtimestamp(letter.died_at, UTC).isoformat(timespec="milliseconds"),
        age_s=round(max(0.0, now - letter.died_at), 3),
        pool=letter.pool,
        lane=letter.lane,
    )


def _print(shown: ShownLetters) -> None:
    out = console()
    if not shown.dead_letters:
        out.print("There is no dead letter.")
        return
    rows = [
        (
            letter.job,
            letter.tenant,
            letter.model,
            letter.op,
            letter.reason,
            str(letter.attempts),
            " ".join(sorted({fault.partition("/")[0] for fault in letter.faults})),
            duration(letter.age_s),
        )
        for letter in shown.dead_letters
    ]
    columns = ("job", "tenant", "model", "op", "reason", "attempts", "failed on", "age")
    out.print(table("Dead letters", columns, rows, right=("attempts", "age")))
    if shown.total > len(shown.dead_letters):
        out.print(Text(f"the newest {len(shown.dead_letters)} of {shown.total}", style="dim"))


async def _replay(
    settings: Settings,
    job: str,
    tenant: str,
    model: str | None,
    *,
    lane: str | None,
    pool: str | None,
    is_followed: bool,
    is_removed: bool,
    as_json: bool,
) -> None:
    async with connect(tenant=tenant, settings=settings, name="headrace-replay") as client:
        letter = await _find(client, job, model)
        new = uuid.uuid4().hex
        submission = submission_of(letter, new, lane=lane, pool=pool)
        stream = JobStream(client.bus, JobControl(client.bus, tenant), tenant=tenant, job=new, submission=submission)
        async with stream:
            events = aiter(stream)
            accepted = await anext(events)
            assert isinstance(accepted, Accepted)
            if is_removed:
                await DeadLetters(client.bus).remove(letter)
            text = f"job {job} runs again as job {new}"
            if is_followed:
                click.echo(text, err=True)
                await _follow(client, stream, accepted, events)
                return
    if as_json:
        shown = Replayed(
            job=new,
            replay_of=job,
            tenant=tenant,
            model=letter.job.model,
            position=accepted.position,
            eta_s=accepted.eta_s,
            is_removed=is_removed,
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
        is_streaming=b'"stream":false' not in job.body.replace(b" ", b""),
        deadline_s=job.deadline_s,
    )


async def _follow(client: Client, stream: JobStream, accepted: Accepted, rest: AsyncIterator[object]) -> None:
    raise NotImplementedError
