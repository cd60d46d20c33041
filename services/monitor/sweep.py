"""The in-flight set against the live lists: messages that were delivered and that nobody says to hold."""

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Final

from headrace.bus.batchget import batch_get
from headrace.bus.connection import Bus
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.jobqueue import Progress
from headrace.errors import BrokerError
from headrace.monitor.eviction import Evictor
from headrace.monitor.judgement import Remedy, judge_unlisted
from headrace.schemas import subjects
from headrace.schemas.jobs import decode_job
from headrace.schemas.subjects import QueueName
from headrace.schemas.workers import Heartbeat

__all__ = ["Sweep"]

log = logging.getLogger(__name__)

_HOLDER: Final = "nobody"
_MAX_REQUEUES: Final = 4


class Sweep:
    """Finds messages in flight that no live worker lists, and hands them back once that has lasted two beats.

    It catches what no list shows: a message delivered to a worker that died before it listed it.
    """

    def __init__(self, bus: Bus, evictor: Evictor) -> None:
        self._bus = bus
        self._bucket = WorkersBucket(bus)
        self._evictor = evictor
        self._unlisted_since: dict[tuple[str, int, int], float] = {}

    def restart(self) -> None:
        """Count from now again: what was seen may be the broker's fault or ours."""
        self._unlisted_since.clear()

    async def run_once(self, models: Iterable[str], beats: Mapping[str, Heartbeat]) -> None:
        """Look at all queues of the models once."""
        present: set[tuple[str, int, int]] = set()
        for model in models:
            for queue in await self._evictor.queue(model).counts():
                present |= await self._look_at(model, queue, beats)
        self._unlisted_since = {key: since for key, since in self._unlisted_since.items() if key in present}

    async def after_eviction(self, dead: Heartbeat, beats: Mapping[str, Heartbeat]) -> None:
        """Hand over at once what the log says a dead worker ran although its last beat did not list it yet."""
        for queue in await self._evictor.queue(dead.model).counts():
            progress = await self._evictor.queue(dead.model).progress(queue)
            if progress is None or not progress.num_in_flight:
                continue
            listed = {held.sequence for beat in (dead, *beats.values()) for held in beat.held}
            for sequence, headers in (await self._in_flight(dead.model, queue, progress)).items():
                if sequence not in listed:
                    await self._remedy(dead.model, queue, sequence, headers, only_of=(dead.worker, dead.epoch))

    async def _look_at(self, model: str, queue: QueueName, beats: Mapping[str, Heartbeat]) -> set[tuple[str, int, int]]:
        job_queue = self._evictor.queue(model)
        progress = await job_queue.progress(queue)
        if progress is None or not progress.num_in_flight:
            return set()
        of_model = [beat for beat in beats.values() if beat.model == model]
        listed = {held.sequence for beat in of_model for held in beat.held if held.consumer == queue.consumer}
        if progress.num_in_flight <= len(listed):
            return set()
        patience_s = 2 * max((beat.interval_s for beat in of_model), default=self._bus.settings.heartbeat_s)
        now = time.monotonic()
        found: set[tuple[str, int, int]] = set()
        for sequence, headers in (await self._in_flight(model, queue, progress)).items():
            if sequence in listed:
                continue
            # A redelivery moves the consumer sequence on; one that is known to be newer starts the count again.
            key = (job_queue.stream, sequence, 0)
            found.add(key)
            since = self._unlisted_since.setdefault(key, now)
            if now - since >= patience_s:
                await self._remedy(model, queue, sequence, headers)
                self._unlisted_since[key] = now + self._bus.settings.ack_wait_s
        return found

    async def _in_flight(self, model: str, queue: QueueName, progress: Progress) -> dict[int, dict[str, str]]:
        """Headers of what is stored between the ack floor and the last delivered; some of it may be waiting again."""
        stream = self._evictor.queue(model).stream
        subject = self._bus.names.jobs(model, queue)
        found: dict[int, dict[str, str]] = {}
        for message in await batch_get(
            self._bus, stream, subject, from_sequence=progress.ack_floor + 1, up_to=progress.delivered
        ):
            headers = message.headers or {}
            found[int(headers[subjects.HDR_SEQUENCE])] = dict(headers)
        return found

    async def _remedy(
        self,
        model: str,
        queue: QueueName,
        sequence: int,
        headers: dict[str, str],
        *,
        only_of: tuple[str, str] | None = None,
    ) -> None:
        job = decode_job(headers, b"")
        if job is None:
            return
        try:
            for _ in range(_MAX_REQUEUES):
                state = await self._evictor.state(job.tenant, job.job)
                owner = state.owner
                if only_of is not None and (owner is None or (owner.worker, owner.epoch) != only_of):
                    return
                owner_seen = await self._bucket.get(owner.worker) if owner is not None else None
                remedied = judge_unlisted(state, owner_seen=owner_seen)
                if remedied.remedy is Remedy.NOTHING:
                    return
                if remedied.remedy is Remedy.HAND_BACK or await self._evictor.requeue(
                    job.tenant,
                    job.job,
                    state,
                    remedied,
                    reason="worker_lost" if remedied.lost is not None else "unlisted",
                ):
                    log.warning("job %s was delivered but nobody holds it; handing it back", job.job)
                    await self._evictor.hand_back(model, queue, [sequence], holder=_HOLDER)
                    return
        except BrokerError as error:
            log.warning("message %d of %s is left to its ack wait: %s", sequence, model, error)
