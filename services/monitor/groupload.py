"""What is to be done for a group of replicas, from what a monitor sees: counts of the queues and heartbeats; pure."""

from collections.abc import Collection, Mapping
from typing import Final

from headrace.discipline.position import waiting_of
from headrace.discipline.replicas import wanted_replicas
from headrace.discipline.scaling import GroupLoad
from headrace.schemas.instances import GroupName, Scale
from headrace.schemas.replicas import ReplicaGroup
from headrace.schemas.subjects import LANES, QueueName
from headrace.schemas.workers import Heartbeat

__all__ = ["group_load"]

_AHEAD: Final = LANES[: LANES.index("normal") + 1]


def group_load(
    group: ReplicaGroup,
    name: GroupName,
    *,
    scale: Scale | None,
    messages: Mapping[QueueName, int],
    beats: Collection[Heartbeat],
    worked_at: float | None = None,
) -> GroupLoad:
    """The load of a group; `messages` are those of the model's queues, `beats` all live workers'.

    What a worker holds and cannot run yet waits, before all that is in the queue. What is in the queue while slots are
    free is on its way to them, or is there and not listed yet: it counts as running, or a few short jobs would look
    like a queue that never ends. The slots of a replica are those that its memory lets it use, a mean over those that
    are up; while none is, what `scale` remembers.
    """
    of_model = [beat for beat in beats if beat.model == name.model]
    waiting = {queue: number for queue, number in waiting_of(messages, of_model).items() if queue.pool == name.pool}
    num_queued = sum(waiting.values())
    num_first = sum(number for queue, number in waiting.items() if queue.lane in _AHEAD)
    ready = [beat for beat in of_model if beat.pool == name.pool and beat.state in ("Ready", "Busy")]
    num_held = sum(beat.waiting for beat in ready)
    slots = {beat.worker: beat.effective_concurrency or beat.max_concurrency for beat in ready}
    num_free = sum(max(0, slots[beat.worker] - beat.running - beat.waiting) for beat in ready)
    measured = [(slots[beat.worker], beat.seconds_per_job) for beat in ready if beat.seconds_per_job]
    rate = sum(number / seconds for number, seconds in measured)
    remembered = scale if scale is not None else Scale(replicas=0)
    return GroupLoad(
        wanted=wanted_replicas(group, scale),
        num_ready=len(ready),
        num_queued=num_held + max(0, num_queued - num_free),
        num_ahead=num_held + max(0, num_first - num_free),
        num_running=sum(beat.running for beat in ready) + min(num_queued, num_free),
        seconds_per_job=sum(number for number, _ in measured) / rate if measured else remembered.seconds_per_job,
        slots=sum(slots.values()) / len(ready) if ready else remembered.slots,
        worked_at=worked_at,
    )
