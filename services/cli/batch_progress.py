"""How far a batch is: a bar on a terminal, now and then a line elsewhere."""

import sys
import time
from pathlib import Path
from typing import Final, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from headrace.cli.render import console, is_terminal, safe

__all__ = ["BatchProgress"]

_LINE_EVERY_S: Final = 10.0


class BatchProgress:
    """Shows on stderr how many of `total` lines are answered; nothing where it is quiet."""

    def __init__(self, total: int, *, is_quiet: bool) -> None:
        self._total = total
        self._is_quiet = is_quiet
        self._err = console(stderr=True)
        self._bar: Progress | None = None
        self._said_at = time.monotonic()
        if is_terminal(sys.stderr) and not is_quiet:
            self._bar = Progress(
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                console=self._err,
            )
            self._task = self._bar.add_task("lines", total=total, note="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, num_done: int, num_failed: int, trouble: str | None) -> None:
        """How far it is now, and what holds it up."""
        note = ", ".join(filter(None, (f"{num_failed} failed" if num_failed else "", safe(trouble or ""))))
        if self._bar is not None:
            self._bar.update(self._task, completed=num_done + num_failed, note=note)
        elif not self._is_quiet and time.monotonic() - self._said_at >= _LINE_EVERY_S:
            self._said_at = time.monotonic()
            self._say(f"{num_done} of {self._total} answered{f', {note}' if note else ''}")

    def end(self, num_done: int, num_failed: int, output: Path, errors: Path | None) -> None:
        """What came of it, and where it is."""
        self._say(f"{num_done} of {self._total} answered: {output}")
        if errors is not None:
            self._say(f"{num_failed} failed: {errors}")
        if num_done + num_failed < self._total:
            self._say("begin again to go on")

    def _say(self, text: str) -> None:
        self._err.print(Text(safe(text)), soft_wrap=True)
