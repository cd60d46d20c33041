"""`headrace bench scaling`: ways to choose the number of engines, compared in virtual time."""

import click
import msgspec
from rich.console import RenderableType
from rich.text import Text

from headrace.bench.tables import figure
from headrace.cli.progress import Progress
from headrace.cli.render import console, table
from headrace.simulator.fleetplots import MAX_REPLICAS, START_S, FleetReport, play_fleets
from headrace.simulator.scalers import SCALERS

__all__ = ["ScalingResult", "scaling_command", "shown_scaling"]


class ScalingResult(msgspec.Struct, frozen=True, kw_only=True):
    """How long an engine took to start, and a report for each policy."""

    start_s: float
    seed: int
    reports: tuple[FleetReport, ...]


@click.command("scaling")
@click.option(
    "--start", "start_s", type=click.FloatRange(0, 600), default=START_S, show_default=True,
    help="Seconds until a new engine is up.",
)  # fmt: skip
@click.option("--seed", type=int, default=1, show_default=True, help="The same seed gives the same figures.")
@click.option("--policy", "policies", type=click.Choice(list(SCALERS)), multiple=True, help="Default: all; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def scaling_command(*, start_s: float, seed: int, policies: tuple[str, ...], as_json: bool) -> None:
    """Compare ways to choose the number of engines, on a burst from zero and back, in virtual time.

    \b
    expected-wait      ours: jobs without a slot × time of a job ÷ slots, against a target of 5 s
    expected-wait-15   the same, with 15 s between two steps down
    queue-depth        jobs per engine, as KEDA does
    utilisation        slots in use, as the autoscaler of Kubernetes does; keeps one engine
    """  # noqa: D301  # click reads the backspaces
    reports = []
    with Progress() as progress:
        for report, _ in play_fleets(start_s=start_s, seed=seed, policies=policies or tuple(SCALERS)):
            progress.say(report.policy)
            reports.append(report)
    result = ScalingResult(start_s=start_s, seed=seed, reports=tuple(reports))
    if as_json:
        click.echo(msgspec.json.encode(result).decode())
        return
    out = console()
    for part in shown_scaling(result):
        out.print(part)


def shown_scaling(result: ScalingResult) -> list[RenderableType]:
    """The comparison as a table."""
    columns = ("", "wait p50", "wait p99", "longest", "above 5 s", "engine-hours", "most", "steps")
    rows = [
        (
            report.policy,
            *(figure(value) for value in (report.wait_s.p50, report.wait_s.p99, report.wait_s.max)),
            f"{100 * report.late_ratio:.1f} %",
            f"{report.engine_hours:.2f}",
            str(report.most),
            str(report.num_steps),
        )
        for report in result.reports
    ]
    about = f"from zero and back, engines up after {result.start_s:g} s, {MAX_REPLICAS} at most, seed {result.seed}"
    return [Text(about), Text(""), table("", columns, rows, right=columns[1:])]
