"""`headrace jobs dead`: jobs that were given up, kept with their request."""

import asyncio
from datetime import UTC, datetime

import click
import msgspec
from rich.text import Text

from headrace.bus.deadletters import DeadLetter, DeadLetters
from headrace.cli.options import connected, model_option, with_settings
from headrace.cli.render import console, duration, table
from headrace.errors import ConfigError
from headrace.schemas.subjects import Lane, is_name
from headrace.settings import Settings

__all__ = ["dead"]


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
