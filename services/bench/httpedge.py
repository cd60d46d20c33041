"""`headrace bench http`: many slow streams through one gateway, next to the same load on the engine's own server."""

import asyncio
import contextlib
import os
import resource
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
from rich.console import RenderableType
from rich.text import Text

from headrace.bench.figures import Distribution, distribution, in_ms
from headrace.bench.ground import MODEL, Machine, ground, machine
from headrace.bench.httpload import Arrivals, StreamPlan, open_streams
from headrace.bench.tables import figure
from headrace.bench.usage import usage
from headrace.cli.http import free_port, load_gateway
from headrace.cli.progress import Progress
from headrace.cli.render import table
from headrace.errors import HeadraceError
from headrace.lifecycle import ChildProcess, wait_first
from headrace.settings import Settings

__all__ = ["HttpResult", "HttpRun", "measure_http", "shown_http"]

_START_S: Final = 20.0
_LATE_S: Final = 1.0
"""A stream counts as sustained while its last token is no later than this."""

_WARM_UP: Final = StreamPlan(num_streams=4, pace=20, rate=20, seconds=0.5)
_SPARE_FILES: Final = 100


class HttpRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times in ms. `first_token` is from the request to it; `late`, of each token that came, the time since it
    was due, a step of the pace after the one before, reckoned from where its stream was closest to its pace.
    `tokens_per_second` is over the time when all streams were open.

    `cpu` is the share of one core that each process took, `cpu_us` its CPU time for each token, in microseconds; `rss`
    the gateway's memory before, at its peak and after, in MiB. What the system does not tell is None.
    """

    server: str
    num_streams: int
    num_sustained: int
    num_tokens: int
    num_asked: int
    tokens_per_second: float
    first_token: Distribution | None
    late: Distribution | None
    cpu: dict[str, float | None]
    cpu_us: dict[str, float | None]
    rss_mib: list[float | None]


class HttpResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `bench http --json` prints."""

    machine: Machine
    plan: StreamPlan
    engine: HttpRun
    gateway: HttpRun


async def measure_http(settings: Settings, progress: Progress, *, plan: StreamPlan, num_workers: int) -> HttpResult:
    """The engine's own server first, alone; then a whole deployment with one gateway. Raises HeadraceError."""
    load_gateway()
    _allow_files(plan.num_streams + _SPARE_FILES)
    where = machine()
    options = {
        "tokens_per_second": str(plan.pace), "kv_tokens": "100000000", "max_model_len": "2000000",
        "max_concurrency": str(plan.num_streams),
    }  # fmt: skip
    progress.say("the engine's own server")
    async with _engine_server(options) as (port, pid):
        engine = await _run("engine", port, plan, {"server": pid})
    http_port = free_port("127.0.0.1", 0)
    async with ground(
        settings, progress, options=options, num_workers=num_workers, max_concurrency=plan.num_streams,
        http_port=http_port,
    ) as field:  # fmt: skip
        assert http_port is not None
        progress.say("warming up")
        await open_streams(http_port, MODEL, _WARM_UP)
        progress.say(f"{plan.num_streams} streams through the gateway")
        parts = (*field.stack.services, *field.stack.workers)
        pids: dict[str, int | None] = {part.name: part.pid for part in parts}
        gateway = await _run("gateway", http_port, plan, {**pids, "broker": field.broker.pid})
    return HttpResult(machine=where, plan=plan, engine=engine, gateway=gateway)


