"""`headrace bench relay`: tokens a second through one worker, and what each costs, beside plain NATS messages."""

import asyncio
import os
import time
from typing import Any, Final

import msgspec
from rich.console import RenderableType
from rich.text import Text

from headrace.bench.bare import Bare, bare
from headrace.bench.figures import middle
from headrace.bench.ground import MODEL, Ground, Machine, ground, machine
from headrace.bench.tables import figure
from headrace.bench.usage import Usage, usage
from headrace.cli.progress import Progress
from headrace.cli.render import table
from headrace.client import Delta, Done
from headrace.errors import HeadraceError
from headrace.settings import Settings

__all__ = ["RelayResult", "RelayRun", "measure_relay", "shown_relay"]

_PROCESSES: Final = ("worker", "broker", "router", "monitor", "client")
_OPTIONS: Final = {"kv_tokens": "100000000", "max_concurrency": "512", "max_model_len": "2000000"}
_PACED_S: Final = 3.0
"""How long a paced run goes on."""

_FLOOD: Final = 10_000
_FLOOD_BYTES: Final = 300
"""About what an event with one token has, headers included."""


class RelayRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `per_event` is tokens per event; of plain messages, which `num_streams` 0 marks, it is 1.

    `pace` is the speed of each stream in tokens per second, 0 for as fast as it goes. `cpu_us` is CPU time by process,
    in microseconds per token; None where it is not known.
    """

    num_streams: int
    pace: int
    num_tokens: int
    seconds: float
    per_second: float
    per_event: float
    cpu_us: dict[str, float | None]


class RelayResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `bench relay --json` prints: every run, in the order they were made in."""

    machine: Machine
    runs: list[RelayRun]


async def measure_relay(
    settings: Settings, progress: Progress, *, num_streams: int, num_tokens: int, pace: int, num_rounds: int
) -> RelayResult:
    """Plain messages, one stream, many streams, in turns; first flat out, then at a pace. `num_tokens` are those of a
    whole run flat out. Raises HeadraceError where a stream fails.
    """
    where = machine()
    runs: list[RelayRun] = []
    flat_out = [_Plan(0), _Plan(1, num_tokens), _Plan(num_streams, num_tokens // num_streams)]
    paced = [_Plan(0), _Plan(num_streams, int(pace * _PACED_S), pace)]
    for speed, plans in ((0, flat_out), (pace, paced)):
        options = {**_OPTIONS, "tokens_per_second": str(speed)}
        async with ground(settings, progress, options=options, max_concurrency=512) as field, bare(field) as plain:
            progress.say("warming up")
            await _streams(field, 1, 10)
            for number in range(1, num_rounds + 1):
                for plan in plans:
                    progress.say(f"round {number} of {num_rounds}: {plan.title}")
                    runs.append(await _run(field, plain, plan))
    return RelayResult(machine=where, runs=runs)


class _Plan(msgspec.Struct, frozen=True):
    num_streams: int
    num_tokens: int = 0
    pace: int = 0

    @property
    def title(self) -> str:
        return _title(self.num_streams, self.pace)


async def _run(field: Ground, plain: Bare, plan: _Plan) -> RelayRun:
    before = _usage(field)
    if plan.num_streams:
        num_events, seconds = await _streams(field, plan.num_streams, plan.num_tokens)
        total = plan.num_streams * plan.num_tokens
    else:
        num_events = total = _FLOOD
        seconds = await plain.flood(_FLOOD, _FLOOD_BYTES)
    spent = _usage(field).since(before)
    return RelayRun(
        num_streams=plan.num_streams,
        pace=plan.pace,
        num_tokens=total,
        seconds=round(seconds, 3),
        per_second=round(total / seconds, 1),
        per_event=round(total / num_events, 2),
        cpu_us={name: round(1e6 * cpu_s / total, 1) if cpu_s is not None else None for name, cpu_s in spent.items()},
    )


async def _streams(field: Ground, num_streams: int, num_tokens: int) -> tuple[int, float]:
    """Read so many streams at once; the number of events with tokens, and the seconds until the last has ended."""
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(_read(field, number, num_tokens)) for number in range(num_streams)]
    return sum(reader.result() for reader in readers), time.monotonic() - began


async def _read(field: Ground, number: int, num_tokens: int) -> int:
    body: dict[str, Any] = {"prompt": f"stream {number}", "max_tokens": num_tokens, "ignore_eos": True}
    num_events = num_seen = 0
    async with field.client.stream(model=MODEL, **body) as stream:
        async for event in stream:
            if isinstance(event, Delta) and event.num_tokens:
                num_events += 1
                num_seen += event.num_tokens
            elif isinstance(event, Done) and num_seen != num_tokens:
                raise HeadraceError(f"a stream ended with {num_seen} of {num_tokens} tokens")
    return num_events


def _usage(field: Ground) -> Usage:
    pids: dict[str, int | None] = {name: field.pid_of(name) for name in ("worker", "router", "monitor")}
    return usage({**pids, "broker": field.broker.pid, "client": os.getpid()})


def shown_relay(result: RelayResult) -> list[RenderableType]:
    """The table of medians, and how to read it."""
    rows = [_row(result, *kind) for kind in dict.fromkeys((run.num_streams, run.pace) for run in result.runs)]
    columns = ("", "per second", "range", "tokens per event", *(f"{name} µs" for name in _PROCESSES))
    num_rounds = sum((run.num_streams, run.pace) == (1, 0) for run in result.runs)
    notes = (
        f"Medians of {num_rounds} run(s), taken in turns; the range is the slowest and the fastest. µs: CPU time of "
        "the process for each token or message, to a few percent at best.",
        "Flat out, tokens share events and whoever uses most CPU sets the speed. At a pace, as with a real engine, "
        "nearly each token is an event of its own: there the CPU times are what counts.",
        "The client is this process, which also sends and receives the plain messages.",
        str(result.machine),
    )
    return [table("Relay", columns, rows, right=columns[1:]), *(Text(note, style="dim") for note in notes)]


def _title(num_streams: int, pace: int) -> str:
    if not num_streams:
        return "plain NATS messages"
    many = "1 stream" if num_streams == 1 else f"{num_streams} streams"
    return f"{many}, {pace} tokens/s each" if pace else f"{many}, flat out"


def _row(result: RelayResult, num_streams: int, pace: int) -> tuple[str, ...]:
    runs = [run for run in result.runs if (run.num_streams, run.pace) == (num_streams, pace)]
    speeds = [run.per_second for run in runs]
    return (
        _title(num_streams, pace),
        figure(middle(speeds)),
        f"{figure(min(speeds))} – {figure(max(speeds))}",
        figure(middle([run.per_event for run in runs])) if num_streams else "",
        *(_cpu(runs, process) for process in _PROCESSES),
    )


def _cpu(runs: list[RelayRun], process: str) -> str:
    known = [cost for run in runs if (cost := run.cpu_us.get(process)) is not None]
    return figure(middle(known)) if known else "-"
