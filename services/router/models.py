"""Which models a router knows, and what their workers can carry."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from headrace.bus.configuration import ConfigView
from headrace.bus.connection import Bus
from headrace.bus.heartbeats import WorkersView
from headrace.bus.jobqueue import JobQueue, QueueCounts
from headrace.bus.provision import ensure_jobs_stream
from headrace.discipline.affinity import preferred
from headrace.discipline.placement import view_of
from headrace.discipline.position import eta_s, num_startable
from headrace.schemas.subjects import DEFAULT_POOL, QueueName
from headrace.schemas.workers import Heartbeat

__all__ = ["Models"]

_KNOWN_FOR_S: Final = 60.0
_UNKNOWN_FOR_S: Final = 1.0
_COUNTS_FOR_S: Final = 0.1
_MAX_REMEMBERED: Final = 4_096
_UNSEEN_FOR_S: Final = 1.0
"""How long a published job may be missing from the workers' beats."""
_MAX_UNSEEN: Final = 1_024


class Models:
    """Known models by their streams, remembered briefly; an unknown one is asked for again after a second.

    A configured model is known, and gets its stream with its first request if no worker has made it.
    """

    def __init__(self, bus: Bus, workers: WorkersView, view: ConfigView) -> None:
        self._bus = bus
        self._workers = workers
        self._view = view
        self._queues: dict[str, JobQueue] = {}
        self._answers: dict[str, tuple[float, bool]] = {}
        self._counts: dict[str, tuple[float, QueueCounts]] = {}
        self._unseen: dict[tuple[str, str], deque[float]] = {}

    async def is_known(self, model: str) -> bool:
        """Whether the model has a job stream, or is configured."""
        now = time.monotonic()
        known = self._answers.get(model)
        is_configured = model in self._view.config.models
        if known is not None and now < known[0] and (known[1] or not is_configured):
            return known[1]
        exists = await self.queue(model).exists()
        if not exists and is_configured:
            await ensure_jobs_stream(self._bus, model)
            exists = True
        if len(self._answers) >= _MAX_REMEMBERED:  # clients choose the names, so the memory of them is bounded
            self._answers.clear()
        self._answers[model] = (now + (_KNOWN_FOR_S if exists else _UNKNOWN_FOR_S), exists)
        if not exists:
            self._queues.pop(model, None)
        return exists

    def forget(self, model: str) -> None:
        """Ask again next time: its stream turned out to be gone."""
        self._answers.pop(model, None)

    def queue(self, model: str) -> JobQueue:
        """The model's job queue, for publishing and looking."""
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = JobQueue(self._bus, model)
        return queue

    async def counts(self, model: str) -> QueueCounts:
        """Messages of each queue, at most a moment old, so that many requests at once ask the broker once."""
        known = self._counts.get(model)
        now = time.monotonic()
        if known is not None and now < known[0]:
            return known[1]
        counts = await self.queue(model).counts()
        if len(self._counts) >= _MAX_REMEMBERED:
            self._counts.clear()
        self._counts[model] = (now + _COUNTS_FOR_S, counts)
        return counts

    def note_published(self, model: str, queue: QueueName) -> None:
        """Count a message we just published, so that a remembered count has it too."""
        known = self._counts.get(model)
        if known is not None:
            known[1][queue] = known[1].get(queue, 0) + 1
        self._unseen.setdefault((model, queue.pool), deque(maxlen=_MAX_UNSEEN)).append(time.monotonic())

    def is_room_left(self, model: str, pool: str, need_tokens: int) -> bool:
        """Whether the workers have more room than they could be missing jobs of ours, so that a job starts at once.

        Never while the model is paused.
        Then nothing waits, and nobody needs to ask the broker what does. Jobs that other routers published a moment
        ago are not seen; a position is a moment old anyway.
        """
        if self.is_paused(model):
            return False
        unseen = self._unseen.get((model, pool), ())
        horizon = time.monotonic() - _UNSEEN_FOR_S
        num_unseen = sum(at > horizon for at in unseen)
        return num_startable(self.workers_of(model, pool), need_tokens) >= num_unseen

    def workers_of(self, model: str, pool: str = DEFAULT_POOL, *, with_starting: bool = False) -> list[Heartbeat]:
        """Live workers, not leaving, that may run a request of a pool: its own, and those of pools that lend to it.

        One that is starting does not tell its limits yet.
        """
        states = ("Ready", "Busy", "Starting") if with_starting else ("Ready", "Busy")
        pools = self._view.config.model(model).servers_of(pool)
        return [
            beat
            for beat in self._workers.beats.values()
            if beat.model == model and beat.pool in pools and beat.state in states
        ]

    def is_paused(self, model: str) -> bool:
        """Whether an operator has it that nothing of the model is started for now."""
        return self._view.config.model(model).paused

    def eta_s(self, num_before: int, model: str, pool: str) -> float | None:
        """Seconds until a job with so many others before it starts; None where that is not known."""
        return eta_s(num_before, self.workers_of(model, pool), is_paused=self.is_paused(model))

    def preferred(self, model: str, pool: str, hashes: Sequence[str], need_tokens: int) -> str | None:
        """The pool's own worker with the longest part of these prefixes in its cache that would start the job now.

        Never one that is lent: it takes the pool's jobs only while it has none of its own, and passes its wakes on.
        """
        if not hashes:
            return None
        own = (beat for beat in self.workers_of(model, pool) if beat.pool == pool)
        views = [view_of(beat, prefixes=beat.prefixes) for beat in own]
        return preferred(hashes, views, need_tokens)

    def pools(self, model: str) -> frozenset[str]:
        """Pools that some worker serves; those that are configured exist too."""
        return frozenset(beat.pool for beat in self._workers.beats.values() if beat.model == model)

    def weights(self, queues: Iterable[QueueName]) -> dict[QueueName, float]:
        """Each queue's share of its lane."""
        return {queue: self._view.config.weight_of(queue.queue) for queue in queues}

    def queue_limit(self, model: str) -> int:
        """Requests that the model's stream holds at most."""
        return self._view.config.model(model).queue_limit or self._bus.settings.queue_limit
