"""How many replicas a group shall have from now on: by what a request has to wait, and by what is idle; pure.

The expected wait is jobs without a slot, times the time of one, over the slots of all replicas. The target is met by

    A · service / (slots · (target + service))

replicas for A jobs that wait or run. Little's law says the same: A jobs, each to be gone after the target and its
service, are A / (target + service) ends a second, and a replica gives slots / service.
"""

import math
from typing import Final

import msgspec

from headrace.schemas.instances import Scale
from headrace.schemas.replicas import Autoscale

__all__ = ["COOL_RATIO", "GroupLoad", "decide", "expected_wait_s", "needed_replicas"]

COOL_RATIO: Final = 0.75
"""The part of one fewer replica's slots that may be in use where that one is given up: what is left takes the noise."""
_ROUNDING: Final = 1e-6


class GroupLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done for a group, and with what.

    `wanted` replicas were decided or configured, within the bounds; `num_ready` of them are up. `num_queued` jobs wait,
    `num_ahead` of them would start before a request of the normal lane that came now. `seconds_per_job` and the `slots`
    of a replica are measured, or were; None where they never were. `worked_at` is when a job was last handed out or
    settled, by the broker's clock, None where nobody asked.
    """

    wanted: int
    num_ready: int = 0
    num_queued: int = 0
    num_ahead: int = 0
    num_running: int = 0
    seconds_per_job: float | None = None
    slots: float | None = None
    worked_at: float | None = None


def expected_wait_s(bounds: Autoscale, load: GroupLoad, replicas: int) -> float:
    """Seconds until a normal request that came now would start, with so many replicas up.

    A job's time that nobody measured counts as the target: what waits may then be as many as there are slots.
    """
    num_slots = replicas * (load.slots or 0.0)
    num_without = load.num_ahead + load.num_running - num_slots
    if num_without <= 0:
        return 0.0
    return num_without * _service_s(bounds, load) / num_slots if num_slots else math.inf


def needed_replicas(bounds: Autoscale, load: GroupLoad) -> int | None:
    """The fewest replicas that meet the target, whatever the bounds; None where no replica's slots are known."""
    if not load.slots:
        return None
    service_s = _service_s(bounds, load)
    num_jobs = load.num_ahead + load.num_running
    return math.ceil(num_jobs * service_s / (load.slots * (bounds.target_wait_s + service_s)) - _ROUNDING)


def decide(bounds: Autoscale, scale: Scale | None, load: GroupLoad, now: float) -> Scale | None:
    """What is to be written in place of `scale`, None where that stands. Whoever sees the same decides the same.

    Up to the number that meets the target at once, `up_cooldown_s` after the step before; those that are wanted and not
    up yet count as if they were. From none to one without any cooldown, for any job, and that step begins none. Down by
    one after `idle_s` in which one fewer was enough, `down_cooldown_s` after any step; from one to none only if for
    `idle_s` nothing waited or ran.
    """
    before = scale if scale is not None else Scale(replicas=load.wanted)
    replicas = min(max(load.wanted, bounds.min_replicas), bounds.max_replicas)
    load = msgspec.structs.replace(load, wanted=replicas)
    needed = needed_replicas(bounds, load)
    idle_since = _idle_since(bounds, before, load, now)
    reason = "the bounds allow no other number" if replicas != before.replicas else before.reason
    up_at, down_at = before.up_at, before.down_at
    if replicas == 0 and load.num_queued:
        replicas = min(max(needed or 0, 1), bounds.max_replicas)
        reason, idle_since = f"{load.num_queued} wait and no replica is wanted", None
        up_at = now if replicas > 1 else up_at
    elif (needed or 0) > replicas < bounds.max_replicas and _is_over(bounds.up_cooldown_s, before.up_at, now):
        wait_s = expected_wait_s(bounds, load, replicas)
        reason = f"{load.num_ahead} ahead: {wait_s:.3g} s to wait with {replicas}, target {bounds.target_wait_s:g} s"
        replicas, up_at, idle_since = min(needed or 0, bounds.max_replicas), now, None
    elif (
        idle_since is not None
        and _is_over(bounds.idle_s, idle_since, now)
        and _is_over(bounds.down_cooldown_s, before.decided_at, now)
    ):
        replicas, down_at = replicas - 1, now
        reason = f"one fewer was enough for {now - idle_since:.0f} s"
        load = msgspec.structs.replace(load, wanted=replicas)
        if not _is_cool(bounds, load):
            idle_since = None
        elif replicas == 1:  # for the last one nothing at all may have run, which was not asked before
            idle_since = now
    is_step = replicas != before.replicas
    if not is_step and idle_since == before.idle_since:
        return None
    return Scale(
        replicas=replicas,
        reason=reason,
        decided_at=now if is_step else before.decided_at,
        up_at=up_at,
        down_at=down_at,
        idle_since=idle_since,
        seconds_per_job=load.seconds_per_job,
        slots=load.slots,
    )


def _service_s(bounds: Autoscale, load: GroupLoad) -> float:
    return load.seconds_per_job or bounds.target_wait_s


def _is_cool(bounds: Autoscale, load: GroupLoad) -> bool:
    """Whether one fewer would do: nothing waits, and what runs leaves some of its slots free."""
    num_slots = (load.wanted - 1) * (load.slots or 0.0)
    return load.wanted > bounds.min_replicas and not load.num_queued and load.num_running <= COOL_RATIO * num_slots


def _idle_since(bounds: Autoscale, before: Scale, load: GroupLoad, now: float) -> float | None:
    """When it became cool, as was seen first; for the last replica not before any job was handed out or settled."""
    if not _is_cool(bounds, load):
        return None
    since = before.idle_since
    if since is None or since > now + bounds.idle_s:  # a clock that was set back
        since = now
    if load.wanted == 1 and load.worked_at is not None:
        since = max(since, min(load.worked_at, now))
    return since


def _is_over(span_s: float, since: float, now: float) -> bool:
    """Whether so much has passed; a time further ahead than that is one of a clock that was set back."""
    return abs(now - since) >= span_s - _ROUNDING
