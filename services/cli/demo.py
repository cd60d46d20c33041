"""`headrace demo`: all parts, a real model, two questions, a worker killed in the middle of a third, and gone again."""

import asyncio
import os
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Final

import click
import msgspec
from rich.console import Console
from rich.status import Status
from rich.text import Text

from headrace.cli.answer import Answer, follow
from headrace.cli.options import with_settings
from headrace.cli.render import console, is_terminal, safe
from headrace.cli.serve import DEFAULT_MODEL
from headrace.cli.serving import run_until
from headrace.cli.stack import Plan, Stack, running_stack
from headrace.cli.takeover import Watched
from headrace.client import Client, Delta, JobStream, Started, StreamEvent, connect
from headrace.logs import configure_logging
from headrace.settings import Settings

__all__ = ["demo"]

_QUESTIONS: Final = (
    "Name the three primary colors.",
    "What is photosynthesis?",
)
_LONG_QUESTION: Final = "Describe the water cycle."
"""The model's answer to it has some 130 tokens."""

_KILL_AFTER: Final = 24
"""Tokens of the long answer that the worker lives to send."""

_MAX_TOKENS: Final = 220
_TAKEOVER_MARK: Final = "‖"
_STYLES: Final = ("cyan", "green", "magenta")
"""Of an answer's text, by attempt."""

_NUM_KEPT_LINES: Final = 30


@click.command()
@with_settings
def demo(settings: Settings) -> None:
    """See it work: start every part here, ask a real model, kill the worker in mid-answer, stop again.

    The answer goes on with another worker after the last token, and the time that takes is shown. Everything has a
    broker, a port and a state directory of its own, so it disturbs nothing that runs, and leaves nothing behind. The
    model is SmolLM2-135M on the CPU: it answers fast, not wisely.
    """
    configure_logging("demo", "error", json=False)
    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as state_dir:
        own = msgspec.structs.replace(
            settings, nats_url=None, nats_system_url=None, state_dir=state_dir, broker_port=0, log_level="warning",
            monitor_port=0,
        )  # fmt: skip
        show = _Show(console())
        if asyncio.run(run_until(lambda stop, started: _demo(own, show, stop, started))):
            raise KeyboardInterrupt


async def _demo(settings: Settings, show: "_Show", stop: asyncio.Event, started: asyncio.Event) -> None:
    plan = Plan(model=DEFAULT_MODEL, engine="llama", temp_dir=settings.state_dir)
    began = time.monotonic()
    show.title()
    try:
        async with running_stack(settings, plan, on_line=show.keep, on_step=show.step) as stack:
            started.set()
            if not await stack.wait_ready(stop):
                return
            show.ready(stack, time.monotonic() - began)
            async with connect(stack.url, settings=settings, name="headrace-demo") as client:
                for question in _QUESTIONS:
                    if stop.is_set():
                        return
                    answer = Answer(sent_at=time.monotonic())
                    show.question(question)
                    async with _ask(client, question) as stream:
                        await follow(aiter(stream), answer, on_text=show.text, on_event=show.event)
                    show.answered(answer)
                stack.add_worker()
                show.second_worker()
                if not await stack.wait_ready(stop, num_workers=2):
                    return
                show.end_progress()
                await _kill_in_mid_answer(stack, client, show)
    except Exception:
        show.failed()
        raise
    finally:
        show.end_progress()
    show.next_steps(time.monotonic() - began)


def _ask(client: Client, question: str) -> JobStream:
    messages = [{"role": "user", "content": question}]
    return client.stream(model=DEFAULT_MODEL, messages=messages, max_tokens=_MAX_TOKENS, temperature=0)


async def _kill_in_mid_answer(stack: Stack, client: Client, show: "_Show") -> None:
    watched = Watched(threshold=_KILL_AFTER)
    killed_at = 0.0
    show.question(_LONG_QUESTION)
    async with _ask(client, _LONG_QUESTION) as stream, asyncio.TaskGroup() as group:
        group.create_task(watched.read(aiter(stream), on_event=show.event_of_killed))
        await watched.reached.wait()
        if watched.done is None and watched.starts:
            victim = await stack.child_of(watched.starts[-1].worker)
            killed_at = time.monotonic()
            victim.kill()
    show.taken_over(watched, killed_at)


