"""The output and error file of a batch, written from its results."""

import contextlib
import hashlib
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from headrace.batch.files import Files
from headrace.batch.lines import read_requests
from headrace.bus.batches import BatchResults
from headrace.bus.objects import ObjectWriter
from headrace.errors import BrokerError, ObjectGoneError, RequestError
from headrace.schemas.batch_lines import unanswered
from headrace.schemas.batches import BatchRecord

__all__ = ["Assembled", "Assembler"]

_NUM_EARLIER: Final = 16
"""Runners before this one whose files are looked for: each may have died between its files and its record."""


class Assembled(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a batch, None where there is nothing in one, and how many lines are in each."""

    output_file_id: str | None
    error_file_id: str | None
    completed: int
    failed: int


class _Half:
    """One of the two files: begun with its first line."""

    def __init__(self, files: Files, record: BatchRecord, kind: str, *, ttl_s: int) -> None:
        self._files = files
        self._record = record
        self._kind = kind
        self._ttl_s = ttl_s
        self._id = file_id(record, kind, record.epoch)
        self._writer: ObjectWriter | None = None
        self.num_lines = 0

    async def write(self, line: bytes) -> None:
        if self._writer is None:
            self._writer = self._files.writer(self._record.tenant, self._id, ttl_s=self._ttl_s)
        await self._writer.write(line + b"\n")
        self.num_lines += 1

    async def commit(self) -> str | None:
        if self._writer is None:
            return None
        await self._writer.commit()
        await self._files.add(
            self._record.tenant,
            self._id,
            filename=f"{self._record.id}_{self._kind}.jsonl",
            purpose="batch_output",
            size_bytes=self._writer.size_bytes,
            ttl_s=self._ttl_s,
        )
        return self._id


class Assembler:
    """Writes the files of one batch. A file's id names the runner, so those of one that died are found and removed."""

    def __init__(self, files: Files, results: BatchResults) -> None:
        self._files = files
        self._results = results

    async def assemble(self, record: BatchRecord, *, ttl_s: int, left_out: tuple[str, str] | None) -> Assembled:
        """Write both files: all results, and for requests without one the code and message of `left_out`.

        Raises BrokerError.
        """
        await self._remove_earlier(record)
        output = _Half(self._files, record, "output", ttl_s=ttl_s)
        errors = _Half(self._files, record, "error", ttl_s=ttl_s)
        done: set[int] = set()
        async for result in self._results.each(record.tenant, record.id):
            done.add(result.number)
            await (errors if result.is_failed else output).write(result.data)
        if left_out is not None and len(done) < record.total:
            code, message = left_out
            with contextlib.suppress(ObjectGoneError, RequestError):  # who removed the input knows what was in it
                async for request in read_requests(self._input(record), skip=done):
                    line = unanswered(request, batch=record.id, code=code, message=message)
                    await errors.write(line.data)
        return Assembled(
            output_file_id=await output.commit(),
            error_file_id=await errors.commit(),
            completed=output.num_lines,
            failed=errors.num_lines,
        )

    async def discard(self, record: BatchRecord, *, epoch: int) -> None:
        """Remove the files that a runner wrote in vain. What cannot be removed now expires."""
        with contextlib.suppress(BrokerError):
            await self._bar(record, epoch)

    async def _remove_earlier(self, record: BatchRecord) -> None:
        for epoch in range(max(1, record.epoch - _NUM_EARLIER), record.epoch):
            await self._bar(record, epoch)

    async def _bar(self, record: BatchRecord, epoch: int) -> None:
        for kind in ("output", "error"):
            await self._files.bar(record.tenant, file_id(record, kind, epoch))

    def _input(self, record: BatchRecord) -> AsyncIterator[bytes]:
        return self._files.read(record.tenant, record.input_file_id)


def file_id(record: BatchRecord, kind: str, epoch: int) -> str:
    """The id of a file that the runner with that epoch writes."""
    digest = hashlib.blake2b(f"{record.tenant}/{record.id}/{kind}/{epoch}".encode(), digest_size=16)
    return f"file-{digest.hexdigest()}"
