"""No request waits beside a worker that could run it, whatever fails: the real code, random workloads and faults.

`docs/discipline.md` says what counts as waiting, and which bounds hold for what faults hide. Each seed is a scenario;
`pytest tests/simulation --simulation-examples 1000` plays more, and others each time. One that breaks a bound is
printed with its trace; `draw(seed, kind)` replays it exactly.
"""

import itertools
import random
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from headrace.discipline.aside import aside_s
from headrace.discipline.placement import Placement
from headrace.discipline.room import Room
from headrace.schemas import subjects
from headrace.schemas.subjects import Names
from headrace.worker.worker import Worker
from tests.simulation.idle_scenarios import Kind, beginnings, draw, two_tenants
from tests.simulation.scenarios import require_no_problem
from tests.simulation.schedule import MODEL, Violation
from tests.simulation.world import World, play

_NUM_SEEDS: dict[Kind, int] = {"calm": 10, "faults": 24, "kills": 6, "hangs": 6}
_NUM_TO_CATCH = 40
_CALM_IDLE_S = 0.25
"""What undisturbed runs stay below (220 ms in 500 of them), so that less than a broken promise is noticed."""


@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("kind", _NUM_SEEDS)
def test_nobody_waits_beside_a_worker_that_could_run_it(kind: Kind, request: pytest.FixtureRequest) -> None:
    """In the same runs: what is promised fits, each job ends once, and the dead hand over in time."""
    wanted = request.config.getoption("--simulation-examples", default=None)
    first = random.randrange(10**9) if wanted is not None else 0
    _play_seeds(kind, range(first, first + (wanted or _NUM_SEEDS[kind])))


def test_the_watch_sees_what_waits() -> None:
    """It is no empty promise: requests did wait beside workers, and were with dead ones, for a while."""
    worlds = [play(draw(seed, "kills")) for seed in range(4)]
    assert max(world.idle.longest_idle_s for world in worlds) > 0.01
    assert max(world.idle.longest_lost_s[True] for world in worlds) > 0.002
    hung = [play(draw(seed, "hangs")).idle.longest_lost_s[True] for seed in range(6)]
    assert 1.5 < max(hung) <= 2.0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["calm", "kills"])
def test_what_is_left_to_warmer_workers_waits_no_longer_beside_room(kind: Kind) -> None:
    """And ends once, whoever is killed with it in hand. The time that it is set aside counts as waiting."""
    num_set_aside = 0

    def counted(*args: Any, **kwargs: Any) -> float:
        nonlocal num_set_aside
        patience_s = aside_s(*args, **kwargs)
        num_set_aside += patience_s > 0
        return patience_s

    with patch("headrace.worker.aside.aside_s", counted):
        for seed in range(4):
            require_no_problem(beginnings(seed, kind))
    assert num_set_aside >= 5


@pytest.mark.parametrize("seed", range(3))
def test_two_tenants_share_within_the_bound_of_deficit_round_robin(seed: int) -> None:
    """The real worker, fetching from two queues that are never empty; `tests/property` proves it of the rule alone."""
    world = require_no_problem(two_tenants(seed))
    served = _served(world)
    largest = [max(need for tenant, need in served if tenant == each) for each in ("t1", "t2")]
    assert len(served) > 20
    for first, last in itertools.combinations(range(len(served) + 1), 2):
        sums = [sum(need for tenant, need in served[first:last] if tenant == each) for each in ("t1", "t2")]
        assert abs(sums[0] - sums[1]) <= 1 + sum(largest)


def _served(world: World) -> list[tuple[str, int]]:
    """Tenant and need of each request in the order of its delivery, while both had some waiting."""
    stream = world.broker.streams[Names().jobs_stream(MODEL)]
    jobs = {message.seq: message.headers[subjects.HDR_JOB] for message in stream.everything}
    asked = [line for line in world.broker.trace if "=== submit" in line]
    since = float(asked[-1].split()[0]) + 0.3
    delivered = [line.split() for line in world.broker.trace if " delivered to " in line]
    late = [jobs[int(words[2])] for words in delivered if float(words[0]) > since]
    scenario = world.scenario
    served = [(scenario.ask(job).tenant, scenario.need_tokens(job)) for job in late]
    num_left = {each: sum(tenant == each for tenant, _ in served) for each in ("t1", "t2")}
    for number, (tenant, _) in enumerate(served):
        num_left[tenant] -= 1
        if not num_left[tenant]:
            return served[: number + 1]
    return served


def _holds(*_: Any, **__: Any) -> tuple[Placement, None]:
    return Placement.HOLD, None


async def _forgets(*_: Any, **__: Any) -> None:
    pass


def _tells_nothing(worker: Worker) -> int:
    return 0


def _never(*_: Any, **__: Any) -> float:
    return 9.0


def _fits(room: Room, need_tokens: int) -> bool:
    return room.has_slot


_PULLER, _ENTRANCE = "headrace.worker.puller", "headrace.worker.entrance"
_QUEUE, _WORKER = "headrace.bus.jobqueue.JobQueue", "headrace.worker.worker.Worker"
_GUARD = "headrace.monitor.guard.Guard"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("broken", "kind", "problem"),
    [
        pytest.param({f"{_PULLER}._RESYNC_S": 1.0}, "faults", "IDLE", id="a worker hardly looks around"),
        pytest.param({f"{_PULLER}._AFTER_ERROR_S": 1.5}, "faults", "IDLE", id="deaf after an error"),
        pytest.param(
            {f"{_PULLER}._LEFT_TO_ANOTHER_S": 2.0, f"{_PULLER}._MOST_LEFT_S": 2.0},
            "calm",
            "IDLE",
            id="a queue is left for long",
        ),
        pytest.param({f"{_ENTRANCE}._LOOK_AROUND_S": 0.5}, "calm", "IDLE", id="who holds one hardly looks around"),
        pytest.param({f"{_ENTRANCE}.place": _holds}, "calm", "IDLE", id="nothing is handed back"),
        pytest.param(
            {f"{_QUEUE}.wake": _forgets, f"{_QUEUE}.wake_worker": _forgets}, "calm", "IDLE", id="nobody is woken"
        ),
        pytest.param({f"{_WORKER}._startable_tokens": _tells_nothing}, "calm", "IDLE", id="room is not told"),
        pytest.param({"headrace.discipline.room.Room.fits": _fits}, "calm", "OVERCOMMIT", id="memory does not count"),
        pytest.param({f"{_QUEUE}.nak": _forgets}, "calm", "LOST FOR", id="a hand-back is forgotten"),
        pytest.param(
            {"headrace.monitor.liveness.overdue_after_s": _never}, "hangs", "LOST FOR", id="hung ones are kept"
        ),
        pytest.param({f"{_GUARD}.on_disconnect": _forgets}, "kills", "LOST FOR", id="nobody hears of a death"),
    ],
)
def test_a_broken_bound_is_noticed(broken: dict[str, Any], kind: Kind, problem: str) -> None:
    with ExitStack() as stack:
        for name, value in broken.items():
            stack.enter_context(patch(name, value))
        with pytest.raises(Violation, match=problem):
            _play_seeds(kind, range(_NUM_TO_CATCH), **({"max_idle_s": _CALM_IDLE_S} if kind == "calm" else {}))


def _play_seeds(kind: Kind, seeds: range, **changes: float) -> None:
    for seed in seeds:
        require_no_problem(msgspec.structs.replace(draw(seed, kind), **changes))
