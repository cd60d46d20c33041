"""A job's stream as people see it: the answer on stdout, what happens to the job on stderr."""

import asyncio
import contextlib
import math
import sys
from collections.abc import AsyncIterator
from typing import Final

import click
from rich.status import Status

from headrace.cli.answer import Answer
from headrace.cli.render import console, duration, is_terminal, safe
from headrace.client import Accepted, Client, JobStream, Requeued, Started, StreamEvent
from headrace.errors import HeadraceError

__all__ = ["Screen"]

_ASK_EVERY_S: Final = 1.0


class Screen:
    """The answer on stdout, what happens to it on stderr; the latter only for people."""

    def __init__(self, client: Client, stream: JobStream, *, is_quiet: bool) -> None:
        self._client = client
        self._stream = stream
        self._is_quiet = is_quiet
        self._is_raw = not is_terminal(sys.stdout)
        self._err = console(stderr=True)
        self._has_terminal = is_terminal(sys.stderr) and not is_quiet
        self._status: Status | None = None
        self._ends_with_newline = True
        self._is_queued = asyncio.Event()
        self._is_queued.set()

    @contextlib.asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Show the place in the queue while there is one, inside the block. What fails there is told on a new line."""
        try:
            if not self._has_terminal:
                yield
                return
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(self._show_position(), name="position")
                try:
                    yield
                finally:
                    asking.cancel()
                    self._stop_status()
        except Exception:
            self._end_line()
            raise

    def text(self, text: str) -> None:
        """The next piece of the answer."""
        if not self._is_quiet:
            click.echo(text if self._is_raw else safe(text, keep="\n\t"), nl=False)
            self._ends_with_newline = text.endswith("\n")

    def event(self, event: StreamEvent) -> None:
        """What happened to the job."""
        if isinstance(event, Accepted):
            self._show_waiting(event.position, event.eta_s)
        elif isinstance(event, Requeued):
            self._is_queued.set()
            if self._has_terminal and event.reason:
                self._err.print(
                    f"\n[{safe(event.reason)}: going on with attempt {event.attempt}]", markup=False, soft_wrap=True
                )
        elif isinstance(event, Started):
            self._is_queued.clear()
            self._stop_status()

    def end(self, answer: Answer) -> None:
        """Nothing more comes."""
        self._end_line()
        if self._has_terminal and answer.done is not None:
            self._err.print(answer.summary(), style="dim", markup=False, soft_wrap=True)

    def _end_line(self) -> None:
        if not self._is_quiet and not self._ends_with_newline:
            click.echo("")
            self._ends_with_newline = True

    async def _show_position(self) -> None:
        while True:
            await self._is_queued.wait()
            await asyncio.sleep(_ASK_EVERY_S)
            if not self._is_queued.is_set():
                continue
            with contextlib.suppress(HeadraceError):
                now = await self._client.status(self._stream.job)
                if self._is_queued.is_set():
                    self._show_waiting(now.position, now.eta_s, is_paused=now.paused)

    def _show_waiting(self, position: int | None, eta_s: float | None, *, is_paused: bool = False) -> None:
        if not self._has_terminal:
            return
        place = "waiting" if position is None else "next in the queue" if not position else f"{position} before it"
        eta = "" if eta_s is None or not math.isfinite(eta_s) else f", about {duration(eta_s)}"
        if is_paused:
            eta = "; the model is paused"
        if self._status is None:
            self._status = self._err.status("")
            self._status.start()
        self._status.update(f"{place}{eta}")

    def _stop_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