class _Show:
    """What the demo shows: results on stdout, progress on stderr; the parts' own lines only if it fails."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._err = console(stderr=True)
        self._status: Status | None = None
        self._kept: deque[str] = deque(maxlen=_NUM_KEPT_LINES)
        self._is_raw = not is_terminal(sys.stdout)
        self._attempt_style = _STYLES[0]

    def title(self) -> None:
        self._line("Headrace demo: a real language model, asked through a durable queue.", style="bold")

    def keep(self, name: str, line: str) -> None:
        self._kept.append(f"{name:<8} {line}")

    def step(self, text: str) -> None:
        if not is_terminal(sys.stderr):
            self._err.print(f"{text} …", markup=False)
            return
        if self._status is None:
            self._status = self._err.status("")
            self._status.start()
        self._status.update(Text(f"{text} …"))

    def ready(self, stack: Stack, after_s: float) -> None:
        self.end_progress()
        parts = {child.name: child.pid for child in (*stack.services, *stack.workers)}
        processes = ", ".join(f"{name} (pid {pid})" for name, pid in parts.items())
        self._line(f"Ready after {after_s:.1f} s: broker {stack.url}, {processes}", style="dim")

    def question(self, text: str) -> None:
        self._line("")
        self._line(f"You:   {text}", style="bold")

    def event(self, event: StreamEvent) -> None:
        if isinstance(event, Started):
            self._line(f"       job {event.job} runs on worker {event.worker}", style="dim")
            click.echo("Model: ", nl=False)

    def text(self, text: str) -> None:
        click.echo(text if self._is_raw else safe(text, keep="\n\t"), nl=False)

    def event_of_killed(self, event: StreamEvent) -> None:
        """Like `event` and `text`, each attempt in its own colour, and a mark where one begins in mid-answer."""
        if isinstance(event, Started):
            self._attempt_style = _STYLES[(event.attempt - 1) % len(_STYLES)]
            if event.attempt == 1:
                self.event(event)
            else:
                self._out.print(Text(_TAKEOVER_MARK, style="bold red"), end="")
        elif isinstance(event, Delta):
            if self._is_raw:
                click.echo(event.text, nl=False)
            else:
                self._out.print(Text(safe(event.text, keep="\n\t"), style=self._attempt_style), end="", soft_wrap=True)

    def second_worker(self) -> None:
        self._line("")
        self._line(
            "Now a second worker starts. Whichever takes the next question is killed in mid-answer.", style="bold"
        )
        self.step("starting a second worker")

    def taken_over(self, watched: Watched, killed_at: float) -> None:
        click.echo("")
        takeover = next((start for start in watched.starts if start.attempt > 1), None)
        if takeover is None or takeover.gap_s is None:
            self._line("       the answer was complete before the worker was gone", style="dim")
            return
        before = watched.starts[0]
        for line in (
            f"{_TAKEOVER_MARK}      worker {before.worker} got SIGKILL; after token {takeover.num_tokens} worker "
            f"{takeover.worker} went on, as attempt {takeover.attempt}",
            f"       from the kill to `started` {1000 * (takeover.at - killed_at):.0f} ms · "
            f"from the last token before to the first after {1000 * takeover.gap_s:.0f} ms, the prompt read anew",
            f"       {watched.num_tokens} tokens, each once and in order",
        ):
            self._line(line, style="dim")

    def answered(self, answer: Answer) -> None:
        click.echo("")
        self._line(f"       {answer.figures()}", style="dim")

    def failed(self) -> None:
        self.end_progress()
        for line in self._kept:
            self._err.print(Text(safe(line)), soft_wrap=True, style="dim")

    def next_steps(self, took_s: float) -> None:
        command = _own_command()
        lines = (
            "",
            f"Done in {took_s:.1f} s. Every part has ended; nothing is left behind.",
            "",
            "Next:",
            f"  {command} up                       keep it running; then, from another terminal:",
            f'  {command} ask "What is a headrace?"',
            f"  {command} status --watch",
            f"  {command} --help",
        )
        for line in lines:
            self._line(line)

    def _line(self, text: str, *, style: str = "") -> None:
        self._out.print(Text(safe(text), style=style), soft_wrap=True)

    def end_progress(self) -> None:
        """Nothing is being done any more."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def _own_command() -> str:
    """How this program can be called again: `headrace` where that is on PATH, else the path it was started by."""
    started_by = Path(sys.argv[0])
    if started_by.name != "headrace" or any(
        Path(folder) / "headrace" == started_by.absolute() for folder in os.get_exec_path()
    ):
        return "headrace"
    return str(started_by)
