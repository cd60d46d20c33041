"""`headrace bench promises`: every promise of the design on a mixed load over three hosts, real and simulated."""

from pathlib import Path

import click
import msgspec

from headrace.bench.ground import machine, measure
from headrace.bench.promisereport import Fleet, PromisesResult, as_markdown, shown_promises
from headrace.bench.promises import Run, judge, loads
from headrace.bench.simulatedhosts import simulate_hosts
from headrace.bench.threehosts import HOSTS_GIB, MODELS, play_three_hosts
from headrace.cli.options import with_settings
from headrace.cli.progress import Progress
from headrace.cli.render import console
from headrace.errors import HeadraceError
from headrace.settings import Settings

__all__ = ["promises_command"]

_FLEET_ROWS = 12


@click.command("promises")
@click.option(
    "--duration", "duration_s", type=click.FloatRange(20, 3600), default=120.0, show_default=True,
    help="Real seconds of load.",
)  # fmt: skip
@click.option(
    "--simulated", "simulated_s", type=click.FloatRange(20, 36_000), default=600.0, show_default=True,
    help="Simulated seconds of load.",
)  # fmt: skip
@click.option("--seed", type=int, default=1, show_default=True, help="The same seed sends the same requests.")
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), help="Write a report in Markdown there too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@with_settings
def promises_command(
    settings: Settings, duration_s: float, simulated_s: float, seed: int, report: Path | None, as_json: bool
) -> None:
    """Play a mixed load on three hosts, lose workers and a host on the way, and judge each promise of the design.

    Short chats, long summaries and a batch at two models; host agents with 2, 4 and 6 GiB; a worker killed, one stopped
    for some seconds, the agent of the fullest host killed and started again. Then the same in virtual time. Ends with
    an error where a promise was broken.
    """
    where = machine()

    async def body(progress: Progress) -> tuple[Run, float]:
        run = await play_three_hosts(settings, progress, duration_s=duration_s, seed=seed)
        progress.say(f"simulating {simulated_s:g} s")
        return run, min(sent.sent_at for sent in run.sent)

    run, began = measure(body)
    simulated = simulate_hosts(HOSTS_GIB, MODELS, duration_s=simulated_s, seed=seed)
    result = PromisesResult(
        machine=where, hosts_gib=dict(HOSTS_GIB), duration_s=duration_s, seed=seed, promises=judge(run),
        loads=loads(run),
        faults=[msgspec.structs.replace(fault, at=fault.at - began) for fault in run.faults],
        fleet=[
            Fleet(at_s=look.at_s, wanted=dict(look.wanted), ready=dict(look.ready))
            for look in run.looks[:: max(1, len(run.looks) // _FLEET_ROWS)]
        ],
        simulated=simulated, simulated_s=simulated_s,
    )  # fmt: skip
    if report is not None:
        report.write_text(as_markdown(result, f"headrace bench promises --seed {seed}"), encoding="utf-8")
    if as_json:
        click.echo(msgspec.json.encode(result).decode())
    else:
        out = console()
        for part in shown_promises(result):
            out.print(part)
    if not result.holds:
        raise HeadraceError("a promise was broken; the figures above say which")
