"""`headrace bench`: its measurements, what they print, and what to make of it."""

import click
import msgspec
from rich.console import RenderableType

from headrace.bench.dispatch import measure_dispatch, shown_dispatch
from headrace.bench.failover import KINDS, measure_failover, shown_failover
from headrace.bench.ground import measure
from headrace.bench.httpedge import measure_http, shown_http
from headrace.bench.httpload import StreamPlan
from headrace.bench.overhead import OverheadPlan, measure_overhead, shown_overhead
from headrace.bench.promisescommand import promises_command
from headrace.bench.relay import measure_relay, shown_relay
from headrace.bench.scaling import scaling_command
from headrace.bench.simulate import simulate_command
from headrace.cli.options import parse_assignments, with_settings
from headrace.cli.render import console
from headrace.cli.serve import DEFAULT_MODEL
from headrace.settings import Settings

__all__ = ["bench"]

_json = click.option("--json", "as_json", is_flag=True, help="One JSON object, with the single samples.")


@click.group()
def bench() -> None:
    """Measure a deployment of its own: real broker, real processes, the simulated engine.

    All but `overhead`, which has a real engine, and `simulate` and `scaling`, which start nothing and compare policies
    in virtual time.

    Nothing that runs already is touched, and nothing is left behind. HEADRACE_* variables apply to what is measured, so
    HEADRACE_HEARTBEAT_S=0.2 shows what a faster heartbeat does.

    Everything shares this machine, the client that measures too, so figures are ratios before they are times: read
    them beside the plain NATS figures of the same run, and measure on a machine that does nothing else. No network
    lies between the parts.
    """


@bench.command()
@click.option("--kills", type=click.IntRange(1, 1000), default=20, show_default=True, help="Workers lost, each kind.")
@click.option("--streams", type=click.IntRange(1, 200), default=1, show_default=True, help="Streams open at each.")
@click.option("--pace", type=click.IntRange(1, 1000), default=50, show_default=True, help="Tokens per second of each.")
@click.option(
    "--survivors",
    type=click.IntRange(0, 8),
    default=0,
    show_default=True,
    help="All streams on one worker; so many others join, idle, before it is lost. 0: two share the streams.",
)
@click.option("--kind", "kinds", type=click.Choice(list(KINDS)), multiple=True, help="Default: all; repeatable.")
@_json
@with_settings
def failover(
    settings: Settings,
    kills: int,
    streams: int,
    pace: int,
    survivors: int,
    kinds: tuple[str, ...],
    as_json: bool,
) -> None:
    """How long a stream stands still when the worker that produces it is lost.

    Two workers run; one is killed (SIGKILL) or stopped (SIGSTOP, a hang) in mid-stream, then replaced. Two times are
    taken at the client: from the signal to `started` on the other worker, and from the last token before to the first
    token after. Every stream is read to its end; a token lost or doubled fails the measurement. The tokens that all
    streams make meanwhile take their share of the machine: --pace says how many.

    \b
    kill             SIGKILL; the monitor hears of broken connections from the broker's system account
    kill-no-notices  SIGKILL; the monitor has no system account and waits for beats that do not come
    hang             SIGSTOP; the connection stays, only the beats stop
    """  # noqa: D301  # click reads the backspaces
    chosen = list(kinds) or list(KINDS)
    result = measure(
        lambda progress: measure_failover(
            settings, progress, kinds=chosen, num_kills=kills, num_streams=streams, pace=pace, num_survivors=survivors
        )
    )
    _show(result, shown_failover(result), as_json=as_json)


@bench.command()
@click.option("--requests", type=click.IntRange(10, 100_000), default=200, show_default=True, help="Idle, one by one.")
@click.option("--rate", type=click.IntRange(1, 2000), default=100, show_default=True, help="Jobs a second under load.")
@click.option("--seconds", type=click.FloatRange(0.5, 30), default=5.0, show_default=True, help="Time under load.")
@_json
@with_settings
def dispatch(settings: Settings, requests: int, rate: int, seconds: float, as_json: bool) -> None:
    """How long a request takes to reach a worker, and its first events to reach the client.

    Once with nothing else to do, one request at a time, and once at a steady rate of jobs. In between, in the same
    run, a plain NATS round trip and an acknowledged JetStream publish with a fetch are timed: what the way would cost
    without Headrace.
    """
    result = measure(
        lambda progress: measure_dispatch(settings, progress, num_requests=requests, rate=rate, seconds=seconds)
    )
    _show(result, shown_dispatch(result), as_json=as_json)


