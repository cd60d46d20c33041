"""Files and batches in the broker: their records and leases in one bucket, results in a stream of their own."""

import math
from collections.abc import AsyncIterator, Callable
from typing import Final, TypeVar

import msgspec

from headrace.bus.batchget import batch_each
from headrace.bus.connection import ApiRefused, Bus, Refused, Stored
from headrace.bus.keyvalue import Bucket, KeyValue
from headrace.bus.surely import store_surely
from headrace.errors import BrokerUnavailableError
from headrace.lifecycle import Backoff
from headrace.schemas import subjects
from headrace.schemas.batch_lines import LineResult
from headrace.schemas.batches import BatchRecord, FileRecord, Lease
from headrace.schemas.subjects import is_job_id

__all__ = ["BatchChange", "BatchRecords", "BatchResults", "SeenBatch"]

_MARKER_TTL_S: Final = 60
_AGAIN_FIRST_S: Final = 0.05
_AGAIN_MAX_S: Final = 1.0
_BESIDE_FIRST_S: Final = 0.005
_LEASE: Final = "lease"

_R = TypeVar("_R", BatchRecord, FileRecord)


class SeenBatch(msgspec.Struct, frozen=True):
    """A batch and the revision it was read at."""

    record: BatchRecord
    revision: int


class BatchChange(msgspec.Struct, frozen=True, kw_only=True):
    """What was written of a batch: the batch itself, or its lease; neither is there where it was removed."""

    tenant: str
    batch: str
    is_lease: bool
    revision: int
    record: BatchRecord | None = None
    lease: Lease | None = None


