"""`headrace jobs`: the commands about jobs; one job, what happened to it, and how to end it."""

import asyncio
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import click
import msgspec
from rich.text import Text

from headrace.bus.timeline import TimedEvent, timeline
from headrace.cli.dead_letters import dead
from headrace.cli.job_list import list_
from headrace.cli.options import check_job, connected, tenant_option, with_settings
from headrace.cli.render import console, duration, safe, table
from headrace.cli.replay import replay
from headrace.client import connect
from headrace.client.control import JobControl
from headrace.errors import BrokerError, HeadraceError, RequestError
from headrace.schemas.jobs import JobStatus
from headrace.schemas.refusals import Refusal
from headrace.schemas.states import fold
from headrace.settings import Settings

__all__ = ["jobs"]


class ShownEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a job's history. A run of deltas of one attempt is one line: `num_events` of them."""

    time: str
    event: str
    attempt: int
    offset: int
    num_tokens: int = 0
    num_events: int = 1
    worker: str | None = None
    reason: str | None = None
    lost: str | None = None


class ShownJob(msgspec.Struct, frozen=True, kw_only=True):
    """What `jobs show --json` prints. `usage` is there once it is done, `error` if it failed or expired."""

    job: str
    tenant: str
    state: str
    attempt: int
    num_tokens: int
    worker: str | None
    position: int | None
    eta_s: float | None
    paused: bool
    finish_reason: str | None
    usage: dict[str, Any] | None
    error: Any
    events: list[ShownEvent]


@click.group()
def jobs() -> None:
    """Look at jobs, cancel one, run one again that was given up."""


for _command in (list_, dead, replay):
    jobs.add_command(_command)


@jobs.command()
@click.argument("job")
@tenant_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@with_settings
def show(settings: Settings, job: str, tenant: str, as_json: bool) -> None:
    """Show what a job is now and what happened to it, from its log.

    The log keeps a job for an hour after its deadline. Of a job that ended a while ago only the end may be left.
    """
    check_job(job, tenant)
    shown = asyncio.run(_show(settings, job, tenant))
    if as_json:
        click.echo(msgspec.json.encode(shown).decode())
    else:
        _print(shown)


@jobs.command()
@click.argument("job")
@tenant_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object: what the job is now.")
@with_settings
def cancel(settings: Settings, job: str, tenant: str, as_json: bool) -> None:
    """Cancel a job, queued or running. Fails if it had ended in another way before."""
    check_job(job, tenant)
    status = asyncio.run(_cancel(settings, job, tenant))
    if as_json:
        click.echo(msgspec.json.encode(status).decode())
    if status.state != "cancelled":
        raise HeadraceError(f"job {job} was not cancelled: it is {status.state} already")
    if not as_json:
        click.echo(f"job {job} is cancelled")


async def _show(settings: Settings, job: str, tenant: str) -> ShownJob:
    async with connected(settings) as bus:
        events = await timeline(bus, tenant, job)
        if not events:
            raise RequestError(
                Refusal(code="job_not_found", message=f"no job {job} of tenant {tenant}, or its log has expired"),
                job=job,
            )
        state = fold(each.event for each in events)
        place: JobStatus | None = None
        if state.state == "queued":
            try:
                place = await JobControl(bus, tenant).status(job)
            except (BrokerError, RequestError):
                place = None  # only a router knows the place; without one the rest is still worth showing
    last = events[-1].event
    body = last.json() if last.is_terminal else {}
    owner = state.owner or last.owner
    choices = body.get("choices") or [{}]
    return ShownJob(
        job=job,
        tenant=tenant,
        state=state.state,
        attempt=state.attempt,
        num_tokens=state.num_tokens,
        worker=owner.worker if owner is not None else None,
        position=place.position if place is not None else None,
        eta_s=place.eta_s if place is not None else None,
        paused=place is not None and place.paused,
        finish_reason=choices[0].get("finish_reason"),
        usage=body.get("usage"),
        error=body.get("error"),
        events=shorten(events),
    )


async def _cancel(settings: Settings, job: str, tenant: str) -> JobStatus:
    async with connect(tenant=tenant, settings=settings, name="headrace-cli") as client:
        return await client.cancel(job)


def shorten(events: Iterable[TimedEvent]) -> list[ShownEvent]:
    """The history for people: every event, but a run of deltas of one attempt as one line with the first one's time."""
    lines: list[ShownEvent] = []
    for timed in events:
        event = timed.event
        before = lines[-1] if lines else None
        if event.kind == "delta" and before is not None and (before.event, before.attempt) == ("delta", event.attempt):
            lines[-1] = msgspec.structs.replace(
                before, num_tokens=before.num_tokens + event.count, num_events=before.num_events + 1
            )
            continue
        lines.append(
            ShownEvent(
                time=timed.time,
                event=event.kind,
                attempt=event.attempt,
                offset=event.offset,
                num_tokens=event.count,
                worker=event.owner.worker if event.owner is not None else None,
                reason=event.reason or None,
                lost=event.lost,
            )
        )
    return lines


def _print(shown: ShownJob) -> None:
    out = console()
    facts = [("job", shown.job), ("tenant", shown.tenant), ("state", shown.state), ("attempt", str(shown.attempt))]
    facts += [("tokens", str(shown.num_tokens)), ("worker", shown.worker or "-")]
    if shown.position is not None:
        wait = "the model is paused" if shown.paused else f"about {duration(shown.eta_s)}"
        facts.append(("before it", f"{shown.position}, {wait}"))
    if shown.finish_reason:
        facts.append(("finish_reason", shown.finish_reason))
    if shown.usage:
        counts = (f"{key} {value}" for key, value in shown.usage.items() if isinstance(value, int))
        facts.append(("usage", ", ".join(counts)))
    if shown.error:
        facts.append(("error", f"{shown.error.get('code')}: {shown.error.get('message')}"))
    for name, value in facts:
        out.print(Text.assemble((f"{name:<14}", "dim"), safe(value)), soft_wrap=True)
    out.print()
    first = _parsed(shown.events[0].time)
    rows = [
        (
            event.time[:23].replace("T", " "),
            f"+{(_parsed(event.time) - first).total_seconds():.3f} s",
            event.event if event.num_events == 1 else f"{event.event} × {event.num_events}",
            str(event.attempt),
            str(event.offset),
            str(event.num_tokens or ""),
            event.worker or "",
            event.reason or "",
        )
        for event in shown.events
    ]
    columns = ("time (UTC)", "since", "event", "attempt", "offset", "tokens", "worker", "")
    out.print(table("History", columns, rows, right=("since", "attempt", "offset", "tokens")))


def _parsed(text: str) -> datetime:
    return datetime.fromisoformat(text)
