"""`headrace bench overhead`: a real engine asked directly and through Headrace, in turns, with the same load."""

import itertools
import time
from typing import Final

import msgspec
from rich.console import RenderableType
from rich.text import Text

from headrace.bench.engineload import Answered, ask_all
from headrace.bench.figures import Distribution, distribution, in_ms, middle
from headrace.bench.ground import Ground, Machine, ground, machine
from headrace.bench.tables import figure
from headrace.bench.usage import usage
from headrace.bus.heartbeats import WorkersBucket
from headrace.cli.http import free_port, load_gateway
from headrace.cli.progress import Progress
from headrace.cli.render import table
from headrace.errors import HeadraceError
from headrace.settings import Settings

__all__ = ["OverheadPlan", "OverheadResult", "measure_overhead", "shown_overhead"]

_TOKENS_PER_SLOT: Final = 64
"""KV tokens a stream may take for its prompt, template included, with llama.cpp."""
_FIRST_NUMBER: Final = 100_001


class OverheadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked in each round of each server: `num_single` chats one by one, then `num_streams` at once."""

    engine: str
    model: str
    num_streams: int
    num_tokens: int
    num_single: int
    num_rounds: int


class OverheadRun(msgspec.Struct, frozen=True, kw_only=True):
    """One server over all rounds. Times in ms: to the first token of a chat that is alone, and of one among many.

    `tokens_per_second` is of each round, with all streams, `median` their middle.
    """

    server: str
    alone: Distribution | None
    among: Distribution | None
    tokens_per_second: list[float]
    median: float


class OverheadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `bench overhead --json` prints. `throughput_ratio` is Headrace's median over the engine's own; `added_ms`
    the difference of the medians to the first token of a chat that is alone. `cpu_us` is the CPU time that each part of
    Headrace took for a token while it was asked with all streams, in microseconds; what the system does not tell is
    None.
    """

    machine: Machine
    plan: OverheadPlan
    version: str
    engine: OverheadRun
    headrace: OverheadRun
    throughput_ratio: float
    added_ms: float
    cpu_us: dict[str, float | None]


class _Server:
    """One way to the engine, and what came by it."""

    def __init__(self, name: str, url: str, pids: dict[str, int | None]) -> None:
        self.name = name
        self.url = url
        self._pids = pids
        self._cpu_s: list[dict[str, float | None]] = []
        self._alone: list[Answered] = []
        self._among: list[Answered] = []
        self._rates: list[float] = []

    async def ask(self, plan: OverheadPlan, numbers: "itertools.count[int]") -> None:
        for _ in range(plan.num_single):
            self._alone += await ask_all(self.url, plan.model, [next(numbers)], num_tokens=plan.num_tokens)
        before, began = usage(self._pids), time.monotonic()
        among = await ask_all(
            self.url, plan.model, list(itertools.islice(numbers, plan.num_streams)), num_tokens=plan.num_tokens
        )
        self._rates.append(round(sum(each.num_tokens for each in among) / (time.monotonic() - began), 1))
        self._cpu_s.append(usage(self._pids).since(before))
        self._among += among

    @property
    def cpu_us(self) -> dict[str, float | None]:
        num_tokens = sum(each.num_tokens for each in self._among)
        found: dict[str, float | None] = {}
        for name in self._pids:
            spent = [each[name] for each in self._cpu_s]
            known = [each for each in spent if each is not None]
            found[name] = round(1e6 * sum(known) / num_tokens, 1) if len(known) == len(spent) else None
        return found

    @property
    def run(self) -> OverheadRun:
        return OverheadRun(
            server=self.name,
            alone=distribution(in_ms(each.first_token_s for each in self._alone)),
            among=distribution(in_ms(each.first_token_s for each in self._among)),
            tokens_per_second=self._rates,
            median=middle(self._rates),
        )