class BatchRecords:
    """Reads and writes the records. Writes name the revision they expect, so each is safe to repeat."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._bucket = Bucket(bus, bus.names.batches_bucket)

    async def add_file(
        self, record: FileRecord, *, ttl_s: int, check: Callable[[list[FileRecord]], None] | None = None
    ) -> None:
        """Make a file known, for as long as it is there, unless it was barred. Raises BrokerUnavailableError.

        `check` is called as in `add_batch`.
        """
        key, value = _file_key(record.tenant, record.id), msgspec.json.encode(record)
        if check is None:
            await self._put(key, value, expected=0, ttl_s=ttl_s)
        else:
            await self._put_beside(f"file.{record.tenant}.*", key, value, FileRecord, check, ttl_s=ttl_s)

    async def file(self, tenant: str, file: str) -> FileRecord | None:
        """A file of a tenant; None also for an id that cannot be. Raises BrokerUnavailableError."""
        if not is_job_id(file):
            return None
        entry = await self._bucket.get(_file_key(tenant, file))
        return _decoded(entry, FileRecord)

    async def files(self, tenant: str) -> list[FileRecord]:
        """All files of a tenant, oldest first. Raises BrokerUnavailableError."""
        return await self._list(f"file.{tenant}.*", FileRecord)

    async def remove_file(self, tenant: str, file: str) -> None:
        """Forget a file. What is under way to make it known is refused for a minute, also if it was not known yet.

        Raises BrokerUnavailableError where that is not sure.
        """
        key = _file_key(tenant, file)
        tries = Backoff(first_s=_AGAIN_FIRST_S, max_s=_AGAIN_MAX_S, for_s=self._bus.settings.retry_for_s)
        while True:
            entry = await self._bucket.get(key)
            if entry is not None and entry.value is None:
                return
            revision = entry.revision if entry is not None else 0
            removed = await self._bucket.remove(key, expected_revision=revision, ttl_s=_MARKER_TTL_S)
            if isinstance(removed, Stored):
                return
            if tries.is_over:
                raise BrokerUnavailableError(f"file {file} may be there still: {removed}")
            await tries.pause()

    async def add_batch(self, record: BatchRecord, *, check: Callable[[list[BatchRecord]], None] | None = None) -> bool:
        """Make a batch known; False if there is one of its id, perhaps this one, whose answer was lost.

        `check` is called with those that the tenant has, perhaps several times, and raises where they are too many.
        What it last let pass is still all there is when the broker writes: no two that are added at once exceed what
        it allows. Raises BrokerUnavailableError.
        """
        key, value = _batch_key(record.tenant, record.id), msgspec.json.encode(record)
        if check is None:
            return await self._put(key, value, expected=0) is not None
        return await self._put_beside(f"batch.{record.tenant}.*", key, value, BatchRecord, check)

    async def forget_batch(self, tenant: str, batch: str) -> None:
        """Forget a batch that is over; fine if it is not there, or is not known to be forgotten."""
        seen = await self.batch(tenant, batch)
        if seen is not None and seen.record.is_over:
            key = _batch_key(tenant, batch)
            await self._bucket.remove(key, expected_revision=seen.revision, ttl_s=_MARKER_TTL_S)

    async def batch(self, tenant: str, batch: str) -> SeenBatch | None:
        """A batch of a tenant; None also for an id that cannot be. Raises BrokerUnavailableError."""
        if not is_job_id(batch):
            return None
        entry = await self._bucket.get(_batch_key(tenant, batch))
        record = _decoded(entry, BatchRecord)
        return SeenBatch(record, entry.revision) if entry is not None and record is not None else None

    async def batches(self, tenant: str) -> list[BatchRecord]:
        """All batches of a tenant, in the order of their last writes. Raises BrokerUnavailableError."""
        return await self._list(f"batch.{tenant}.*", BatchRecord)

    async def replace_batch(self, seen: SeenBatch, record: BatchRecord, *, ttl_s: float | None = None) -> bool:
        """Write the next record of a batch; False if somebody else did since it was seen.

        Raises BrokerUnavailableError. Where an answer was lost, False may also mean that it was written: whoever reads
        it again will see.
        """
        key = _batch_key(record.tenant, record.id)
        ttl = math.ceil(ttl_s) if ttl_s is not None else None
        return await self._put(key, msgspec.json.encode(record), expected=seen.revision, ttl_s=ttl) is not None

    async def take_lease(self, tenant: str, batch: str, owner: str, *, expected: int, ttl_s: int) -> int | None:
        """Take or renew a lease whose key has revision `expected`; its new revision, None if somebody was faster.

        Raises BrokerUnavailableError where no answer came: it may be taken.
        """
        return await self._put(
            _lease_key(tenant, batch), msgspec.json.encode(Lease(owner)), expected=expected, ttl_s=ttl_s
        )

    async def lease(self, tenant: str, batch: str) -> tuple[Lease | None, int]:
        """Who holds a lease, and the revision of its key. Raises BrokerUnavailableError."""
        entry = await self._bucket.get(_lease_key(tenant, batch))
        return _decoded(entry, Lease), entry.revision if entry is not None else 0

    async def drop_lease(self, tenant: str, batch: str, *, expected: int) -> None:
        """Give a lease up, unless it is somebody else's by now. Never raises for what the broker did."""
        await self._bucket.remove(_lease_key(tenant, batch), expected_revision=expected, ttl_s=_MARKER_TTL_S)

    async def changes(self, *, after: int) -> AsyncIterator[BatchChange]:
        """What was written of batches since a revision, in order. Raises BrokerUnavailableError."""
        async for entry in self._bucket.changes(after=after, keys="batch.>"):
            _, tenant, batch, *rest = entry.key.split(".")
            is_lease = rest == [_LEASE]
            yield BatchChange(
                tenant=tenant,
                batch=batch,
                is_lease=is_lease,
                revision=entry.revision,
                record=None if is_lease else _decoded(entry, BatchRecord),
                lease=_decoded(entry, Lease) if is_lease else None,
            )

    async def _put_beside(
        self,
        keys: str,
        key: str,
        value: bytes,
        kind: type[_R],
        check: Callable[[list[_R]], None],
        *,
        ttl_s: int | None = None,
    ) -> bool:
        """Write a new key while nothing is written under `keys`; False if it was written before."""
        tries = Backoff(first_s=_BESIDE_FIRST_S, max_s=_AGAIN_MAX_S, for_s=self._bus.settings.retry_for_s)
        while True:
            entries = [entry async for entry in self._bucket.changes(after=0, keys=keys)]
            if any(entry.key == key for entry in entries):
                return False
            check(_records(entries, kind))
            last = entries[-1].revision if entries else 0
            if await self._put(key, value, expected=last, of_keys=keys, ttl_s=ttl_s) is not None:
                return True
            if tries.is_over:
                raise BrokerUnavailableError(f"{key} cannot be written: too much is written beside it")
            await tries.pause()

    async def _put(
        self, key: str, value: bytes, *, expected: int, of_keys: str | None = None, ttl_s: int | None = None
    ) -> int | None:
        """Write if the last revision of the key, or of all `of_keys`, is that; the new one, None if it is not."""
        headers = {subjects.HDR_EXPECTED_LAST_SUBJECT_SEQUENCE: str(expected)}
        if of_keys is not None:
            headers[subjects.HDR_EXPECTED_LAST_SUBJECT_SEQUENCE_SUBJECT] = f"{self._bucket.prefix}{of_keys}"
        if ttl_s is not None:
            headers[subjects.HDR_TTL] = str(ttl_s)
        result = await store_surely(self._bus, f"{self._bucket.prefix}{key}", value, headers=headers)
        if isinstance(result, Stored):
            return result.sequence
        if result.is_lost_race:
            return None
        raise BrokerUnavailableError(f"{key} cannot be written: {result.description}")

    async def _list(self, keys: str, kind: type[_R]) -> list[_R]:
        return _records([entry async for entry in self._bucket.changes(after=0, keys=keys)], kind)


