"""Everything a worker holds: one entry for each queue message that is ours until we settle it or hand it back."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from typing import Final

from headrace.bus.jobqueue import Delivery, JobQueue
from headrace.errors import BrokerError
from headrace.schemas.jobs import Job
from headrace.schemas.workers import HeldRequest
from headrace.worker.execution import Execution

__all__ = ["Held", "HeldSet"]

log = logging.getLogger(__name__)

_RENEWALS_PER_ACK_WAIT: Final = 3


class Held:
    """One held message. `execution` is set while the engine works on it, `is_waiting` while it does not fit,
    `is_backing_off` while it is kept back: after a fault, for the sake of its company, since it can never run here, or
    for a moment since it is warm elsewhere.

    `need_tokens` is the router's estimate, `has_claimed` says that the `started` of `attempt` is in the log for it,
    `listed_in` is the number of the first beat that lists it. `is_void` once the worker lost its registration: then
    nothing more may be written for it, nor settled.
    """

    def __init__(self, delivery: Delivery, job: Job) -> None:
        self.delivery = delivery
        self.tenant = job.tenant
        self.job = job.job
        self.need_tokens = job.need_tokens
        self.attempt = 1
        self.has_claimed = False
        self.listed_in = 0
        self.since = time.monotonic()
        self.execution: Execution | None = None
        self.is_waiting = False
        self.is_backing_off = False
        self.is_void = False

    def as_request(self) -> HeldRequest:
        """Its line in the heartbeat."""
        return HeldRequest(
            consumer=self.delivery.queue.consumer,
            sequence=self.delivery.sequence,
            tenant=self.tenant,
            job=self.job,
            attempt=self.attempt,
            has_claimed=self.has_claimed,
        )


class HeldSet:
    """The held messages by stream sequence.

    `on_change` is called whenever the heartbeat's list changes, and returns the number of the beat that says so.
    """

    def __init__(self, on_change: Callable[[], int]) -> None:
        self._entries: dict[int, Held] = {}
        self._on_change = on_change
        self.became_empty = asyncio.Event()
        self.became_empty.set()
        self.became_taken = asyncio.Event()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Held]:
        return iter(list(self._entries.values()))

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._entries

    def add(self, held: Held) -> None:
        """List a message, before anything is done with it."""
        self._entries[held.delivery.sequence] = held
        self.became_empty.clear()
        self.became_taken.set()
        held.listed_in = self._on_change()

    def remove(self, held: Held) -> None:
        """Forget a message."""
        if self._entries.get(held.delivery.sequence) is held:
            del self._entries[held.delivery.sequence]
            if not self._entries:
                self.became_empty.set()
                self.became_taken.clear()
            self._on_change()

    def of_job(self, tenant: str, job: str) -> list[Held]:
        """Messages of one job; more than one where it was queued twice."""
        return [held for held in self if (held.tenant, held.job) == (tenant, job)]

    def void_all(self) -> None:
        """The registration is lost: stop what runs and forget everything, with nothing said to the broker."""
        for held in self:
            held.is_void = True
            if held.execution is not None:
                held.execution.stop("fenced")
            self.remove(held)

    @property
    def num_waiting(self) -> int:
        """Messages that do not fit now."""
        return sum(held.is_waiting for held in self._entries.values())

    @property
    def num_kept_back(self) -> int:
        """Messages kept back for a while, which take no place here meanwhile."""
        return sum(held.is_backing_off for held in self._entries.values())

    @property
    def num_running(self) -> int:
        """Messages the engine works on."""
        return sum(held.execution is not None for held in self._entries.values())

    def executions(self) -> list[Execution]:
        """What the engine works on."""
        return [held.execution for held in self if held.execution is not None]

    async def renew_for_ever(self, queue: JobQueue, *, ack_wait_s: float) -> None:
        """Tell the broker for each held message that it is worked on, well within its ack wait."""
        while True:
            await asyncio.sleep(ack_wait_s / _RENEWALS_PER_ACK_WAIT)
            for held in self:
                try:
                    await queue.in_progress(held.delivery)
                except BrokerError as error:
                    log.warning("cannot renew job %s: %s", held.job, error)
