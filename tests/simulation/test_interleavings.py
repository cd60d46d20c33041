"""Real routers, workers and monitors against a model of the broker, interleaved at every await, with faults.

`pytest tests/simulation --simulation-examples 10000` plays more schedules, and others each time. A schedule that breaks
a rule is shrunk and printed; its `Scenario(...)` replays it exactly.
"""

from collections.abc import Callable, Iterable, Sequence
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from headrace.discipline.company import Asking, Guest
from headrace.worker.claim import Action as Row
from headrace.worker.claim import Decision, Situation, decide
from tests.simulation.broker import Faults
from tests.simulation.scenarios import require_no_problem, scenarios
from tests.simulation.schedule import Action, Scenario, Violation
from tests.simulation.world import play

_NUM_EXAMPLES = 100
_NUM_SEEDS = 15
_NUM_TO_CATCH = 40

# Shapes of schedules that once broke a rule, each played with several seeds.
FOUND = {
    "a second worker is lost in mid-stream": Scenario(
        actions=(
            Action("submit", 0.2, 0, 0.5),
            Action("die", 0.4, 10),
            Action("kill", 0.3, 10, 2.5, after_lines=5),
        ),
        faults=Faults(delay_s=0.0003),
        num_workers=1,
        num_tokens=6,
        token_s=0.3,
        has_notices=True,
    ),
    "JetStream goes away after it stored a request": Scenario(
        actions=(Action("submit", 0.02, 3, 0.5), Action("outage", 0.5, 1, 5)),
        faults=Faults(delay_s=0.002, lost_answer=0.25),
        num_workers=1,
        num_tokens=1,
        queue_limit=1,
    ),
    "a worker gets back what its own fenced attempt has not let go of": Scenario(
        seed=1_300_300,
        actions=(
            Action("submit", 0.05, 0, 0.15),
            Action("submit", 0.05, 1, 0.9),
            Action("expire", 0.3, 11),
            Action("expire", 0.3, 10),
        ),
        faults=Faults(delay_s=0.002, lost_answer=0.08, lost_publish=0.0375),
        num_monitors=2,
        num_tokens=1,
        token_s=0.1,
        queue_limit=2,
    ),
    "a follower still shows the owner's key from before it claimed": Scenario(
        seed=45,
        actions=(
            Action("submit", 0.0, 0, 0.5),
            Action("expire", 0.0, 10, after_lines=4),
            Action("expire", 0.0, 1),
            Action("status", 0.2, 0),
            *(Action("redeliver", 0.08, 0) for _ in range(12)),
        ),
        faults=Faults(delay_s=0.001, stale_beats=0.5),
        num_tokens=20,
        token_s=0.2,
    ),
}

TWO_AT_ONCE = Scenario(
    actions=(Action("submit", 0.01, 0, 0.5), Action("submit", 0.0, 1, 0.5)),
    num_tokens=10,
    token_s=0.3,
    max_concurrency=1,
)
LATE = Scenario(
    actions=tuple(Action("submit", 0.05, job, 0.15) for job in range(4)),
    num_workers=1,
    num_fallback_workers=1,
    num_routers=2,
    num_monitors=2,
    num_tokens=10,
    token_s=0.3,
    max_concurrency=1,
)
MISDELIVERED = Scenario(
    actions=(Action("submit", 0.1, 0, 0.5), Action("redeliver", 0.3, after_lines=4), Action("submit", 0.3, 1, 0.5)),
    num_tokens=12,
    token_s=0.2,
)
POISONED = Scenario(
    actions=(*(Action("submit", 0.05, job, 0.9) for job in range(3)), Action("submit", 1.5, 3, 0.9)),
    poison=3,
    num_workers=1,
    num_tokens=20,
    token_s=0.1,
    max_concurrency=4,
)
FAILING = Scenario(
    actions=(Action("submit", 0.1, 0, 0.5), *(Action("fail", 0.05, 10, after_lines=2) for _ in range(4))),
    num_tokens=12,
    token_s=0.2,
)


