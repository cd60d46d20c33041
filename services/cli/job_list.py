"""`headrace jobs list`: what waits and what runs."""

import asyncio

import click
import msgspec
from rich.text import Text

from headrace.bus.joblist import JobListing, ListedJob, ListedState, list_jobs
from headrace.bus.overview import list_models
from headrace.cli.options import connected, model_option, with_settings
from headrace.cli.render import console, duration, table
from headrace.discipline.position import position
from headrace.errors import HeadraceError
from headrace.schemas.subjects import Lane
from headrace.settings import Settings

__all__ = ["list_"]


class ShownJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job of `jobs list --json`. `position` is how many jobs would start before it, null where it runs."""

    job: str
    tenant: str
    model: str
    op: str
    pool: str
    lane: Lane
    queue: str
    state: ListedState
    attempt: int
    age_s: float
    worker: str | None
    position: int | None


class ShownJobs(msgspec.Struct, frozen=True, kw_only=True):
    """What `jobs list --json` prints. `total` counts the queued and running jobs of the models, listed or not."""

    total: int
    jobs: list[ShownJob]


@click.command("list")
@model_option
@click.option("--state", type=click.Choice(["queued", "running"]), help="Only these.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="The oldest so many.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: {total, jobs}.")
@with_settings
def list_(settings: Settings, model: str | None, state: ListedState | None, limit: int, as_json: bool) -> None:
    """List the jobs that wait and run, oldest first.

    Running means that a worker holds the job; its engine may not have begun yet. Of a running job the attempt is the
    one that runs, of a queued one the one that comes next.

    \b
    headrace jobs list
    headrace jobs list --state queued --limit 20
    headrace jobs list --json | jq -r '.jobs[] | select(.attempt > 1) | .job'
    """  # noqa: D301  # click reads the backspaces
    shown = asyncio.run(_list(settings, model, state, limit))
    if as_json:
        click.echo(msgspec.json.encode(shown).decode())
    else:
        _print(shown, state)


async def _list(settings: Settings, model: str | None, state: ListedState | None, limit: int) -> ShownJobs:
    async with connected(settings) as bus:
        models = await list_models(bus)
        if model is not None:
            if model not in models:
                raise HeadraceError(f"no model {model!r} is known here; there are: {', '.join(models) or 'none'}")
            models = [model]
        if not models:
            return ShownJobs(total=0, jobs=[])
        await bus.sync_clock()
        listing = await list_jobs(bus, models, limit=limit, state=state)
    return ShownJobs(total=listing.num_messages, jobs=[_shown(job, listing) for job in listing.jobs])


def _shown(job: ListedJob, listing: JobListing) -> ShownJob:
    place = None
    if job.num_ahead is not None:
        place = position(listing.waiting[job.model], job.queue, num_ahead=job.num_ahead)
    return ShownJob(
        job=job.job,
        tenant=job.tenant,
        model=job.model,
        op=job.op,
        pool=job.queue.pool,
        lane=job.queue.lane,
        queue=job.queue.queue,
        state=job.state,
        attempt=job.attempt,
        age_s=job.age_s,
        worker=job.worker,
        position=place,
    )


def _print(shown: ShownJobs, state: ListedState | None) -> None:
    out = console()
    if not shown.jobs:
        out.print(f"No job is {state or 'queued or running'}.")
        return
    rows = [
        (
            job.job,
            Text(job.state, style="green" if job.state == "running" else "yellow"),
            job.tenant,
            job.model,
            "/".join((job.pool, job.lane, job.queue)),
            duration(job.age_s),
            str(job.attempt),
            job.worker or "",
            "" if job.position is None else str(job.position),
        )
        for job in shown.jobs
    ]
    columns = ("job", "state", "tenant", "model", "pool/lane/queue", "age", "attempt", "worker", "before it")
    out.print(table("Jobs", columns, rows, right=("age", "attempt", "before it")))
    if shown.total > len(shown.jobs):
        out.print(Text(f"{len(shown.jobs)} of {shown.total} queued and running jobs", style="dim"))