class BatchResults:
    """Results of lines as they come, each written once: the first of a line stays."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def add(self, tenant: str, batch: str, result: LineResult, *, ttl_s: float) -> bool:
        """Store a result; False where the line has one already. Raises BrokerUnavailableError.

        Raises ValueError for one that is larger than the broker takes.
        """
        headers = {subjects.HDR_EXPECTED_LAST_SUBJECT_SEQUENCE: "0", subjects.HDR_TTL: str(math.ceil(ttl_s))}
        if result.is_failed:
            headers[subjects.HDR_FAILED] = "1"
        subject = self._bus.names.batch_result(tenant, batch, result.number)
        stored = await store_surely(self._bus, subject, result.data, headers=headers)
        if isinstance(stored, Refused) and stored.is_too_large:
            raise ValueError(stored.description)
        if isinstance(stored, Refused) and not stored.is_lost_race:
            raise BrokerUnavailableError(f"the result of a line cannot be stored: {stored.description}")
        return isinstance(stored, Stored)

    async def each(self, tenant: str, batch: str) -> AsyncIterator[LineResult]:
        """All results of a batch, in the order in which they came. Raises BrokerUnavailableError."""
        subject = self._bus.names.batch_results(tenant, batch)
        async for message in batch_each(self._bus, self._bus.names.batch_stream, subject, from_sequence=1):
            headers = message.headers or {}
            number = int(headers[subjects.HDR_SUBJECT].rpartition(".")[2])
            yield LineResult(number=number, is_failed=subjects.HDR_FAILED in headers, data=message.data)

    async def purge(self, tenant: str, batch: str) -> None:
        """Drop the results of a batch that is over. Raises BrokerUnavailableError."""
        payload = {"filter": self._bus.names.batch_results(tenant, batch)}
        try:
            await self._bus.api(f"STREAM.PURGE.{self._bus.names.batch_stream}", payload)
        except ApiRefused as refused:
            raise BrokerUnavailableError(f"the results of batch {batch} cannot be removed: {refused}") from None


def _file_key(tenant: str, file: str) -> str:
    return f"file.{tenant}.{file}"


def _batch_key(tenant: str, batch: str) -> str:
    return f"batch.{tenant}.{batch}"


def _lease_key(tenant: str, batch: str) -> str:
    return f"batch.{tenant}.{batch}.{_LEASE}"


def _records(entries: list[KeyValue], kind: type[_R]) -> list[_R]:
    found = [_decoded(entry, kind) for entry in entries]
    return [record for record in found if record is not None]


_D = TypeVar("_D")


def _decoded(entry: KeyValue | None, kind: type[_D]) -> _D | None:
    if entry is None or entry.value is None:
        return None
    try:
        return msgspec.json.decode(entry.value, type=kind)
    except msgspec.DecodeError:
        return None
