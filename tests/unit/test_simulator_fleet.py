"""Engines that start and stop in virtual time, and the policies of scaling that ours is compared with."""

import msgspec
import pytest
from click.testing import CliRunner

from headrace.bench.scaling import ScalingResult, scaling_command, shown_scaling
from headrace.cli.render import console
from headrace.discipline.scaling import GroupLoad
from headrace.simulator.fleet import FleetOutcome, simulate_fleet
from headrace.simulator.model import EngineModel
from headrace.simulator.scalers import SCALERS, QueueDepth, Scaler, Utilisation
from headrace.simulator.traces import Arrival

MODEL = EngineModel(kv_tokens=4096, max_concurrency=4)
START_S = 5.0


class Told:
    """Wants what it is told: (from second, number) in order of time."""

    def __init__(self, *steps: tuple[float, int]) -> None:
        self._steps = steps

    def wanted(self, load: GroupLoad, now_s: float) -> int:
        """The last number that was told by then."""
        return max((step for step in self._steps if step[0] <= now_s), default=(0.0, 0))[1]


def play(scaler: Scaler, num_arrivals: int = 60, *, every_s: float = 0.2, until_s: float = 800.0) -> FleetOutcome:
    arrivals = [
        Arrival(time_s=10 + every_s * number, prompt_tokens=100, output_tokens=150, max_tokens=200)
        for number in range(num_arrivals)
    ]
    return simulate_fleet(arrivals, scaler, model=MODEL, start_s=START_S, until_s=until_s)


@pytest.mark.parametrize("policy", list(SCALERS))
def test_a_burst_from_zero_is_served_and_it_comes_back(policy: str) -> None:
    outcome = play(SCALERS[policy](6))
    assert all(request.finished_s is not None for request in outcome.requests)
    assert outcome.samples[-1].wanted == (1 if policy == "utilisation" else 0)
    assert max(sample.wanted for sample in outcome.samples) <= 6
    again = play(SCALERS[policy](6))
    assert again.samples == outcome.samples
    assert again.replica_s == outcome.replica_s


def test_nothing_starts_before_an_engine_is_up_and_what_drains_ends_what_it_runs() -> None:
    outcome = play(Told((20.0, 2), (30.0, 1), (35.0, 0), (60.0, 1)))
    starts = [request.started_s for request in outcome.requests if request.started_s is not None]
    assert len(starts) == len(outcome.requests)
    assert min(starts) == pytest.approx(20.0 + START_S, abs=0.1)
    assert not [at for at in starts if 35.1 < at < 60.0 + START_S]
    assert all(request.num_preemptions == 0 for request in outcome.requests)
    in_order = sorted(outcome.requests, key=lambda request: request.started_s or 0.0)
    assert [request.index for request in in_order] == sorted(request.index for request in outcome.requests)


def test_engines_cost_from_their_start_to_their_end() -> None:
    outcome = play(Told((20.0, 1), (22.0, 0), (100.0, 3), (200.0, 0)), num_arrivals=1)
    assert outcome.replica_s == pytest.approx(2 + 3 * 100)
    assert outcome.num_steps == 4


def load(wanted: int, *, queued: int = 0, running: int = 0) -> GroupLoad:
    return GroupLoad(wanted=wanted, num_queued=queued, num_ahead=queued, num_running=running, slots=10)


def test_the_autoscaler_of_kubernetes_steps_as_documented() -> None:
    scaler = Utilisation(50)
    assert scaler.wanted(load(0), 0) == 1
    assert scaler.wanted(load(1, running=10), 0) == 2  # 1.0 / 0.7
    assert scaler.wanted(load(2, running=20), 14) == 2
    assert scaler.wanted(load(2, running=15), 15) == 2  # within the tolerance
    assert scaler.wanted(load(20, running=200), 30) == 29
    assert scaler.wanted(load(29, running=20), 45) == 29  # the window remembers
    assert scaler.wanted(load(29, running=20), 330) == 3


def test_a_queue_of_jobs_is_looked_at_each_30_seconds_while_nothing_runs() -> None:
    scaler = QueueDepth(8)
    assert scaler.wanted(load(0), 0) == 0
    assert scaler.wanted(load(0, queued=99), 29) == 0
    assert scaler.wanted(load(0, queued=99), 30) == 1
    assert scaler.wanted(load(1, queued=99), 31) == 5
    assert scaler.wanted(load(5, queued=99), 46) == 8
    assert scaler.wanted(load(8, queued=1), 400) == 1
    assert scaler.wanted(load(1), 699) == 1
    assert scaler.wanted(load(1), 700) == 0


def test_the_command_shows_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--policy", "expected-wait"]
    answered = CliRunner().invoke(scaling_command, [*only, "--json", "--start", "20"])
    assert answered.exit_code == 0, answered.output
    told = msgspec.json.decode(answered.stdout, type=ScalingResult)
    assert told.start_s == 20
    assert [report.policy for report in told.reports] == ["expected-wait"]
    for part in shown_scaling(told):
        console().print(part)
    assert "engine-hours" in capsys.readouterr().out
