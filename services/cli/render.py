"""How results and progress look: tables and colours for a terminal, plain lines elsewhere."""

import sys
from collections.abc import Iterable, Sequence
from typing import Final, TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.schemas.overview import Overview, WorkerOverview

__all__ = ["console", "deployment", "duration", "is_terminal", "safe", "table"]

_PLAIN_WIDTH: Final = 200
"""Columns of a table that is not read on a terminal: wide enough that nothing is cut."""

_STATE_STYLES: Final = {"Ready": "green", "Busy": "yellow", "Starting": "cyan", "Draining": "cyan", "Failed": "red"}


def is_terminal(stream: TextIO) -> bool:
    """Whether a person reads it."""
    return stream.isatty()


def console(*, stderr: bool = False) -> Console:
    """A console for results, or on stderr for progress; colours only on a terminal and without NO_COLOR."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if is_terminal(stream) else _PLAIN_WIDTH
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def safe(text: str, *, keep: str = "") -> str:
    """Text that came from elsewhere, without characters that a terminal would obey; those in `keep` stay."""
    return "".join(char if char.isprintable() or char in keep else "�" for char in text)


def duration(seconds: float | None) -> str:
    """A duration for people: `0.4 s`, `12 s`, `3 min`, `2 h`; `-` where there is none."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, right: Sequence[str] = ()
) -> Table:
    """A table without lines; the columns in `right` hold numbers. Cells are shown as they are, never as markup."""
    drawn = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        drawn.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(cell if isinstance(cell, Text) else Text(safe(cell)) for cell in row))
    return drawn


def deployment(now: Overview) -> list[RenderableType]:
    """Workers, queues and the workers just lost."""
    parts: list[RenderableType] = [_workers(now) if now.workers else Text("No worker lives.")]
    parts.append(Text(""))
    parts.append(_queues(now) if now.queues else Text("No model is known yet: its first worker makes it known."))
    if now.gone:
        rows = [(gone.id, gone.ending, f"{duration(gone.age_s)} ago") for gone in now.gone]
        parts += [Text(""), table("Gone in the last minute", ("worker", "how", "when"), rows)]
    return parts


def _workers(now: Overview) -> Table:
    rows = [
        (
            each.id,
            each.model,
            each.engine,
            Text(each.state, style=_STATE_STYLES.get(each.state, "")),
            _running(each),
            f"{each.kv_reserved_tokens:,}/{each.kv_capacity_tokens:,}",
            each.pool,
            f"{each.host}:{each.pid}",
            _why(each),
        )
        for each in now.workers
    ]
    columns = ("id", "model", "engine", "state", "running", "KV tokens", "pool", "host:pid", "")
    return table("Workers", columns, rows, right=("running", "KV tokens"))


def _why(each: WorkerOverview) -> str:
    """Why it takes nothing; else why its engine was started again last, if it was."""
    health = each.health
    if each.reason or health is None or not health.restarts:
        return each.reason
    times = "once" if health.restarts == 1 else f"{health.restarts} times"
    return f"taken out {times}, last: {health.last_restart}"


def _running(each: WorkerOverview) -> str:
    """What runs, of how many: `1/1 of 4` where memory carries one of the four that were asked for."""
    effective = each.effective_concurrency
    if effective is None or effective >= each.max_concurrency:
        return f"{each.running}/{each.max_concurrency}"
    return f"{each.running}/{effective} of {each.max_concurrency}"


def _queues(now: Overview) -> Table:
    rows = [
        (
            each.model,
            each.pool,
            each.lane,
            each.queue,
            str(each.queued),
            str(each.running),
            duration(each.oldest_age_s),
            "paused" if each.paused else duration(each.eta_s),
        )
        for each in now.queues
    ]
    columns = ("model", "pool", "lane", "queue", "queued", "running", "oldest waits", "next would wait")
    return table("Queues", columns, rows, right=("queued", "running", "oldest waits", "next would wait"))
