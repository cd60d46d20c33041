"""Which workers are sick, by what they and the others of their pool say of themselves, and what is done about it."""

import enum
import statistics
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from headrace.schemas.workers import Ailment, Heartbeat, WorkerHealth

__all__ = [
    "MAX_RESTARTS",
    "RESTARTS_WITHIN_S",
    "Finding",
    "Remedy",
    "findings",
    "remedy",
    "within_bounds",
]

MIN_ANSWERS: Final = 8
FAILURE_RATE: Final = 0.4
"""Of at least `MIN_ANSWERS`. Where one request in fifty fails, four of eight do once in a hundred thousand times; where
half of them do, two times in three, and after a few more requests nearly always."""
MIN_MEASUREMENTS: Final = 8
PACE_FLOOR_S: Final = 0.02
"""Seconds per token below which nobody waits for an answer: faster than anybody reads."""
TTFT_FLOOR_S: Final = 2.0
_TTFT_FACTOR: Final = 2.0
"""So many times the factor for time to first token, which depends on prompts."""
_PAIR_FACTOR: Final = 2.0
"""So many times the factor beside one other alone: of two that differ nobody knows which is the odd one."""
_MOST_OUT: Final = 3
"""One in so many of a pool may be out at once, or one."""
MAX_RESTARTS: Final = 3
RESTARTS_WITHIN_S: Final = 1800.0


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with one engine run of one registration. `severity` orders findings of one pool."""

    worker: str
    epoch: str
    engine_run: int
    ailment: Ailment
    reason: str
    severity: float


class Remedy(enum.Enum):
    """What becomes of a worker that is found sick."""

    RESTART = "restart"
    """Drained, its engine started again."""
    LEAVE_OUT = "leave_out"
    """Drained, its engine stopped, and left like that while others of its pool are up."""
    KEEP = "keep"
    """It goes on as it is: restarts did not help, and nobody else would do its work."""


def findings(beats: Iterable[Heartbeat], *, slow_factor: float) -> list[Finding]:
    """What is wrong with the workers that take requests, the worst first. `slow_factor` 0: nobody is too slow.

    A worker is compared with the others of its model and pool. Where those fail as often, requests or their model are
    to blame, and where nobody else is up there is nothing to be slow against.
    """
    found = []
    for pool in _pools(beats):
        up = [beat for beat in pool if _is_up(beat) and beat.health is not None]
        for beat in up:
            others = [other.health for other in up if other is not beat and other.health is not None]
            finding = _finding(beat, others, slow_factor)
            if finding is not None:
                found.append(finding)
    return sorted(found, key=lambda each: (-each.severity, each.worker))


def within_bounds(found: Sequence[Finding], beats: Iterable[Heartbeat]) -> list[Finding]:
    """Those of them that may be taken out now, so that no more than a third of a pool, or one, is out at once.

    Whoever does not take requests is out, whatever for. So somebody always stays, but where there is only one that was
    not left out for good.
    """
    by_worker = {finding.worker: finding for finding in found}
    chosen: set[str] = set()
    for pool in _pools(beats):
        num_up = sum(_is_up(beat) for beat in pool)
        is_alone = sum(not _is_left_out(beat) for beat in pool) == 1
        num_left = 1 if is_alone else max(1, len(pool) // _MOST_OUT) - (len(pool) - num_up)
        sick = [by_worker[beat.worker] for beat in pool if beat.worker in by_worker]
        in_order = sorted(sick, key=lambda each: (-each.severity, each.worker))
        chosen |= {finding.worker for finding in in_order[: max(0, num_left)]}
    return [finding for finding in found if finding.worker in chosen]


def remedy(ailment: Ailment, restarted_at: Iterable[float], *, now: float, has_peers: bool) -> Remedy:
    """What a sick worker does, by when its engine was started again for its health before.

    The last of a pool is never left out. It is started again where it does no good as it is, and kept as it is where it
    still answers some.
    """
    num_lately = sum(now - at < RESTARTS_WITHIN_S for at in restarted_at)
    if num_lately < MAX_RESTARTS:
        return Remedy.RESTART
    if has_peers:
        return Remedy.LEAVE_OUT
    return Remedy.RESTART if ailment in ("probe", "memory") else Remedy.KEEP


def _finding(beat: Heartbeat, others: Sequence[WorkerHealth], slow_factor: float) -> Finding | None:
    assert beat.health is not None
    found = _failures(beat.health, others)
    if found is None and slow_factor:
        found = _slowness(beat.health, others, slow_factor)
    if found is None:
        return None
    ailment, reason, severity = found
    return Finding(
        worker=beat.worker,
        epoch=beat.epoch,
        engine_run=beat.health.engine_run,
        ailment=ailment,
        reason=reason,
        severity=severity,
    )


def _failures(health: WorkerHealth, others: Sequence[WorkerHealth]) -> tuple[Ailment, str, float] | None:
    rate = _failure_rate(health)
    if rate is None or rate < FAILURE_RATE:
        return None
    rates = [each for other in others if (each := _failure_rate(other)) is not None]
    if rates and statistics.median(rates) > rate / 2:
        return None
    # An error is worse than any slowness.
    return "errs", f"errs: {health.failed} of its last {health.finished + health.failed} requests failed", 1e6 * rate


def _failure_rate(health: WorkerHealth) -> float | None:
    num_answers = health.finished + health.failed
    is_sound = num_answers >= MIN_ANSWERS and 0 <= health.failed <= num_answers
    return health.failed / num_answers if is_sound else None


def _slowness(
    health: WorkerHealth, others: Sequence[WorkerHealth], slow_factor: float
) -> tuple[Ailment, str, float] | None:
    pace_s, first_s = health.seconds_per_token, health.ttft_s
    if pace_s is not None and pace_s >= PACE_FLOOR_S and health.num_paces >= MIN_MEASUREMENTS:
        paces = [
            (each.seconds_per_token, each.load)
            for each in others
            if each.seconds_per_token is not None and each.num_paces >= MIN_MEASUREMENTS
        ]
        if times := _times_slower((pace_s, health.load), paces, slow_factor):
            return "slow", f"slow: {pace_s:.3g} s per token, {times:.1f} times the median of the others", times
    if first_s is not None and first_s >= TTFT_FLOOR_S and health.num_firsts >= MIN_MEASUREMENTS:
        firsts = [
            (each.ttft_s, each.load)
            for each in others
            if each.ttft_s is not None and each.num_firsts >= MIN_MEASUREMENTS
        ]
        if times := _times_slower((first_s, health.load), firsts, _TTFT_FACTOR * slow_factor):
            return (
                "slow",
                f"slow: {first_s:.3g} s to the first token, {times:.1f} times the median of the others",
                times,
            )
    return None


def _times_slower(
    own: tuple[float, float | None], others: Sequence[tuple[float, float | None]], factor: float
) -> float | None:
    """How many times slower than the others it is, if that is too much, as it is and for each request that ran at once.

    Where computing is what takes the time, twice the requests take twice as long, and that is no ailment.
    """
    if not others:
        return None
    times = own[0] / max(statistics.median(seconds for seconds, _ in others), 1e-6)
    times_each = _each(*own) / max(statistics.median(_each(*other) for other in others), 1e-6)
    least = min(times, times_each)
    return least if least > factor * (_PAIR_FACTOR if len(others) == 1 else 1.0) else None


def _each(seconds: float, load: float | None) -> float:
    return seconds / max(1.0, load or 1.0)


def _pools(beats: Iterable[Heartbeat]) -> list[list[Heartbeat]]:
    pools: dict[tuple[str, str], list[Heartbeat]] = {}
    for beat in beats:
        pools.setdefault((beat.model, beat.pool), []).append(beat)
    return list(pools.values())


def _is_left_out(beat: Heartbeat) -> bool:
    return beat.health is not None and beat.health.is_left_out


def _is_up(beat: Heartbeat) -> bool:
    return beat.state in ("Ready", "Busy")