async def measure_overhead(
    settings: Settings, progress: Progress, *, plan: OverheadPlan, options: dict[str, str]
) -> OverheadResult:
    """One engine process serves both; who is asked first changes from round to round. Raises HeadraceError."""
    load_gateway()
    where = machine()
    http_port = free_port("127.0.0.1", 0)
    assert http_port is not None
    is_told = "--max-num-seqs" in options.get("args", "").replace("_", "-")
    if plan.engine == "llama":
        options = {"n_ctx": str(plan.num_streams * (plan.num_tokens + _TOKENS_PER_SLOT)), **options}
    progress.say(f"starting engine {plan.engine}")
    async with ground(
        settings, progress, engine=plan.engine, model=plan.model, options=options,
        max_concurrency=None if is_told else plan.num_streams, http_port=http_port,
    ) as field:  # fmt: skip
        port, version = await _engine_of(field)
        parts: dict[str, int | None] = {part.name: part.pid for part in (*field.stack.services, *field.stack.workers)}
        servers = [
            _Server("engine", f"http://127.0.0.1:{port}", {}),
            _Server("headrace", f"http://127.0.0.1:{http_port}", {**parts, "broker": field.broker.pid}),
        ]
        numbers = itertools.count(_FIRST_NUMBER)
        for server in servers:
            progress.say(f"warming up: {server.name}")
            await ask_all(server.url, plan.model, list(itertools.islice(numbers, plan.num_streams)), num_tokens=4)
        for number in range(plan.num_rounds):
            for server in servers if number % 2 == 0 else reversed(servers):
                progress.say(f"round {number + 1} of {plan.num_rounds}: {server.name}")
                await server.ask(plan, numbers)
    engine, ours = (server.run for server in servers)
    assert engine.alone is not None
    assert ours.alone is not None
    return OverheadResult(
        machine=where,
        plan=plan,
        version=version,
        engine=engine,
        headrace=ours,
        throughput_ratio=round(ours.median / engine.median, 4),
        added_ms=round(ours.alone.p50 - engine.alone.p50, 3),
        cpu_us=servers[1].cpu_us,
    )


async def _engine_of(field: Ground) -> tuple[int, str]:
    """The port of the engine's own server, and what it is."""
    for seen in (await WorkersBucket(field.client.bus).list()).values():
        if seen.beat is not None and seen.beat.port is not None:
            return seen.beat.port, f"{seen.beat.engine} {seen.beat.version}"
    raise HeadraceError("the engine has no HTTP server of its own")


def shown_overhead(result: OverheadResult) -> list[RenderableType]:
    """The two ways side by side, and how to read it."""
    engine, ours, plan = result.engine, result.headrace, result.plan
    rows = [
        ("tokens/s, median of the rounds", figure(engine.median), figure(ours.median), _percent(result)),
        ("tokens/s, least to most", _span(engine), _span(ours), ""),
    ]
    for title, field, share in (
        ("first token alone p50, ms", "alone", "p50"),
        ("first token alone max, ms", "alone", "max"),
        (f"first token of {plan.num_streams} at once p50, ms", "among", "p50"),
        (f"first token of {plan.num_streams} at once max, ms", "among", "max"),
    ):
        theirs, mine = (getattr(getattr(run, field), share) for run in (engine, ours))
        sign = "+" if mine >= theirs else "-"
        rows.append((title, figure(theirs), figure(mine), f"{sign}{figure(abs(mine - theirs))}"))
    shares = [f"{name} {figure(each)}" for name, each in result.cpu_us.items() if each is not None]
    notes = (
        f"{plan.num_streams} streams of {plan.num_tokens} tokens at once, {plan.num_single} chats alone, in each of "
        f"{plan.num_rounds} rounds; both ways in turns, over HTTP, to one process of the engine.",
        "engine: its own HTTP server. headrace: gateway, router, broker and worker before it, which take the same "
        "cores as the engine and the client.",
        f"CPU time of Headrace for each token, in µs: {', '.join(shares) or 'not known'}.",
        str(result.machine),
    )
    return [
        table(
            f"{result.version}, model {plan.model}",
            ("", "engine", "headrace", "difference"),
            rows,
            right=("engine", "headrace", "difference"),
        ),
        *(Text(note, style="dim") for note in notes),
    ]


def _percent(result: OverheadResult) -> str:
    return f"{100 * result.throughput_ratio:.1f} %"


def _span(run: OverheadRun) -> str:
    return f"{figure(min(run.tokens_per_second))} to {figure(max(run.tokens_per_second))}"
