"""Scenarios for the time that requests wait beside workers with room: each seed is one."""

import random
from typing import Final, Literal

from headrace.schemas.subjects import LANES
from tests.simulation.broker import Faults
from tests.simulation.schedule import Action, Ask, Scenario

__all__ = ["Kind", "draw"]

Kind = Literal["calm", "lan", "deaths"]

_CAPACITIES: Final = ((400, 400, 400), (1000, 1000, 1000), (1000, 400, 400), (300, 300, 1000))
_NUM_ACTIONS: Final = (8, 16, 30)


def draw(seed: int, kind: Kind = "lan") -> Scenario:
    """A deployment, a workload, and what goes wrong in it: nothing where it is calm."""
    rng = random.Random(seed * 7919 + 17)
    num_workers = rng.choice((1, 2, 2, 2, 3, 3))
    kv_tokens = rng.choice(_CAPACITIES)[:num_workers]
    num_jobs = rng.choice((6, 12, 24))
    asks = tuple(_ask(rng, max(kv_tokens)) for _ in range(num_jobs))
    gaps = rng.choice(((0.0,), (0.0, 0.0, 0.05, 0.4), (0.02, 0.1, 1.0)))
    actions: list[Action] = [Action("submit", rng.choice(gaps), job, 0.5) for job in range(num_jobs)]
    if kind == "deaths":
        for _ in range(rng.choice((1, 2))):
            struck = Action(rng.choice(("kill", "hang")), rng.choice((0.05, 0.3)), rng.randrange(num_workers), 4.0)
            actions.insert(rng.randrange(num_jobs // 2, len(actions) + 1), struck)
    elif kind != "calm":
        for _ in range(rng.choice((1, 3, 6))):
            actions.insert(rng.randrange(1, len(actions) + 1), _mishap(rng, num_workers))
    return Scenario(
        seed=seed,
        actions=tuple(actions),
        faults=_faults(rng) if kind == "lan" else Faults(),
        num_workers=num_workers,
        num_routers=rng.choice((1, 2)),
        num_monitors=rng.choice((1, 2)),
        num_tokens=rng.choice((1, 4, 10)),
        token_s=rng.choice((0.005, 0.05, 0.2)),
        max_concurrency=rng.choice((1, 2, 4)),
        has_notices=rng.random() < 0.5,
        stutters=rng.choice((0.0, 0.0, 0.5)) if kind == "lan" else 0.0,
        asks=asks,
        kv_tokens=kv_tokens,
        pools=("default", "default", "lender")[:num_workers] if rng.random() < 0.2 else (),
        max_idle_s=0.3,
        counts_any=kind == "calm",
    )


def _ask(rng: random.Random, capacity: int) -> Ask:
    size = rng.choice((3, 3, 50, 200, rng.randint(1, capacity - 10), capacity - 10))
    return Ask(tenant=rng.choice(("default", "t1", "t2")), lane=rng.choice(LANES), size=size)


def _mishap(rng: random.Random, num_workers: int) -> Action:
    kind = rng.choice(("kill", "kill", "hang", "slow", "outage", "drain", "fail", "busy", "die", "stall", "redeliver", "expire"))
    who = rng.choice((rng.randrange(num_workers), rng.randrange(num_workers), rng.randrange(7), 10 + rng.randrange(6)))
    return Action(kind, rng.choice((0.0, 0.05, 0.3, 1.0)), who, rng.choice((0.3, 1.0, 2.5)), after_lines=rng.choice((0, 1, 5)))


def _faults(rng: random.Random) -> Faults:
    def sometimes(most: float) -> float:
        return rng.choice((0.0, 0.0, most / 4, most))

    return Faults(
        delay_s=rng.choice((0.0003, 0.001)),
        lost_request=sometimes(0.02),
        lost_answer=sometimes(0.02),
        lost_publish=sometimes(0.1),
        lost_hint=sometimes(0.5),
    )
