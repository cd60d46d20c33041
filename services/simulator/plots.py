"""The plots of the documentation: policies over load, as files whose bytes depend on nothing but the code."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from headrace.simulator.charts import Chart, Line, svg
from headrace.simulator.fleetplots import draw_fleet_plots
from headrace.simulator.policy import PolicyOptions
from headrace.simulator.report import Report, summarize
from headrace.simulator.scenarios import SCENARIOS, make_trace
from headrace.simulator.simulation import POLICIES, simulate

__all__ = ["LOADS", "draw_plots", "sweep"]

LOADS: Final = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)
_NUM_WORKERS: Final = 8
_DURATION_S: Final = 180.0
_WARMUP_S: Final = 60.0
_SEED: Final = 1
_LOAD_LABEL: Final = "load (1 = the engines in ideal conditions)"


def sweep(
    scenario: str,
    *,
    loads: Sequence[float],
    policies: Sequence[str],
    duration_s: float = _DURATION_S,
    warmup_s: float = _WARMUP_S,
    seed: int = _SEED,
    on_progress: Callable[[str], None] | None = None,
) -> Iterator[tuple[float, Report]]:
    """A report for each load and policy, by load, then in the order given; eight engines as the scenario has them."""
    chosen = SCENARIOS[scenario]
    for load in loads:
        trace = make_trace(
            chosen, num_workers=_NUM_WORKERS, model=chosen.model, load=load, duration_s=duration_s, seed=seed
        )
        for policy in policies:
            if on_progress is not None:
                on_progress(f"{scenario}, load {load:g}: {policy}")
            outcome = simulate(
                trace, policy, num_workers=_NUM_WORKERS, model=chosen.model, options=PolicyOptions(), seed=seed
            )
            yield load, summarize(policy, outcome, weights={}, warmup_s=warmup_s)


def draw_plots(on_progress: Callable[[str], None] | None = None) -> dict[str, str]:
    """File names and contents of all plots; takes a minute or two."""
    policies = list(POLICIES)
    prefixes = _by_policy(sweep("prefixes", loads=LOADS, policies=policies, on_progress=on_progress))
    tenants = _by_policy(sweep("two-tenants", loads=LOADS, policies=policies, on_progress=on_progress))

    def chart(
        title: str, y_label: str, swept: Mapping[str, list[tuple[float, Report]]], figure: Callable[[Report], float]
    ) -> Chart:
        lines = tuple(
            Line(policy, tuple((load, figure(report)) for load, report in swept[policy])) for policy in policies
        )
        return Chart(title=title, x_label=_LOAD_LABEL, y_label=y_label, lines=lines)

    hits = chart("80 shared prefixes: cache hits", "cached part of the prefixes", prefixes, _hit_ratio)
    ttft = chart("80 shared prefixes: p99 time to first token", "seconds", prefixes, _p99_ttft_s)
    rate = chart("80 shared prefixes: throughput", "output tokens per second", prefixes, _output_tokens_per_s)
    light = chart("Light tenant beside a bursty one: p99 time to first token", "seconds", tenants, _light_p99_ttft_s)
    preempted = chart("Light tenant beside a bursty one: preemptions", "requests", tenants, _num_preemptions)
    return draw_fleet_plots(on_progress) | {
        "prefixes-hits.svg": svg(_with(hits, y_range=(0.5, 1.0))),
        "prefixes-ttft.svg": svg(_with(ttft, is_log=True)),
        "prefixes-throughput.svg": svg(rate),
        "two-tenants-ttft.svg": svg(_with(light, is_log=True)),
        "two-tenants-preemptions.svg": svg(preempted),
    }


def _by_policy(reports: Iterator[tuple[float, Report]]) -> dict[str, list[tuple[float, Report]]]:
    found: dict[str, list[tuple[float, Report]]] = {}
    for load, report in reports:
        found.setdefault(report.policy, []).append((load, report))
    return found


def _with(chart: Chart, *, is_log: bool = False, y_range: tuple[float, float] | None = None) -> Chart:
    return Chart(
        title=chart.title,
        x_label=chart.x_label,
        y_label=chart.y_label,
        lines=chart.lines,
        is_log=is_log,
        y_range=y_range,
    )


def _hit_ratio(report: Report) -> float:
    return report.hit_ratio or 0.0


def _p99_ttft_s(report: Report) -> float:
    assert report.ttft_s is not None
    return report.ttft_s.p99


def _output_tokens_per_s(report: Report) -> float:
    return report.output_tokens_per_s


def _light_p99_ttft_s(report: Report) -> float:
    return next(each.ttft_s.p99 for each in report.classes if each.tenant == "light")


def _num_preemptions(report: Report) -> float:
    return float(report.num_preemptions)