@bench.command()
@click.option("--streams", type=click.IntRange(1, 500), default=32, show_default=True, help="Streams at once.")
@click.option(
    "--tokens",
    type=click.IntRange(1000, 1_000_000),
    default=16_000,
    show_default=True,
    help="Tokens of a run.",
)
@click.option(
    "--pace", type=click.IntRange(1, 1000), default=50, show_default=True, help="Tokens per second of a paced stream."
)
@click.option("--rounds", type=click.IntRange(1, 20), default=3, show_default=True, help="Repetitions, taken in turns.")
@_json
@with_settings
def relay(settings: Settings, streams: int, tokens: int, pace: int, rounds: int, as_json: bool) -> None:
    """How many tokens a second go through one worker, and the CPU time each costs.

    What is measured is the way from the engine to the client: appended to the job log, republished, read. First the
    engine makes tokens as fast as it is let, for one stream and for many; then many streams run at the pace of a real
    engine. Between them plain NATS messages of similar size. CPU times need Linux's /proc.
    """
    result = measure(
        lambda progress: measure_relay(
            settings, progress, num_streams=streams, num_tokens=tokens, pace=pace, num_rounds=rounds
        )
    )
    _show(result, shown_relay(result), as_json=as_json)


@bench.command()
@click.option("--streams", type=click.IntRange(1, 4000), default=1000, show_default=True, help="Streams at once.")
@click.option("--pace", type=click.IntRange(1, 1000), default=20, show_default=True, help="Tokens per second of each.")
@click.option("--rate", type=click.IntRange(1, 2000), default=200, show_default=True, help="Streams opened a second.")
@click.option(
    "--seconds", type=click.FloatRange(0.5, 60), default=10.0, show_default=True, help="Time with all streams open."
)
@click.option("--workers", type=click.IntRange(1, 16), default=2, show_default=True, help="Worker processes.")
@_json
@with_settings
def http(settings: Settings, streams: int, pace: int, rate: int, seconds: float, workers: int, as_json: bool) -> None:
    """Many slow streams through one gateway, next to the same load on the engine's own HTTP server.

    The simulated engine makes tokens at a steady pace for each stream; counted is how late each token is at the
    client, and how many streams came to their end in time. What has not come some seconds after it was due is given
    up. The first run has the engine alone on the machine, the second everything that a deployment is made of.
    """
    plan = StreamPlan(num_streams=streams, pace=pace, rate=rate, seconds=seconds)
    result = measure(lambda progress: measure_http(settings, progress, plan=plan, num_workers=workers))
    _show(result, shown_http(result), as_json=as_json)


@bench.command()
@click.option(
    "--engine", type=click.Choice(["llama", "vllm"]), default="llama", show_default=True, help="Started for it."
)
@click.option("--model", metavar="NAME", default=DEFAULT_MODEL, show_default=True, help="The model's name.")
@click.option("--streams", type=click.IntRange(1, 1000), default=8, show_default=True, help="Streams at once.")
@click.option("--tokens", type=click.IntRange(1, 100_000), default=64, show_default=True, help="Tokens of each.")
@click.option("--single", type=click.IntRange(1, 1000), default=5, show_default=True, help="Chats alone, each round.")
@click.option("--rounds", type=click.IntRange(1, 100), default=4, show_default=True, help="Repetitions, in turns.")
@click.option(
    "-o", "--option", "options", multiple=True, callback=parse_assignments, metavar="KEY=VALUE",
    help="An option of the engine; repeatable.",
)  # fmt: skip
@_json
@with_settings
def overhead(
    settings: Settings,
    engine: str,
    model: str,
    streams: int,
    tokens: int,
    single: int,
    rounds: int,
    options: dict[str, str],
    as_json: bool,
) -> None:
    """What Headrace adds before a real engine: time to the first token, and throughput.

    The same chats go to the engine's own HTTP server and through gateway, router, broker and worker, in turns, in one
    run and to one engine process.
    """
    plan = OverheadPlan(
        engine=engine, model=model, num_streams=streams, num_tokens=tokens, num_single=single, num_rounds=rounds
    )
    result = measure(lambda progress: measure_overhead(settings, progress, plan=plan, options=options))
    _show(result, shown_overhead(result), as_json=as_json)


bench.add_command(promises_command)
bench.add_command(simulate_command)
bench.add_command(scaling_command)


def _show(result: msgspec.Struct, shown: list[RenderableType], *, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(result).decode())
        return
    out = console()
    for part in shown:
        out.print(part)