def _allow_files(number: int) -> None:
    """Raises HeadraceError where the system does not allow so many open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < number:
        raise HeadraceError(f"so many streams need {number} open files, the system allows {hard}")
    if soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))


@contextlib.asynccontextmanager
async def _engine_server(options: Mapping[str, str]) -> AsyncIterator[tuple[int, int]]:
    """The port and the process id of the `sim` engine with a server of its own."""
    lines: list[str] = []
    told = asyncio.Event()

    def on_line(line: str) -> None:
        lines.append(line)
        told.set()

    data = msgspec.json.encode({name: int(value) for name, value in options.items()}).decode()
    argv = [sys.executable, "-P", "-m", "headrace.bench.simserver", data]
    async with ChildProcess(argv, name="engine", on_line=on_line) as child:
        if not await wait_first(told, timeout_s=_START_S) or not lines[0].isdigit():
            raise HeadraceError(f"the engine's own server did not start: {lines[-1] if lines else 'it says nothing'}")
        await open_streams(int(lines[0]), MODEL, _WARM_UP)
        yield int(lines[0]), child.pid


async def _run(server: str, port: int, plan: StreamPlan, pids: dict[str, int | None]) -> HttpRun:
    known = {**pids, "client": os.getpid()}
    memory = known.get("gateway") or known.get("server")
    rss_before = _memory_mib(memory, "VmRSS")
    before = usage(known)
    began = time.monotonic()
    streams = await open_streams(port, MODEL, plan)
    after = usage(known)
    spent = after.since(before)
    took_s = after.at - before.at
    total = sum(stream.seen[-1][1] for stream in streams if stream.seen)
    all_open = (began + plan.ramp_s, began + plan.ramp_s + plan.seconds)
    return HttpRun(
        server=server,
        num_streams=len(streams),
        num_sustained=sum(_is_sustained(stream, plan.pace) for stream in streams),
        num_tokens=total,
        num_asked=sum(stream.num_tokens for stream in streams),
        tokens_per_second=round(sum(_num_between(stream, *all_open) for stream in streams) / plan.seconds, 1),
        first_token=distribution(in_ms(stream.seen[0][0] - stream.sent_at for stream in streams if stream.seen)),
        late=distribution(in_ms(late for stream in streams for late in _lateness(stream, plan.pace))),
        cpu={name: round(cpu_s / took_s, 3) if cpu_s is not None else None for name, cpu_s in spent.items()},
        cpu_us={
            name: round(1e6 * cpu_s / total, 1) if cpu_s is not None and total else None
            for name, cpu_s in spent.items()
        },
        rss_mib=[rss_before, _memory_mib(memory, "VmHWM"), _memory_mib(memory, "VmRSS")],
    )


def _lateness(stream: Arrivals, pace: int) -> list[float]:
    """Of each token that came, the seconds since it was due."""
    starts: list[float] = []
    for at, reached in stream.seen:
        while len(starts) < reached:
            starts.append(at - len(starts) / pace)
    earliest = min(starts, default=0.0)
    return [start - earliest for start in starts]


def _is_sustained(stream: Arrivals, pace: int) -> bool:
    return stream.is_done and stream.seen[-1][0] - stream.sent_at - (stream.num_tokens - 1) / pace <= _LATE_S


def _num_between(stream: Arrivals, begin: float, end: float) -> int:
    before = max((reached for at, reached in stream.seen if at < begin), default=0)
    return max((reached for at, reached in stream.seen if at < end), default=0) - before


def _memory_mib(pid: int | None, name: str) -> float | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    kib = next((line.split()[1] for line in status.splitlines() if line.startswith(f"{name}:")), None)
    return round(int(kib) / 1024, 1) if kib is not None else None


def shown_http(result: HttpResult) -> list[RenderableType]:
    """The two runs side by side, what each process took, and how to read it."""
    engine, gateway = result.engine, result.gateway
    rows = [
        ("streams sustained", _sustained(engine), _sustained(gateway), ""),
        ("tokens/s", figure(engine.tokens_per_second), figure(gateway.tokens_per_second), ""),
        *(
            (title, *_of(engine, field, share), *_of(gateway, field, share), _added(result, field, share))
            for title, field, share in (
                ("first token p50, ms", "first_token", "p50"),
                ("first token p99, ms", "first_token", "p99"),
                ("token late p50, ms", "late", "p50"),
                ("token late p99, ms", "late", "p99"),
            )
        ),
        ("memory at the start, MiB", _mib(engine, 0), _mib(gateway, 0), ""),
        ("memory at its peak, MiB", _mib(engine, 1), _mib(gateway, 1), ""),
    ]
    plan = result.plan
    title = f"{plan.num_streams} streams at {plan.pace} tokens/s"
    processes = [
        (f"{run.server}: {name}", _share(run.cpu[name]), _micro(run.cpu_us[name]))
        for run in (engine, gateway)
        for name in run.cpu
    ]
    notes = (
        "engine: the simulated engine's own HTTP server, alone with the client. gateway: one gateway, with broker, "
        "router, monitor, workers and client on the same machine.",
        f"Sustained: all tokens came, the last at most {_LATE_S:g} s later than if the first had come at once. Late: "
        "how much later than its stream's pace a token came; added is gateway less engine.",
        "Where the cores do not suffice, tokens share events and come late; whoever takes a core sets the limit.",
        str(result.machine),
    )
    return [
        table(title, ("", "engine", "gateway", "added"), rows, right=("engine", "gateway", "added")),
        table("CPU", ("process", "cores", "µs per token"), processes, right=("cores", "µs per token")),
        *(Text(note, style="dim") for note in notes),
    ]


def _sustained(run: HttpRun) -> str:
    return f"{run.num_sustained} of {run.num_streams}"


def _value(run: HttpRun, field: str, share: str) -> float | None:
    found: Distribution | None = getattr(run, field)
    return float(getattr(found, share)) if found is not None else None


def _of(run: HttpRun, field: str, share: str) -> tuple[str]:
    value = _value(run, field, share)
    return (figure(value) if value is not None else "-",)


def _added(result: HttpResult, field: str, share: str) -> str:
    ours, theirs = _value(result.gateway, field, share), _value(result.engine, field, share)
    return figure(ours - theirs) if ours is not None and theirs is not None else "-"


def _mib(run: HttpRun, index: int) -> str:
    value = run.rss_mib[index]
    return figure(value) if value is not None else "-"


def _share(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else "-"


def _micro(value: float | None) -> str:
    return figure(value) if value is not None else "-"
