"""One batch, from where its record says it is to its end."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Final

import msgspec

from headrace.batch.assembling import Assembler
from headrace.batch.files import Files
from headrace.batch.lines import read_requests
from headrace.batch.runner import BatchRunner
from headrace.batch.window import Window
from headrace.bus.batches import BatchRecords, BatchResults
from headrace.bus.connection import Bus
from headrace.client import Client
from headrace.errors import BrokerError, ObjectGoneError, RequestError
from headrace.lifecycle import wait_first
from headrace.schemas.batch_lines import BatchRequest, LineResult, refused
from headrace.schemas.batches import BatchRecord, BatchStatus, LineError, moved
from headrace.schemas.refusals import Refusal
from headrace.schemas.subjects import Tenant

__all__ = ["BatchWork", "TakenOver"]

log = logging.getLogger(__name__)

_REPORT_EVERY_S: Final = 1.0
_RESULTS_OUTLIVE_S: Final = 86_400.0
"""How long results outlive the time the batch has, for whoever comes late to write its files."""

_INPUT_GONE: Final = LineError("file_not_found", "The input file is gone.", "input_file_id")
_LEFT_OUT: Final[dict[BatchStatus, tuple[str, str]]] = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed: its batch was cancelled."),
}


class TakenOver(Exception):  # the end of a runner, not a fault; the keeper turns it into one
    """Another runner has the batch now, or it is gone; nothing is left to do here."""


class BatchWork:
    """Takes a batch on and brings it to its end; safe to begin again, here or elsewhere, whenever it stopped.

    What counts is in the broker: results that each line has once, and a record that only the latest runner can write.
    `told` is set by whoever sees that the record has changed.
    """

    def __init__(self, bus: Bus, tenant: Tenant, batch: str, *, told: asyncio.Event) -> None:
        self._bus = bus
        self._tenant = tenant
        self._batch = batch
        self._told = told
        self._records = BatchRecords(bus)
        self._results = BatchResults(bus)
        self._files = Files(bus)
        self._assembler = Assembler(self._files, self._results)
        self._epoch = 0
        self._results_until = 0.0
        self._done: set[int] = set()
        self._num_failed = 0

    async def run(self) -> None:
        """Go on to the end. Raises TakenOver, BrokerError where the broker is away for long: begin again then."""
        record = await self._take_on()
        while not record.is_over:
            if record.status == "validating":
                record = await self._validate(record)
            elif record.status == "in_progress":
                record = await self._answer_lines(record)
            else:
                record = await self._finish(record, "completed" if record.status == "finalizing" else "cancelled")
        log.info("batch %s is %s: %d answered, %d failed", record.id, record.status, record.completed, record.failed)
        await self._results.purge(self._tenant, self._batch)

    async def _take_on(self) -> BatchRecord:
        seen = await self._records.batch(self._tenant, self._batch)
        if seen is None:
            raise TakenOver(f"batch {self._batch} is gone")
        self._epoch = seen.record.epoch + 1
        record = msgspec.structs.replace(seen.record, epoch=self._epoch)
        if not await self._records.replace_batch(seen, record):
            return await self._take_on()
        return record

    async def _change(self, change: Callable[[BatchRecord], BatchRecord]) -> BatchRecord:
        """Write what `change` makes of the record, unless another runner has the batch. Repeated writes do no harm."""
        while True:
            seen = await self._records.batch(self._tenant, self._batch)
            if seen is None or seen.record.epoch != self._epoch:
                raise TakenOver(f"batch {self._batch} was taken over")
            record = change(seen.record)
            ttl_s = self._bus.settings.file_ttl_s if record.is_over else None
            if record == seen.record or await self._records.replace_batch(seen, record, ttl_s=ttl_s):
                return record

    async def _move(self, wanted: BatchStatus) -> BatchRecord:
        """To another state, unless it was told to go elsewhere meanwhile."""

        def change(record: BatchRecord) -> BatchRecord:
            is_told = record.status == "cancelling" and wanted != "cancelled"
            return record if is_told or record.status == wanted else moved(record, wanted, now=self._bus.clock.now())

        return await self._change(change)

    async def _validate(self, record: BatchRecord) -> BatchRecord:
        file = await self._records.file(self._tenant, record.input_file_id)
        if file is None:
            return await self._fail(_INPUT_GONE)
        if file.urls != (record.endpoint,):
            urls = ", ".join(file.urls)
            return await self._fail(
                LineError("invalid_value", f"The requests are for {urls}, not for {record.endpoint}.", "endpoint")
            )
        return await self._move("in_progress")

    async def _fail(self, error: LineError) -> BatchRecord:
        now = self._bus.clock.now()
        return await self._change(
            lambda record: record if record.is_over else moved(record, "failed", now=now, errors=(error,))
        )

    async def _answer_lines(self, record: BatchRecord) -> BatchRecord:
        if self._bus.clock.now() >= record.expires_at:
            return await self._finish(record, "expired")
        await self._recall()
        self._results_until = record.expires_at + _RESULTS_OUTLIVE_S
        client = Client(self._bus, self._tenant)
        window = Window(self._bus.settings.batch_window)
        runner = BatchRunner(client, self._batch, window=window, record=self._store)
        running = asyncio.create_task(
            runner.run(lambda after: self._requests(record.input_file_id, after)), name=f"lines of {self._batch}"
        )
        ended = asyncio.Event()
        running.add_done_callback(lambda _: ended.set())
        try:
            while not ended.is_set():
                await wait_first(ended, self._told, timeout_s=_REPORT_EVERY_S)
                self._told.clear()
                with contextlib.suppress(BrokerError):  # the lines go on as far as they can
                    record = await self._report()
                is_late = self._bus.clock.now() >= record.expires_at
                if record.status != "in_progress" or is_late:
                    running.cancel()
                    await asyncio.wait((running,))
                    await runner.cancel_jobs()
                    return await self._finish(record, "expired") if record.status == "in_progress" else record
        finally:
            running.cancel()
            await asyncio.wait((running,))
            if not running.cancelled():
                running.exception()  # taken note of, also where this ends otherwise
        try:
            running.result()
        except ExceptionGroup as group:
            if group.split((ObjectGoneError, RequestError))[1] is not None:
                raise
            log.warning("the input of batch %s cannot be read to its end: %s", self._batch, group.exceptions[0])
            await runner.cancel_jobs()
            return await self._finish(record, "failed", errors=(_INPUT_GONE,))
        await self._report()
        return await self._move("finalizing")

    async def _recall(self) -> None:
        """Learn which lines have their results."""
        self._done.clear()
        self._num_failed = 0
        async for result in self._results.each(self._tenant, self._batch):
            self._note(result)

    def _note(self, result: LineResult) -> None:
        if result.number not in self._done:
            self._done.add(result.number)
            self._num_failed += result.is_failed

    async def _requests(self, file: str, after: int) -> AsyncIterator[BatchRequest]:
        async for request in read_requests(self._files.read(self._tenant, file), after=after, skip=self._done):
            yield request

    async def _store(self, request: BatchRequest, result: LineResult) -> None:
        ttl_s = max(60.0, self._results_until - self._bus.clock.now())
        try:
            await self._results.add(self._tenant, self._batch, result, ttl_s=ttl_s)
        except ValueError:
            refusal = Refusal(code="internal", message="the answer is too large to be kept for the batch")
            result = refused(request, batch=self._batch, job="", refusal=refusal)
            await self._results.add(self._tenant, self._batch, result, ttl_s=ttl_s)
        self._note(result)

    async def _report(self) -> BatchRecord:
        """Tell how far it is; what the record says now."""
        completed, failed = len(self._done) - self._num_failed, self._num_failed
        return await self._change(lambda record: msgspec.structs.replace(record, completed=completed, failed=failed))

    async def _finish(
        self, record: BatchRecord, end: BatchStatus, *, errors: tuple[LineError, ...] = ()
    ) -> BatchRecord:
        """Write the files and reach the end; the record decides whose files they are."""
        settings = self._bus.settings
        ttl_s = min(record.output_ttl_s or settings.file_ttl_s, settings.file_ttl_s)
        made = await self._assembler.assemble(record, ttl_s=ttl_s, left_out=_LEFT_OUT.get(end))
        now = self._bus.clock.now()
        changes = {**msgspec.structs.asdict(made), "errors": errors}

        def change(current: BatchRecord) -> BatchRecord:
            if current.is_over or (current.status == "cancelling") != (end == "cancelled"):
                return current
            return moved(current, end, now=now, **changes)

        try:
            record = await self._change(change)
        except TakenOver:
            await self._assembler.discard(record, epoch=self._epoch)
            raise
        return record if record.status == end else await self._take_on()  # whose files replace these
