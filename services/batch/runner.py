"""The lines of a batch, each brought to its answer through whatever fails meanwhile."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from headrace.batch.window import Window
from headrace.client import Client, Done
from headrace.errors import (
    BrokerError,
    HeadraceError,
    JobCancelledError,
    JobExpiredError,
    JobFailedError,
    RequestError,
)
from headrace.lifecycle import Backoff
from headrace.schemas.batch_lines import BatchRequest, LineResult, answered, refused
from headrace.schemas.batches import job_of_line
from headrace.schemas.refusals import Refusal

__all__ = ["BatchRunner"]

log = logging.getLogger(__name__)

_LANE: Final = "low"
_RETRY_FIRST_S: Final = 0.2
_RETRY_MAX_S: Final = 5.0
_JITTER: Final = 0.25
_MAX_FAILURES: Final = 3
"""Jobs of one line that may fail by what another try can better, before the line counts as failed."""

_TRY_AGAIN: Final = frozenset({"job_not_found", "stream_gap"})
"""The log expired under a reader: the line is asked again under the same id."""

_CANCEL_WITHIN_S: Final = 10.0


class BatchRunner:
    """Runs requests through the low lane, at most a window of them at once, and has each result recorded.

    A line is submitted under an id made of batch and line, so a runner that takes over from another attaches to what
    that one had under way. A full queue and a broker that is away are waited out. `record` must be safe to repeat; it
    is repeated while the broker is away. `trouble` is what holds lines up now, if anything does.
    """

    def __init__(
        self,
        client: Client,
        batch: str,
        *,
        window: Window,
        record: Callable[[BatchRequest, LineResult], Awaitable[None]],
    ) -> None:
        self._client = client
        self._batch = batch
        self._window = window
        self._record = record
        self._jobs: dict[int, str] = {}
        self.trouble: str | None = None
        settings = client.bus.settings
        self._queue_timeout_s = settings.max_queue_timeout_s
        self._deadline_s = min(settings.max_deadline_s, settings.max_queue_timeout_s + settings.deadline_s)

    async def run(self, requests_after: Callable[[int], AsyncIterator[BatchRequest]]) -> None:
        """Bring all requests to their ends; `requests_after` gives those behind a line, anew after an outage.

        Cancelled, it leaves the jobs that are under way alone. Raises what the requests and `record` raise, but for
        BrokerError.
        """
        after = 0
        retries = Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S)
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    async for request in requests_after(after):
                        await self._window.enter(len(request.body))
                        group.create_task(self._run_line(request), name=f"{self._batch} line {request.number}")
                        after = request.number
                    return
                except BrokerError as error:
                    log.warning("batch %s cannot be read on now: %s", self._batch, error)
                    await retries.pause()

    async def cancel_jobs(self) -> None:
        """End the jobs that were under way when `run` was cancelled; what cannot be told ends by its deadline."""
        jobs = list(self._jobs.values())
        try:
            async with asyncio.timeout(_CANCEL_WITHIN_S):
                await asyncio.gather(*map(self._cancel_job, jobs))
        except TimeoutError:
            log.warning("batch %s: not all of its jobs could be cancelled", self._batch)

    async def _cancel_job(self, job: str) -> None:
        try:
            await self._client.cancel(job)
        except HeadraceError as error:
            log.debug("job %s was not cancelled: %s", job, error)

    async def _run_line(self, request: BatchRequest) -> None:
        try:
            result = await self._answer(request)
            retries = Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S)
            while True:
                try:
                    await self._record(request, result)
                    break
                except BrokerError as error:
                    log.warning("a result of batch %s cannot be stored now: %s", self._batch, error)
                    await retries.pause()
            self._jobs.pop(request.number, None)
            self.trouble = None
            self._window.answered()
        finally:
            self._window.leave(len(request.body))

    async def _answer(self, request: BatchRequest) -> LineResult:
        number = num_failures = 0
        retries = Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S)
        while True:
            job = self._jobs[request.number] = job_of_line(self._batch, request.number, number)
            try:
                done = await self._ask(request, job)
                return answered(request, batch=self._batch, job=job, response=done.data)
            except JobExpiredError as error:  # it did not come to its turn
                self.trouble = error.refusal.message
                self._window.refused()
                number += 1
            except (JobFailedError, JobCancelledError) as error:
                num_failures += 1
                if not _may_succeed(error) or num_failures >= _MAX_FAILURES:
                    return refused(request, batch=self._batch, job=job, refusal=error.refusal)
                number += 1
            except RequestError as error:
                if not error.is_retryable and error.code not in _TRY_AGAIN:
                    return refused(request, batch=self._batch, job=job, refusal=error.refusal)
                self.trouble = error.refusal.message
                if error.retry_after_s is None:
                    await retries.pause()
                else:
                    await self._window.again(error.retry_after_s * random.uniform(1.0, 1.0 + _JITTER))
            except BrokerError as error:
                self.trouble = str(error)
                await retries.pause()

    async def _ask(self, request: BatchRequest, job: str) -> Done:
        stream = self._client.submit(
            request.op,
            request.model,
            request.body,
            job_id=job,
            priority=_LANE,
            queue_timeout_s=self._queue_timeout_s,
            deadline_s=self._deadline_s,
            is_streaming=False,
        )
        async with stream:
            async for event in stream:
                if isinstance(event, Done):
                    return event
        raise RequestError(Refusal(code="internal", message="the stream ended without an end"), job=job)


def _may_succeed(error: RequestError) -> bool:
    """Whether another job for the same line may end better."""
    return error.is_retryable or error.code == "deadline_exceeded"
