"""Files of a tenant: taken in piece by piece and checked line by line, read, and removed."""

import contextlib
import uuid
from collections.abc import AsyncIterator

from headrace.bus.batches import BatchRecords
from headrace.bus.connection import Bus
from headrace.bus.objects import Objects, ObjectWriter
from headrace.errors import BrokerError, RequestError
from headrace.schemas.batch_lines import LineCheck, LineSplitter
from headrace.schemas.batches import FileRecord, Purpose
from headrace.schemas.refusals import Refusal
from headrace.schemas.subjects import Tenant

__all__ = ["Files", "Upload", "object_name"]


class Files:
    """The files in the broker: bytes in the object store, what is known of them beside the batches."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._settings = bus.settings
        self._records = BatchRecords(bus)
        self._objects = Objects(bus, bus.names.files_store)

    async def upload(self, tenant: Tenant) -> "Upload":
        """Begin to take a file of requests in. Raises RequestError where the tenant has all the files it may have."""
        now = self._bus.clock.now()
        files = await self._records.files(tenant)
        for file in files:  # it asked for less time than its bytes were given before that was known
            if file.expires_at <= now:
                await self.bar(tenant, file.id)
        self._check_room(files)
        return Upload(self._bus, self, tenant)

    def _check_room(self, files: list[FileRecord]) -> None:
        limit, now = self._settings.file_limit, self._bus.clock.now()
        if sum(file.expires_at > now for file in files) >= limit:
            message = f"There are {limit} files, which is the limit; delete some."
            raise RequestError(Refusal(code="invalid_value", message=message, param="file"))

    async def get(self, tenant: Tenant, file: str) -> FileRecord:
        """What is known of a file. Raises RequestError (`file_not_found`), BrokerError."""
        record = await self._records.file(tenant, file)
        if record is None or record.expires_at <= self._bus.clock.now():
            raise RequestError(Refusal(code="file_not_found", message="There is no file of this id.", param="file_id"))
        return record

    async def list(self, tenant: Tenant) -> list[FileRecord]:
        """All files of a tenant, oldest first. Raises BrokerError."""
        now = self._bus.clock.now()
        return [file for file in await self._records.files(tenant) if file.expires_at > now]

    async def remove(self, tenant: Tenant, file: str) -> None:
        """Remove a file. Raises RequestError (`file_not_found`), BrokerError."""
        await self.bar(tenant, (await self.get(tenant, file)).id)

    def read(self, tenant: Tenant, file: str) -> AsyncIterator[bytes]:
        """The bytes of a file. Raises ObjectGoneError, BrokerError while it is read."""
        return self._objects.read(object_name(tenant, file))

    async def check_bytes(self, tenant: Tenant, file: str) -> None:
        """Raise ObjectGoneError where `read` would at once; reads none of the bytes. Raises BrokerError."""
        await self._objects.info(object_name(tenant, file))

    def writer(self, tenant: Tenant, file: str, *, ttl_s: int) -> ObjectWriter:
        """Write the bytes of a new file; it is known after `add`."""
        return self._objects.writer(object_name(tenant, file), ttl_s=ttl_s)

    async def add(
        self,
        tenant: Tenant,
        file: str,
        *,
        filename: str,
        purpose: Purpose,
        size_bytes: int,
        ttl_s: int,
        bytes_ttl_s: int | None = None,
        check: LineCheck | None = None,
        is_counted: bool = False,
    ) -> FileRecord:
        """Make a file known whose bytes are there, and are for `bytes_ttl_s` if that is longer. Raises BrokerError.

        Raises RequestError where it `is_counted` and the tenant has all the files it may have, others that are being
        added included.
        """
        now = int(self._bus.clock.now())
        record = FileRecord(
            id=file,
            tenant=tenant,
            filename=filename,
            purpose=purpose,
            size_bytes=size_bytes,
            created_at=now,
            expires_at=now + ttl_s,
            num_lines=check.num_lines if check is not None else 0,
            urls=tuple(sorted(check.urls)) if check is not None else (),
        )
        room = self._check_room if is_counted else None
        await self._records.add_file(record, ttl_s=bytes_ttl_s or ttl_s, check=room)
        return record

    async def bar(self, tenant: Tenant, file: str) -> None:
        """Remove a file that may be there, or be on its way. Raises BrokerError."""
        await self._records.remove_file(tenant, file)
        await self._objects.remove(object_name(tenant, file))


class Upload:
    """A file of requests on its way in; holds a chunk and a line of it. Made by `Files.upload`."""

    def __init__(self, bus: Bus, files: Files, tenant: Tenant) -> None:
        self._files = files
        self._tenant = tenant
        self._ttl_s = bus.settings.file_ttl_s
        self._max_bytes = bus.settings.file_max_bytes
        self._id = f"file-{uuid.uuid4().hex}"
        self._writer = files.writer(tenant, self._id, ttl_s=self._ttl_s)
        self._is_written = False
        self._splitter = LineSplitter()
        self._check = LineCheck(max_lines=bus.settings.batch_max_lines)

    async def write(self, piece: bytes) -> None:
        """Take the next piece in. Raises RequestError for a bad line, naming it, and for a file that is too large."""
        if self._writer.size_bytes + len(piece) > self._max_bytes:
            message = f"The file is larger than the limit of {self._max_bytes} bytes. Split it."
            raise RequestError(Refusal(code="request_too_large", message=message, param="file"))
        for number, line in self._splitter.feed(piece):
            self._take(number, line)
        await self._writer.write(piece)

    async def commit(self, filename: str, *, ttl_s: int | None = None) -> FileRecord:
        """The file is whole; it is known for `ttl_s`, at most for as long as files are kept.

        Raises RequestError like `write`, BrokerError.
        """
        for number, line in self._splitter.end():
            self._take(number, line)
        if refusal := self._check.end():
            raise RequestError(refusal)
        self._is_written = True
        await self._writer.commit()
        return await self._files.add(
            self._tenant,
            self._id,
            filename=filename,
            purpose="batch",
            size_bytes=self._writer.size_bytes,
            ttl_s=min(ttl_s or self._ttl_s, self._ttl_s),
            bytes_ttl_s=self._ttl_s,
            check=self._check,
            is_counted=True,
        )

    async def abandon(self) -> None:
        """Drop what was taken in; what cannot be dropped now expires."""
        with contextlib.suppress(BrokerError):
            await self._writer.abandon()
            if self._is_written:
                await self._files.bar(self._tenant, self._id)

    def _take(self, number: int, line: bytes) -> None:
        request = self._check.take(number, line)
        if isinstance(request, Refusal):
            raise RequestError(request)


def object_name(tenant: str, file: str) -> str:
    """Name of a file's object."""
    return f"{tenant}/{file}"
