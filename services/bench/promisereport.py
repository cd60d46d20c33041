"""The promises and what was seen of them, for a terminal and as a document."""

from collections.abc import Iterable, Sequence

import msgspec
from rich.console import RenderableType
from rich.text import Text

from headrace.bench.figures import Distribution
from headrace.bench.ground import Machine
from headrace.bench.promises import Fault, Load, Promise
from headrace.bench.simulatedhosts import SimulatedRun
from headrace.bench.tables import figure
from headrace.cli.render import safe, table

__all__ = ["Fleet", "PromisesResult", "as_markdown", "shown_promises"]


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Workers over time: seconds since the start, and by model how many were wanted and ready."""

    at_s: float
    wanted: dict[str, int]
    ready: dict[str, int]


class PromisesResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `bench promises --json` prints. Times of `faults` are seconds since the start."""

    machine: Machine
    hosts_gib: dict[str, int]
    duration_s: float
    seed: int
    promises: list[Promise]
    loads: list[Load]
    faults: list[Fault]
    fleet: list[Fleet]
    simulated: SimulatedRun
    simulated_s: float

    @property
    def holds(self) -> bool:
        """Whether every promise held, in both runs."""
        return all(promise.holds for promise in (*self.promises, *self.simulated.promises))


def shown_promises(result: PromisesResult) -> list[RenderableType]:
    """Tables and notes for a terminal."""
    parts: list[RenderableType] = []
    for title, promises in (
        (f"Real, {result.duration_s:g} s", result.promises),
        (f"Simulated, {result.simulated_s:g} s", result.simulated.promises),
    ):
        rows = [(str(each.number), "held" if each.holds else "BROKEN", safe(each.figures)) for each in promises]
        parts.append(table(title, ("promise", "", "figures"), rows))
    cells = [(each.kind, *_load_cells(each)) for each in result.loads]
    parts.append(table("Requests, ms", ("", *_LOAD_COLUMNS), cells, right=_LOAD_COLUMNS[:1] + _LOAD_COLUMNS[2:]))
    parts.append(Text(str(result.machine), style="dim"))
    return parts


_LOAD_COLUMNS = ("sent", "ended", "start p50", "p99", "first token p50", "p99 ")


def as_markdown(result: PromisesResult, command: str) -> str:
    """The whole report as a document."""
    hosts = ", ".join(f"{host} {gib} GiB" for host, gib in result.hosts_gib.items())
    lines = [
        "# The promises, on three hosts",
        "",
        f"Written by `{command}`. Two models on three hosts that lend unequal memory to workers",
        f"({hosts}), a mixed load of short chats, long summaries and a batch, and faults on the way:",
        "a worker killed, one stopped for some seconds, the agent of the fullest host killed and started again. The",
        "promises are those of the design; the figures say whether they held. All parts, the engines (simulated: a set",
        f"speed, a set memory) and the readers share one machine: {result.machine}.",
        "",
        f"## {result.duration_s:g} real seconds",
        "",
        *_promises(result.promises),
        "",
        *_markdown(("requests", *_LOAD_COLUMNS), [(each.kind, *_load_cells(each)) for each in result.loads]),
        "",
        "Times are milliseconds at the reader. `unserved` are requests for a model without workers and with a queue of",
        "five: the rest is refused at once, the five end when their time in the queue is over.",
        "",
        *_markdown(("fault", "of", "after"), [(each.kind, each.who, f"{each.at:.0f} s") for each in result.faults]),
        "",
        "Workers ready, of those wanted:",
        "",
        *_fleet(result.fleet),
        "",
        f"## {result.simulated_s:g} simulated seconds",
        "",
        "The same rules in virtual time, with engines as fast as real ones and as many requests as they take. The host",
        "agents' own plan places the replicas:",
        "",
        *_placed(result.simulated),
        "",
        *_promises(result.simulated.promises),
        "",
        *_markdown(
            ("requests", "ended", "wait p50, s", "wait p99, s", "longest, s"),
            [
                (each.kind, str(each.num_done), *_spread(each.wait_s, ("p50", "p99", "max")))
                for each in result.simulated.kinds
            ],
        ),
        "",
        "Virtual time shows no broker and no faults, so promises 2 and 4 are shown by the real run alone; 6, that one",
        "process is enough to start, by the tests of `headrace up`.",
        "",
    ]
    return "\n".join(lines)


def _promises(promises: Iterable[Promise]) -> list[str]:
    rows = [(str(each.number), each.text, "held" if each.holds else "**broken**", each.figures) for each in promises]
    return _markdown(("", "promise", "", "figures"), rows)


def _fleet(fleet: Sequence[Fleet]) -> list[str]:
    models = sorted(fleet[0].ready) if fleet else []
    rows = [
        (f"{look.at_s:.0f} s", *(f"{look.ready[model]} of {look.wanted[model]}" for model in models)) for look in fleet
    ]
    return _markdown(("after", *models), rows)


def _placed(run: SimulatedRun) -> list[str]:
    models = list(run.most)
    rows = [(host, *(str(on[model]) for model in models)) for host, on in run.placed.items()]
    return _markdown(
        ("replicas at most", *models), [*rows, ("ready at most", *(str(run.most[each]) for each in models))]
    )


def _load_cells(load: Load) -> tuple[str, ...]:
    ends = ", ".join(f"{number} {end}" for end, number in load.ends.items())
    return (
        str(load.num_sent),
        ends,
        *_spread(load.wait_ms, ("p50", "p99")),
        *_spread(load.first_token_ms, ("p50", "p99")),
    )


def _spread(found: Distribution | None, figures: Sequence[str]) -> tuple[str, ...]:
    return tuple(figure(getattr(found, each)) if found is not None else "" for each in figures)


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
