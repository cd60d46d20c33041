"""A burst from zero and back under each policy of scaling: its figures, and how it went over time."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from headrace.simulator.charts import Chart, Line, svg
from headrace.simulator.fleet import FleetOutcome, Sample, simulate_fleet
from headrace.simulator.report import Spread, spread
from headrace.simulator.requests import Request
from headrace.simulator.scalers import SCALERS
from headrace.simulator.scenarios import SCENARIOS, make_trace

__all__ = ["MAX_REPLICAS", "START_S", "FleetReport", "draw_fleet_plots", "play_fleets"]

MAX_REPLICAS: Final = 8
START_S: Final = 5.0
_SCENARIO: Final = "from-zero"
_ARRIVALS_S: Final = 1170.0
_UNTIL_S: Final = 2070.0
_TARGET_S: Final = 5.0
_SEED: Final = 1
_POINT_S: Final = 5.0
_WINDOW_S: Final = 20.0
_LEAST_WAIT_S: Final = 0.01
_TIME_LABEL: Final = "seconds"


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """One policy: waits from arrival to the first computing, the part of them above the target, engine-hours, steps."""

    policy: str
    num_done: int
    wait_s: Spread
    late_ratio: float
    engine_hours: float
    num_steps: int
    most: int


def play_fleets(
    *, start_s: float = START_S, seed: int = _SEED, policies: Iterable[str] = tuple(SCALERS)
) -> Iterator[tuple[FleetReport, FleetOutcome]]:
    """Each policy on the same traffic; it goes on long enough for all to come back to where they began."""
    scenario = SCENARIOS[_SCENARIO]
    arrivals = make_trace(
        scenario, num_workers=1, model=scenario.model, load=scenario.load, duration_s=_ARRIVALS_S, seed=seed
    )
    for policy in policies:
        outcome = simulate_fleet(
            arrivals,
            SCALERS[policy](MAX_REPLICAS),
            model=scenario.model,
            start_s=start_s,
            until_s=_UNTIL_S,
            seed=seed,
        )
        yield _report(policy, outcome), outcome


def draw_fleet_plots(on_progress: Callable[[str], None] | None = None) -> dict[str, str]:
    """File names and contents; takes some ten seconds."""
    outcomes: dict[str, FleetOutcome] = {}
    for report, outcome in play_fleets():
        if on_progress is not None:
            on_progress(f"{_SCENARIO}: {report.policy}")
        outcomes[report.policy] = outcome
    ours = outcomes["expected-wait"]
    wanted = Line("expected-wait: wanted", _course(ours, lambda sample: sample.wanted))
    ready = [Line(f"{policy}: up", _course(outcomes[policy], lambda sample: sample.ready)) for policy in outcomes]
    waiting = [Line(policy, _course(outcomes[policy], lambda sample: sample.num_waiting)) for policy in outcomes]
    return {
        "scaling-replicas.svg": _over_time("From zero and back: engines", "engines", [wanted, *ready]),
        "scaling-queue.svg": _over_time("From zero and back: requests that wait", "requests", waiting),
        "scaling-wait.svg": _over_time(
            "From zero and back: wait, p50 and p99 of 20 s of arrivals",
            "seconds",
            [
                Line(f"{policy}: {which}", _waits(outcomes[policy], which))
                for policy in ("expected-wait", "queue-depth", "utilisation")
                for which in ("p50", "p99")
            ],
            is_log=True,
        ),
    }


def _report(policy: str, outcome: FleetOutcome) -> FleetReport:
    waits = list(map(_wait_s, outcome.requests))
    waited = spread(waits)
    assert waited is not None
    return FleetReport(
        policy=policy,
        num_done=len(waits),
        wait_s=waited,
        late_ratio=sum(wait > _TARGET_S for wait in waits) / len(waits),
        engine_hours=outcome.replica_s / 3600,
        num_steps=outcome.num_steps,
        most=max(sample.wanted for sample in outcome.samples),
    )


def _over_time(title: str, y_label: str, lines: Sequence[Line], *, is_log: bool = False) -> str:
    return svg(
        Chart(title=title, x_label=_TIME_LABEL, y_label=y_label, lines=tuple(lines), is_log=is_log, has_round_x=True)
    )


def _course(outcome: FleetOutcome, figure: Callable[[Sample], float]) -> tuple[tuple[float, float], ...]:
    return tuple((each.time_s, float(figure(each))) for each in outcome.samples if each.time_s % _POINT_S == 0)


def _waits(outcome: FleetOutcome, which: str) -> tuple[tuple[float, float], ...]:
    """A quantile of the waits of each window's arrivals, at the window's middle."""
    windows: Mapping[int, list[float]] = defaultdict(list)
    for request in outcome.requests:
        windows[int(request.arrival.time_s // _WINDOW_S)].append(_wait_s(request))
    found = []
    for number in sorted(windows):
        waited = spread(windows[number])
        assert waited is not None
        found.append(((number + 0.5) * _WINDOW_S, max(_LEAST_WAIT_S, float(getattr(waited, which)))))
    return tuple(found)


def _wait_s(request: Request) -> float:
    assert request.started_s is not None
    return request.started_s - request.arrival.time_s
