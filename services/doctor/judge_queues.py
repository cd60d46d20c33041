"""Queues: who serves what waits, what is paused or full, what is about to expire, and what was given up."""

from collections.abc import Iterator
from typing import Final

from headrace.doctor.facts import Facts, Known
from headrace.doctor.finding import Check, Finding, counted
from headrace.schemas.overview import QueueOverview
from headrace.schemas.subjects import QueueName

__all__ = ["judge_queues"]

_NEARLY_FULL: Final = 0.9
_SOON_S: Final = 10.0
_LATE_S: Final = 5.0
"""A monitor ends what is overdue within a second or so; what is older was ended by nobody."""
_SERVING: Final = ("Ready", "Busy")


def judge_queues(facts: Facts) -> Iterator[Finding]:
    """Findings about what waits."""
    if isinstance(facts.overview, Known):
        yield from _unserved(facts, facts.overview.value.queues)
    yield from _paused(facts)
    yield from _full(facts)
    yield from _expiring(facts)
    yield from _dead(facts)


def _unserved(facts: Facts, queues: tuple[QueueOverview, ...]) -> Iterator[Finding]:
    waiting: dict[tuple[str, str], list[QueueOverview]] = {}
    for queue in queues:
        if queue.queued:
            waiting.setdefault((queue.model, queue.pool), []).append(queue)
    num_unserved = 0
    for (model, pool), group in waiting.items():
        servers = facts.config.model(model).servers_of(pool)
        states = [each.beat.state for each in facts.live if each.beat.model == model and each.beat.pool in servers]
        if not isinstance(facts.beats, Known) or any(state in _SERVING for state in states):
            continue
        num_unserved += 1
        number = sum(queue.queued for queue in group)
        oldest_s = max((queue.oldest_age_s or 0.0 for queue in group), default=0.0)
        there = f"; of workers there are: {', '.join(sorted(set(states)))}" if states else ""
        yield Finding(
            id=Check.QUEUE_UNSERVED,
            severity="warning" if "Starting" in states else "error",
            found=f"no worker serves what waits for model {model}, pool {pool}: {counted(number, 'request')}, the "
            f"oldest for {oldest_s:.0f} s{there}",
            remedy="headrace models list shows what keeps its workers from coming up"
            if facts.config.model(model).instances
            else f"headrace serve worker --engine ENGINE --model {model} --pool {pool}",
        )
    if not num_unserved:
        number = sum(queue.queued for queue in queues)
        yield Finding(
            id=Check.QUEUE_UNSERVED, severity="ok", found=f"{counted(number, 'request')} waiting, none without a worker"
        )


def _paused(facts: Facts) -> Iterator[Finding]:
    queues = facts.overview.value.queues if isinstance(facts.overview, Known) else ()
    queued = {(each.model, QueueName(each.pool, each.lane, each.queue)): each.queued for each in queues}
    for model, config in facts.config.models.items():
        if config.paused:
            number = sum(each.queued for each in queues if each.model == model)
            yield Finding(
                id=Check.QUEUE_PAUSED,
                severity="warning",
                found=f"model {model} is paused, with {counted(number, 'request')} waiting",
                remedy=f"headrace models resume {model}",
            )
    for model, found in facts.consumers.items():
        stream = facts.names.jobs_stream(model)
        for consumer in found.value if isinstance(found, Known) else ():
            if consumer.paused_for_s is None:
                continue
            name = QueueName.from_consumer(consumer.name)
            number = queued.get((model, name), 0) if name is not None else 0
            yield Finding(
                id=Check.QUEUE_PAUSED,
                severity="error" if number else "warning",
                found=f"queue {consumer.name} of model {model} is paused for another {consumer.paused_for_s:.0f} s, "
                f"with {counted(number, 'request')} waiting",
                remedy=f"nats consumer resume {stream} {consumer.name}",
            )


def _full(facts: Facts) -> Iterator[Finding]:
    for stream in facts.streams:
        if stream.model is None or stream.info is None:
            continue
        limit = stream.info.config.get("max_msgs", -1)
        if limit > 0 and stream.info.num_messages >= _NEARLY_FULL * limit:
            yield Finding(
                id=Check.QUEUE_FULL,
                severity="warning",
                found=f"model {stream.model} has {stream.info.num_messages:,} of at most {limit:,} requests, queued "
                "and running; more are refused with queue_full",
                remedy="add workers; or raise HEADRACE_QUEUE_LIMIT, or the model's queue_limit (config apply FILE)",
            )


def _expiring(facts: Facts) -> Iterator[Finding]:
    if not isinstance(facts.waiting, Known) or not facts.waiting.value:
        return
    nearest = min(facts.waiting.value, key=lambda job: job.left_s)
    late = [job for job in facts.waiting.value if job.left_s < -_LATE_S]
    soon = [job for job in facts.waiting.value if job.left_s < _SOON_S]
    which = f"job {nearest.job} of tenant {nearest.tenant}, model {nearest.model}"
    if late:
        yield Finding(
            id=Check.EXPIRING,
            severity="error",
            found=f"{counted(len(late), 'request')} past their time and not ended, {which} for {-nearest.left_s:.0f} s",
            remedy="headrace serve monitor",
        )
    elif soon:
        yield Finding(
            id=Check.EXPIRING,
            severity="warning",
            found=f"{len(soon)} of the oldest waiting requests expire within {_SOON_S:g} s, the next in "
            f"{max(0.0, nearest.left_s):.0f} s: {which}",
            remedy="add workers; headrace jobs list --state queued",
        )
    else:
        yield Finding(
            id=Check.EXPIRING, severity="ok", found=f"the next of the oldest requests expires in {nearest.left_s:.0f} s"
        )


def _dead(facts: Facts) -> Iterator[Finding]:
    if not isinstance(facts.num_dead, Known):
        return
    if number := facts.num_dead.value:
        yield Finding(
            id=Check.DEAD_LETTERS,
            severity="warning",
            found=f"{counted(number, 'dead letter')}: requests that were given up after too many faults",
            remedy="headrace jobs dead; headrace jobs replay JOB --remove",
        )
    else:
        yield Finding(id=Check.DEAD_LETTERS, severity="ok", found="no dead letters")
