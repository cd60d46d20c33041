"""Taking over what a dead worker held: tombstone, `requeued`, NAK on its behalf, wake."""

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from headrace import metrics
from headrace.bus.connection import Bus, Refused, Stored
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.joblog import JobLog
from headrace.bus.jobqueue import JobQueue, Progress
from headrace.errors import BrokerError
from headrace.monitor.judgement import Remedied, Remedy, judge_listed
from headrace.schemas import events
from headrace.schemas.events import Event
from headrace.schemas.states import JobState, fold
from headrace.schemas.subjects import QueueName
from headrace.schemas.workers import Heartbeat, HeldRequest, SeenBeat

__all__ = ["Evictor"]

log = logging.getLogger(__name__)

_TOMBSTONE_TTL_S: Final = 600.0
_MAX_APPENDS: Final = 4
_AT_A_TIME: Final = 10
_MAX_REMEMBERED: Final = 100_000


class _Share(msgspec.Struct, frozen=True, kw_only=True):
    """Some of what a dead worker held, up to index `end` of its list, and what was found about them."""

    held: tuple[HeldRequest, ...]
    end: int
    lasts: dict[tuple[str, str], Event]
    progresses: dict[QueueName, Progress | None]


class Evictor:
    """Evicts workers and hands their requests over. Any number of monitors may do so at once.

    Whoever writes the tombstone acts; losing that compare-and-set means that the worker lives or another monitor was
    first. `peers` are the live workers of a model's pool, which are told what was interrupted. `num_evicted` and
    `num_handed_back` count.
    """

    def __init__(self, bus: Bus, peers: Callable[[str, str], Iterable[str]] = lambda model, pool: ()) -> None:
        self._bus = bus
        self._peers = peers
        self._bucket = WorkersBucket(bus)
        self._log = JobLog(bus)
        self._queues: dict[str, JobQueue] = {}
        self._nakked: dict[tuple[str, int, str], float] = {}
        self.num_evicted = 0
        self.num_handed_back = 0

    async def evict(self, seen: SeenBeat, last_beat: Heartbeat, *, reason: str) -> bool:
        """Declare a worker dead on the revision that was observed; False if it lives or another monitor was first.

        `last_beat` is its last known one: the beat itself, or what is remembered of it where the key has expired.
        """
        began = time.monotonic()
        tombstone = msgspec.structs.replace(last_beat, is_tombstone=True, reason=reason)
        ahead = asyncio.create_task(self._look_up(last_beat, 0), name="look up what it held")
        try:
            result = await self._bucket.put(tombstone, expected_revision=seen.revision, ttl_s=_TOMBSTONE_TTL_S)
            if not isinstance(result, Stored):
                why = result.description if isinstance(result, Refused) else result.reason
                log.info("worker %s is not evicted: %s", last_beat.worker, why)
                return False
            self.num_evicted += 1
            metrics.EVICTIONS.add(metrics.eviction_kind(reason))
            log.warning("evicted worker %s (%s); it held %d requests", last_beat.worker, reason, len(last_beat.held))
            await self.hand_over(last_beat, ahead=ahead)
            metrics.FAILOVER_S.observe(time.monotonic() - began)
        finally:
            ahead.cancel()
        return True

    async def hand_over(self, beat: Heartbeat, *, ahead: asyncio.Task[_Share | None] | None = None) -> None:
        """Give everything a registration held that is gone back to its queues.

        Some at a time, so that other workers take the first over while the last are still written about; the next
        are looked up meanwhile. `ahead` looks up the first.
        """
        looking = ahead or asyncio.create_task(self._look_up(beat, 0), name="look up what it held")
        try:
            while (share := await looking) is not None:
                looking = asyncio.create_task(self._look_up(beat, share.end), name="look up what it held")
                await self._hand_over_share(beat, share)
        finally:
            looking.cancel()

    async def _look_up(self, beat: Heartbeat, first: int) -> _Share | None:
        """The next few that it held, their logs' ends and their queues' progress. None where there are no more, or
        the broker does not tell.

        The first are looked up beside the writing of the tombstone. What is read before it may be older than the
        worker's last append; then ours is refused, and the log is read again.
        """
        held = beat.held[first : first + _AT_A_TIME]
        if not held:
            return None
        consumers = {each.consumer: QueueName.from_consumer(each.consumer) for each in held}
        queues = {consumer: queue for consumer, queue in consumers.items() if queue is not None}
        job_queue = self.queue(beat.model)
        try:
            lasts, progresses = await asyncio.gather(
                self._log.last_of([(each.tenant, each.job) for each in held]),
                asyncio.gather(*(job_queue.progress(queue) for queue in queues.values())),
            )
        except BrokerError as error:
            log.warning("what worker %s still held is left to the sweep: %s", beat.worker, error)
            return None
        return _Share(
            held=held,
            end=first + len(held),
            lasts=lasts,
            progresses=dict(zip(queues.values(), progresses, strict=True)),
        )

    async def _hand_over_share(self, beat: Heartbeat, share: _Share) -> None:
        are_ours = await asyncio.gather(*(self._requeue(held, beat, share.lasts) for held in share.held))
        to_nak: dict[QueueName, list[int]] = defaultdict(list)
        for held, is_ours in zip(share.held, are_ours, strict=True):
            queue = QueueName.from_consumer(held.consumer)
            if is_ours and queue is not None:
                to_nak[queue].append(held.sequence)
        for queue, sequences in to_nak.items():
            progress = share.progresses[queue]
            if progress is not None:
                await self._nak(beat.model, queue, sequences, progress, holder=beat.epoch)

    async def hand_back(self, model: str, queue: QueueName, sequences: Iterable[int], *, holder: str) -> None:
        """NAK messages on behalf of a holder, once for each holder within the ack wait, and wake workers for them."""
        progress = await self.queue(model).progress(queue)
        if progress is not None:
            await self._nak(model, queue, sequences, progress, holder=holder)

    async def _nak(
        self, model: str, queue: QueueName, sequences: Iterable[int], progress: Progress, *, holder: str
    ) -> None:
        job_queue = self.queue(model)
        now = time.monotonic()
        num_before = self.num_handed_back
        for sequence in sequences:
            key = (job_queue.stream, sequence, holder)
            if now - self._nakked.get(key, -float("inf")) < self._bus.settings.ack_wait_s:
                continue
            if len(self._nakked) >= _MAX_REMEMBERED:
                self._nakked.clear()
            self._nakked[key] = now
            self.num_handed_back += 1
            metrics.HANDED_OVER.add()
            await job_queue.nak_on_behalf(queue, sequence, progress)
            await job_queue.wake(queue, {})
        if number := self.num_handed_back - num_before:
            peers = list(self._peers(model, queue.pool))
            for worker in peers:
                await job_queue.tell_interrupted(worker, queue, number, share=math.ceil(number / len(peers)))

    async def requeue(
        self,
        tenant: str,
        job: str,
        state: JobState,
        remedied: Remedied,
        *,
        reason: str,
        model: str = "",
        queue_sequence: int | None = None,
    ) -> bool:
        """Append `requeued` as judged; False if another event came first. `model` and the rest are as it takes them."""
        event = events.requeued(
            job,
            attempt=state.attempt + 1,
            offset=state.num_tokens,
            reason=reason,
            lost=remedied.lost,
            model=model,
            queue_sequence=queue_sequence,
        )
        ttl_s = state.ttl_s or self._bus.settings.max_deadline_s + self._bus.settings.log_retention_s
        return isinstance(await self._log.append(tenant, event, expected=state.sequence, ttl_s=ttl_s), Stored)

    async def state(self, tenant: str, job: str) -> JobState:
        """What a job's whole log says; whether an owner lives cannot be told from the last event alone."""
        return await self._log.state(tenant, job)

    def queue(self, model: str) -> JobQueue:
        """The job queue of a model."""
        if model not in self._queues:
            self._queues[model] = JobQueue(self._bus, model)
        return self._queues[model]

    async def _requeue(self, held: HeldRequest, beat: Heartbeat, lasts: Mapping[tuple[str, str], Event]) -> bool:
        """Whether the message is now to be handed back: its job is requeued, or never started."""
        last = lasts.get((held.tenant, held.job))
        try:
            for number in range(_MAX_APPENDS):
                if number:
                    last = await self._log.last(held.tenant, held.job)
                state = fold([last]) if last is not None else JobState()  # it names the owner, which is enough here
                remedied = judge_listed(state, worker=beat.worker, epoch=beat.epoch)
                if remedied.remedy is not Remedy.REQUEUE:
                    return remedied.remedy is Remedy.HAND_BACK
                has_run = held.has_claimed and held.attempt == state.attempt  # from this message, and from no other
                if await self.requeue(
                    held.tenant,
                    held.job,
                    state,
                    remedied,
                    reason="worker_lost",
                    model=beat.model if has_run else "",
                    queue_sequence=held.sequence if has_run else None,
                ):
                    return True
        except BrokerError as error:
            log.warning("job %s of worker %s is left to its ack wait: %s", held.job, beat.worker, error)
        return False
