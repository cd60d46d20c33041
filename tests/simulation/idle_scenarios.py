"""Scenarios for the time that requests wait beside workers with room: each seed is one."""

import random
from typing import Final, Literal

from headrace.schemas.subjects import DEFAULT_POOL, LANES
from tests.simulation.broker import Faults
from tests.simulation.schedule import OWNERS, TENANT, Action, Ask, Scenario

__all__ = ["MAX_IDLE_S", "Kind", "beginnings", "draw", "two_tenants"]

Kind = Literal["calm", "faults", "kills", "hangs"]
"""Nothing fails; anything does; workers are killed and the broker says so; workers hang, or die unnoticed."""

MAX_IDLE_S: Final = 0.3
MAX_LISTED_S: Final[dict[Kind, float]] = {"calm": 0.1, "kills": 0.1, "hangs": 2.0}
"""How long what a dead or hung worker had listed stays with it."""
MAX_LOST_S: Final[dict[Kind, float]] = {"calm": 2.1, "kills": 2.1, "hangs": 4.1}
"""How long a message is in flight that no beat listed: two beats, a sweep before and after them, and some round trips;
where the worker's death must be found out first, after that."""

_CAPACITIES: Final = ((400, 400, 400), (1000, 1000, 1000), (1000, 400, 400), (300, 300, 1000))
_DIGITS: Final = 9
"""Zeros of a token of a shared beginning: 94 of them are a block of 1,024 characters."""
_MISHAPS: Final = (
    "kill",
    "kill",
    "hang",
    "slow",
    "outage",
    "drain",
    "fail",
    "busy",
    "die",
    "stall",
    "redeliver",
    "expire",
)


def draw(seed: int, kind: Kind) -> Scenario:
    """A deployment, a workload, and what goes wrong in it."""
    rng = random.Random(seed * 7919 + 17)
    num_workers = rng.choice((1, 2, 2, 2, 3, 3))
    kv_tokens = rng.choice(_CAPACITIES)[:num_workers]
    num_jobs = rng.choice((6, 12, 24))
    asks = tuple(_ask(rng, max(kv_tokens)) for _ in range(num_jobs))
    gaps = rng.choice(((0.0,), (0.0, 0.0, 0.05, 0.4), (0.02, 0.1, 1.0)))
    actions = [Action("submit", rng.choice(gaps), job, 0.5) for job in range(num_jobs)]
    for _ in range(rng.choice((1, 3, 6)) if kind == "faults" else 0):
        actions.insert(rng.randrange(1, len(actions) + 1), _mishap(rng, num_workers))
    if kind in ("kills", "hangs"):
        how = "kill" if kind == "kills" else rng.choice(("kill", "hang"))
        struck = Action(how, rng.choice((0.05, 0.3)), rng.randrange(num_workers), 4.0)
        actions.insert(rng.randrange(num_jobs // 2, len(actions) + 1), struck)
    return Scenario(
        seed=seed,
        actions=tuple(actions),
        faults=_faults(rng) if kind == "faults" else Faults(),
        num_workers=num_workers,
        num_routers=rng.choice((1, 2)),
        num_monitors=rng.choice((1, 2)),
        num_tokens=rng.choice((1, 4, 10)),
        token_s=rng.choice((0.005, 0.05, 0.2)),
        max_concurrency=rng.choice((1, 2, 4)),
        has_notices=kind == "kills" or (kind != "hangs" and rng.random() < 0.5),
        stutters=rng.choice((0.0, 0.0, 0.5)) if kind == "faults" else 0.0,
        asks=asks,
        kv_tokens=kv_tokens,
        pools=(DEFAULT_POOL, DEFAULT_POOL, "lender")[:num_workers] if rng.random() < 0.2 else (),
        max_idle_s=MAX_IDLE_S,
        counts_any=kind == "calm",
        max_listed_s=MAX_LISTED_S.get(kind),
        max_lost_s=MAX_LOST_S.get(kind),
    )


def beginnings(seed: int, kind: Kind) -> Scenario:
    """A backlog of jobs with three beginnings of one to three blocks, which workers set aside for each other."""
    rng = random.Random(seed)
    asks = tuple(Ask(size=rng.choice((100, 200, 300)), token=10**_DIGITS + rng.randrange(3)) for _ in range(40))
    actions = [Action("submit", rng.choice((0.0, 0.0, 0.05)), job, 0.5) for job in range(len(asks))]
    if kind == "kills":
        actions.insert(len(asks) // 2, Action("kill", 0.1, rng.randrange(3), 4.0))
    return Scenario(
        seed=seed,
        actions=tuple(actions),
        num_workers=3,
        num_tokens=6,
        token_s=0.02,
        max_concurrency=rng.choice((1, 2, 4)),
        has_notices=kind == "kills",
        asks=asks,
        kv_tokens=(1000, 1000, 1000),
        max_idle_s=MAX_IDLE_S,
        counts_any=kind == "calm",
        max_listed_s=MAX_LISTED_S.get(kind),
        max_lost_s=MAX_LOST_S.get(kind),
    )


def two_tenants(seed: int) -> Scenario:
    """Two queues of one lane with more than one worker can run for a while."""
    rng = random.Random(seed)
    asks = tuple(Ask(tenant=f"t{1 + number % 2}", size=rng.choice((3, 50, 200, 390))) for number in range(60))
    return Scenario(
        seed=seed,
        actions=tuple(Action("submit", 0.0, job, 0.5) for job in range(60)),
        num_workers=1,
        num_tokens=4,
        token_s=0.05,
        max_concurrency=2,
        asks=asks,
        kv_tokens=(1000,),
        max_idle_s=MAX_IDLE_S,
    )


def _ask(rng: random.Random, capacity: int) -> Ask:
    size = rng.choice((3, 3, 50, 200, rng.randint(1, capacity - 10), capacity - 10))
    return Ask(tenant=rng.choice((TENANT, "t1", "t2")), lane=rng.choice(LANES), size=size)


def _mishap(rng: random.Random, num_workers: int) -> Action:
    who = rng.choice(
        (rng.randrange(num_workers), rng.randrange(num_workers), rng.randrange(7), OWNERS + rng.randrange(6))
    )
    after_s, much = rng.choice((0.0, 0.05, 0.3, 1.0)), rng.choice((0.3, 1.0, 2.5))
    return Action(rng.choice(_MISHAPS), after_s, who, much, after_lines=rng.choice((0, 1, 5)))


def _faults(rng: random.Random) -> Faults:
    def sometimes(most: float) -> float:
        return rng.choice((0.0, 0.0, most / 4, most))

    return Faults(
        delay_s=rng.choice((0.0003, 0.001)),
        lost_request=sometimes(0.02),
        lost_answer=sometimes(0.02),
        lost_publish=sometimes(0.1),
        lost_hint=sometimes(0.5),
        stale_log=sometimes(0.2),
        stale_beats=sometimes(0.2),
    )