@pytest.mark.timeout(36_000)
def test_no_schedule_breaks_a_rule(request: pytest.FixtureRequest) -> None:
    wanted = request.config.getoption("--simulation-examples", default=None)
    configured = settings(
        max_examples=wanted or _NUM_EXAMPLES,
        derandomize=wanted is None,
        database=None,
        deadline=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    configured(given(scenarios())(_require_no_problem))()


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_away(name: str) -> None:
    _play_seeds(FOUND[name], _NUM_SEEDS)


def test_a_schedule_replays_exactly() -> None:
    scenario = Scenario(
        seed=7,
        actions=(Action("submit", 0.1, 0, 0.5), Action("submit", 0.1, 1, 0.5), Action("kill", 0.1, 10, 1.0)),
        faults=Faults(delay_s=0.002, lost_answer=0.05, stale_log=0.1),
    )
    first, second = play(scenario), play(scenario)
    assert first.broker.trace == second.broker.trace
    assert first.loop.num_steps == second.loop.num_steps


def test_no_worker_keeps_a_request_waiting_while_another_is_idle() -> None:
    for seed in range(_NUM_SEEDS):
        world = require_no_problem(msgspec.structs.replace(TWO_AT_ONCE, seed=seed))
        for job, request in world.requests.items():
            assert world.check.first_start_at[job] - request.first_sent_at < 0.5, (seed, world.broker.trace)


def test_what_does_not_start_in_time_is_handed_over_once() -> None:
    num_handed_over = 0
    faults = (Faults(), Faults(delay_s=0.1, lost_answer=0.05, lost_publish=0.1, stale_log=0.2), Faults(delay_s=0.02))
    for number in range(24):
        struck = (Action("kill", 1.9, number % 7, 1.0), Action("hang", 0.1, number % 5, 2.5)) if number % 2 else ()
        scenario = msgspec.structs.replace(LATE, seed=number, faults=faults[number % 3], actions=LATE.actions + struck)
        num_handed_over += require_no_problem(scenario).check.num_handed_over
    assert num_handed_over >= 24


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_poison_job_takes_nobody_to_a_third_start(num_workers: int) -> None:
    for seed in range(_NUM_SEEDS):
        world = require_no_problem(msgspec.structs.replace(POISONED, seed=seed, num_workers=num_workers))
        starts = {job: sum(event.kind == "started" for event in log) for job, log in world.check.logs.items()}
        assert starts.pop("j3") == 3
        assert world.check.dead_letters == {"j3"}
        assert max(starts.values()) <= 2, (seed, starts)


def _steals(situation: Situation) -> Decision:
    owner = situation.state.owner
    if owner is not None and not owner.is_same(situation.me):
        return Decision(Row.REQUEUE)
    return decide(situation)


def _acks(situation: Situation) -> Decision:
    decided = decide(situation)
    return Decision(Row.ACK) if decided.action is Row.DROP else decided


def _forgets(situation: Situation) -> Decision:
    decided = decide(situation)
    return Decision(Row.LEAVE) if decided.action in (Row.FALL_BACK, Row.TAKE_OVER) else decided


def _gives_up(situation: Situation) -> Decision:
    decided = decide(situation)
    return Decision(Row.DEAD_LETTER) if decided.action is Row.CLAIM and situation.state.faults else decided


@pytest.mark.parametrize(
    ("mutant", "scenario", "problem"),
    [
        pytest.param(_steals, MISDELIVERED, "STEAL", id="a live owner is robbed"),
        pytest.param(_acks, MISDELIVERED, "LOST", id="a running job's message is acked"),
        pytest.param(_forgets, LATE, "LOST", id="a message is settled before the log names another"),
        pytest.param(_gives_up, FAILING, "DEAD EARLY", id="one fault is enough"),
    ],
)
def test_a_broken_rule_is_noticed(mutant: Callable[[Situation], Decision], scenario: Scenario, problem: str) -> None:
    """The simulation has teeth: with one row of the tables wrong, it finds what that breaks."""
    with patch("headrace.worker.handling.decide", mutant), pytest.raises(Violation, match=problem):
        _play_seeds(scenario, _NUM_TO_CATCH)


def test_a_gate_that_lets_everybody_in_is_noticed() -> None:
    def all_of_them(inside: Iterable[Guest], asking: Sequence[Asking]) -> list[int]:
        return list(range(len(asking)))

    with patch("headrace.worker.gate.admissible", all_of_them), pytest.raises(Violation, match="COMPANY"):
        _play_seeds(POISONED, _NUM_TO_CATCH)


def _play_seeds(scenario: Scenario, number: int) -> None:
    for seed in range(scenario.seed, scenario.seed + number):
        require_no_problem(msgspec.structs.replace(scenario, seed=seed))


def _require_no_problem(scenario: Scenario) -> None:
    require_no_problem(scenario)
