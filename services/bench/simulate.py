"""`headrace bench simulate`: policies compared in virtual time, on made-up or recorded traffic."""

from pathlib import Path
from typing import Final, TextIO

import click
import msgspec
from rich.console import RenderableType
from rich.text import Text

from headrace.bench.tables import figure
from headrace.cli.progress import Progress
from headrace.cli.render import console, table
from headrace.simulator.model import EngineModel
from headrace.simulator.plots import draw_plots
from headrace.simulator.policy import PolicyOptions
from headrace.simulator.report import Report, summarize
from headrace.simulator.scenarios import SCENARIOS, make_trace
from headrace.simulator.simulation import POLICIES, simulate
from headrace.simulator.traces import Arrival, TraceError, read_trace, trace_lines

__all__ = ["SimulateResult", "shown_simulation", "simulate_command"]

_PROGRESS_EVERY: Final = 1000


class SimulateResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was played on what, and a report for each policy."""

    traffic: str
    num_arrivals: int
    num_workers: int
    load: float | None
    seed: int
    warmup_s: float
    model: EngineModel
    reports: tuple[Report, ...]


class _Weight(click.ParamType[tuple[str, float]]):
    """`TENANT=WEIGHT`."""

    name = "TENANT=WEIGHT"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        tenant, _, number = str(value).partition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not tenant or not 0 < weight < 1e6:
            self.fail(f"{value!r}: expected something like light=3, with a weight above 0", param, ctx)
        return tenant, weight


@click.command("simulate")
@click.option(
    "--scenario",
    type=click.Choice(list(SCENARIOS)),
    default="two-tenants",
    show_default=True,
    help="Traffic to make up.",
)
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Traffic to replay instead.",
)
@click.option("--workers", type=click.IntRange(1, 1000), default=8, show_default=True, help="Engines of one kind.")
@click.option(
    "--load", type=click.FloatRange(0.01, 10), help="1 is what ideal engines could do.  [default: the scenario's]"
)
@click.option(
    "--duration", type=click.FloatRange(1, 86_400), default=300.0, show_default=True, help="Seconds of arrivals."
)
@click.option(
    "--warmup", type=click.FloatRange(0, 86_400), default=0.0, show_default=True,
    help="Seconds at the start that latencies and hits leave out.",
)  # fmt: skip
@click.option("--seed", type=int, default=1, show_default=True, help="The same seed gives the same figures.")
@click.option(
    "--policy", "policies", type=click.Choice(list(POLICIES)), multiple=True, help="Default: all; repeatable."
)
@click.option(
    "--weight", "weights", type=_Weight(), multiple=True, help="A tenant's share; 1 if not given; repeatable."
)
@click.option(
    "--fixed-concurrency", type=click.IntRange(1, 10_000), default=32, show_default=True,
    help="Limit per worker of the policy of that name.",
)  # fmt: skip
@click.option("--kv-tokens", type=click.IntRange(16), help="KV cache of an engine.  [default: the scenario's]")
@click.option("--max-concurrency", type=click.IntRange(1), help="Slots of an engine.  [default: the scenario's]")
@click.option("--save-trace", type=click.File("w", encoding="utf-8"), help="Write the traffic there, for --trace.")
@click.option(
    "--plots",
    type=click.Path(file_okay=False, path_type=Path),
    help="Only draw the documentation's plots, into this folder.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def simulate_command(
    *,
    scenario: str,
    trace_file: Path | None,
    workers: int,
    load: float | None,
    duration: float,
    warmup: float,
    seed: int,
    policies: tuple[str, ...],
    weights: tuple[tuple[str, float], ...],
    fixed_concurrency: int,
    kv_tokens: int | None,
    max_concurrency: int | None,
    save_trace: TextIO | None,
    plots: Path | None,
    as_json: bool,
) -> None:
    """Compare how requests are brought to engines: ours and what is used today, in virtual time.

    No broker and no engine runs; engines are modelled (continuous batching, prefix cache, preemption), and our policy
    decides by the functions that worker and router use. Nothing depends on this machine or its clock.

    \b
    headrace           pull: fair queues, memory reserved, requests where their prefix is cached
    round-robin        push to each engine in its turn
    least-requests     push to the engine with the fewest requests in flight
    fixed-concurrency  one queue, a fixed number of requests per engine
    scoring            push by a score of prefix match, queue and memory, as llm-d does
    scoring-balanced   the same with equal weights

    A trace has a JSON object per line: time_s, prompt_tokens, output_tokens, and if wanted max_tokens (1024), tenant,
    lane, prefix (a name) with prefix_tokens. docs/simulator.md says more.
    """  # noqa: D301  # click reads the backspaces
    if trace_file is None and warmup >= duration:
        raise click.BadParameter(f"{warmup:g} s leaves nothing of --duration {duration:g}", param_hint="--warmup")
    with Progress() as progress:
        if plots is not None:
            _write_plots(plots, progress)
            return
        model = _model(scenario, kv_tokens=kv_tokens, max_concurrency=max_concurrency)
        if trace_file is not None:
            arrivals, load = _replayed(trace_file), None
        else:
            load = SCENARIOS[scenario].load if load is None else load
            arrivals = make_trace(
                SCENARIOS[scenario], num_workers=workers, model=model, load=load, duration_s=duration, seed=seed
            )
        if save_trace is not None:
            save_trace.writelines(trace_lines(arrivals))
        options = PolicyOptions(fixed_concurrency=fixed_concurrency, weights=dict(weights))
        reports = []
        for policy in policies or POLICIES:

            def say(num_ended: int, policy: str = policy) -> None:
                if num_ended % _PROGRESS_EVERY == 0:
                    progress.say(f"{policy}: {num_ended:,} of {len(arrivals):,} requests")

            outcome = simulate(
                arrivals, policy, num_workers=workers, model=model, options=options, seed=seed, on_progress=say
            )
            reports.append(summarize(policy, outcome, weights=options.weights, warmup_s=warmup))
    result = SimulateResult(
        traffic=str(trace_file) if trace_file is not None else scenario,
        num_arrivals=len(arrivals),
        num_workers=workers,
        load=load,
        seed=seed,
        warmup_s=warmup,
        model=model,
        reports=tuple(reports),
    )
    if as_json:
        click.echo(msgspec.json.encode(result).decode())
        return
    out = console()
    for part in shown_simulation(result):
        out.print(part)


def shown_simulation(result: SimulateResult) -> list[RenderableType]:
    """The comparison as tables: the whole, then each tenant and lane."""
    load = f", load {result.load:g}" if result.load is not None else ""
    about = (
        f"{result.traffic}{load}: {result.num_arrivals:,} requests, {result.num_workers} engines, seed {result.seed}"
    )
    whole = [
        (
            report.policy,
            f"{report.output_tokens_per_s:,.0f}",
            _percent(report.hit_ratio),
            _percent(report.used_ratio),
            f"{report.num_preemptions:,}",
            "" if report.fairness is None else f"{report.fairness:.3f}",
            f"{report.num_refused:,}",
        )
        for report in result.reports
    ]
    columns = ("", "tokens/s", "prefix hits", "memory used", "preemptions", "fairness", "refused")
    parts: list[RenderableType] = [Text(about), Text(""), table("", columns, whole, right=columns[1:])]
    names = dict.fromkeys((each.tenant, each.lane) for report in result.reports for each in report.classes)
    fields = ("", "requests", "wait p50", "wait p99", "TTFT p50", "TTFT p99")
    for tenant, lane in names:
        rows = [
            (report.policy, f"{each.num_requests:,}", *(figure(value) for value in values))
            for report in result.reports
            for each in report.classes
            if (each.tenant, each.lane) == (tenant, lane)
            for values in [(each.queue_wait_s.p50, each.queue_wait_s.p99, each.ttft_s.p50, each.ttft_s.p99)]
        ]
        parts += [Text(""), table(f"Tenant {tenant}, lane {lane}, seconds", fields, rows, right=fields[1:])]
    return parts


def _model(scenario: str, *, kv_tokens: int | None, max_concurrency: int | None) -> EngineModel:
    model = SCENARIOS[scenario].model
    return msgspec.structs.replace(
        model,
        kv_tokens=model.kv_tokens if kv_tokens is None else kv_tokens,
        max_concurrency=model.max_concurrency if max_concurrency is None else max_concurrency,
    )


def _replayed(path: Path) -> list[Arrival]:
    try:
        with path.open(encoding="utf-8", errors="surrogateescape") as lines:
            return read_trace(lines)
    except (TraceError, OSError) as error:
        raise click.ClickException(f"{path}: {error}") from None


def _write_plots(folder: Path, progress: Progress) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in draw_plots(progress.say).items():
        (folder / name).write_text(content, encoding="utf-8")


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:.1f} %"
