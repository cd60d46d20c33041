"""Large objects in the broker, in chunks, as the object-store ADR (ADR-20) lays them out.

nats-py's own store repeats no chunk that got no answer, waits for ever for one that is gone, and leaves what was half
written; nothing here holds more of an object than a few chunks.
"""

import base64
import hashlib
import math
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Final

import msgspec

from headrace.bus.batchget import batch_each, batch_get
from headrace.bus.clock import parse_time
from headrace.bus.connection import ApiRefused, Bus, Refused
from headrace.bus.surely import store_surely
from headrace.errors import BrokerUnavailableError, ObjectGoneError
from headrace.schemas import subjects

__all__ = ["WRITER_RESTS_S", "ObjectInfo", "ObjectWriter", "Objects", "StoredObject"]

WRITER_RESTS_S: Final = 3600.0
"""A writer that stored nothing for longer gives up: what it wrote before may have been taken for a dead one's."""

_CHUNK_BYTES: Final = 128 * 1024
_NUM_CHUNKS_AT_ONCE: Final = 8


class _Options(msgspec.Struct, frozen=True):
    max_chunk_size: int = _CHUNK_BYTES


class ObjectInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An object as the store describes it; `digest` is `SHA-256=` and the hash in URL-safe base64."""

    name: str
    bucket: str
    nuid: str
    size: int = 0
    chunks: int = 0
    digest: str = ""
    options: _Options = _Options()


class StoredObject(msgspec.Struct, frozen=True):
    """An object, and when its description was written, in Unix seconds by the broker's clock."""

    info: ObjectInfo
    stored_at: float


class _State(msgspec.Struct, frozen=True):
    subjects: dict[str, int] | None = None


class _StreamInfo(msgspec.Struct, frozen=True):
    state: _State = _State()
    total: int = 0


class Objects:
    """The objects of one bucket, each written once under a name of its own."""

    def __init__(self, bus: Bus, bucket: str) -> None:
        self._bus = bus
        self._bucket = bucket
        self._stream = f"OBJ_{bucket}"

    def writer(self, name: str, *, ttl_s: int) -> "ObjectWriter":
        """Begin an object; all of it is gone `ttl_s` after each part was written."""
        return ObjectWriter(self._bus, self, name, ttl_s=ttl_s)

    async def info(self, name: str) -> ObjectInfo:
        """What is known of an object. Raises ObjectGoneError, BrokerUnavailableError."""
        reply = await self._bus.request(f"$JS.API.DIRECT.GET.{self._stream}.{self.meta_subject(name)}")
        headers = reply.headers or {}
        if subjects.HDR_SEQUENCE not in headers or not reply.data:
            if headers.get("Status") in ("404", None):
                raise ObjectGoneError(f"there is no object {name}")
            raise BrokerUnavailableError(f"cannot read object {name}: status {headers['Status']}")
        return msgspec.json.decode(reply.data, type=ObjectInfo)

    async def read(self, name: str) -> AsyncIterator[bytes]:
        """Its bytes in pieces, a megabyte of them in memory. Raises ObjectGoneError, BrokerUnavailableError.

        Raises ObjectGoneError also after some pieces, where the rest has expired or is damaged.
        """
        info = await self.info(name)
        sequence, num_read, digest = 1, 0, hashlib.sha256()
        while num_read < info.chunks:
            limit = min(_NUM_CHUNKS_AT_ONCE, info.chunks - num_read)
            subject = self.chunk_subject(info.nuid)
            chunks = await batch_get(self._bus, self._stream, subject, from_sequence=sequence, limit=limit)
            if not chunks:
                raise ObjectGoneError(f"a part of object {name} is gone")
            for chunk in chunks:
                digest.update(chunk.data)
                yield chunk.data
            num_read += len(chunks)
            sequence = int((chunks[-1].headers or {})[subjects.HDR_SEQUENCE]) + 1
        if info.digest != digest_text(digest.digest()):
            raise ObjectGoneError(f"object {name} is not what was written")

    async def remove(self, name: str) -> None:
        """Take an object away; fine if it is not there. Raises BrokerUnavailableError."""
        try:
            info = await self.info(name)
        except ObjectGoneError:
            return
        await self.purge(self.meta_subject(name))
        await self.purge(self.chunk_subject(info.nuid))

    async def each(self) -> AsyncIterator[StoredObject]:
        """All objects that were committed, in the order of their writing. Raises BrokerUnavailableError.

        Raises it also for a description that cannot be read: what belongs to it is not known then.
        """
        async for message in batch_each(self._bus, self._stream, f"$O.{self._bucket}.M.*", from_sequence=1):
            stored_at = _stored_at(message.headers)
            try:
                info = msgspec.json.decode(message.data, type=ObjectInfo)
            except msgspec.DecodeError as error:
                raise BrokerUnavailableError(f"{self._stream}: {message.subject} cannot be read: {error}") from None
            yield StoredObject(info, stored_at)

    async def nuids(self) -> set[str]:
        """Of which objects there are chunks, committed or not. Raises BrokerUnavailableError."""
        found: set[str] = set()
        prefix = f"$O.{self._bucket}.C."
        while True:
            payload = {"subjects_filter": f"{prefix}*", "offset": len(found)}
            try:
                data = await self._bus.api(f"STREAM.INFO.{self._stream}", payload)
            except ApiRefused as refused:
                raise BrokerUnavailableError(f"{self._stream}: {refused}") from None
            info = msgspec.json.decode(data, type=_StreamInfo)
            page = {subject.removeprefix(prefix) for subject in info.state.subjects or {}} - found
            found |= page
            if not page or len(found) >= info.total:
                return found

    async def last_chunk_at(self, nuid: str) -> float | None:
        """When the last chunk of an object was written; None if there is none. Raises BrokerUnavailableError."""
        reply = await self._bus.request(f"$JS.API.DIRECT.GET.{self._stream}.{self.chunk_subject(nuid)}")
        headers = reply.headers or {}
        if subjects.HDR_SEQUENCE not in headers and headers.get("Status") != "404":
            raise BrokerUnavailableError(f"cannot read {self._stream}: status {headers.get('Status')}")
        return _stored_at(headers) if subjects.HDR_SEQUENCE in headers else None

    async def purge(self, subject: str) -> None:
        """Drop all messages of a subject. Raises BrokerUnavailableError."""
        try:
            await self._bus.api(f"STREAM.PURGE.{self._stream}", {"filter": subject})
        except ApiRefused as refused:
            raise BrokerUnavailableError(f"{self._stream} cannot be purged: {refused}") from None

    def describe(self, name: str, nuid: str) -> ObjectInfo:
        """An object of this bucket that has nothing in it yet."""
        return ObjectInfo(name=name, bucket=self._bucket, nuid=nuid)

    def chunk_subject(self, nuid: str) -> str:
        """Where the chunks of an object lie, in order."""
        return f"$O.{self._bucket}.C.{nuid}"

    def meta_subject(self, name: str) -> str:
        """Where an object is described."""
        return f"$O.{self._bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


class ObjectWriter:
    """Writes one object, which is there once it is committed; made by `Objects.writer`.

    A chunk that gets no answer is sent again under the same message id, so none is stored twice.
    """

    def __init__(self, bus: Bus, objects: Objects, name: str, *, ttl_s: int) -> None:
        self._bus = bus
        self._objects = objects
        self._name = name
        self._ttl_s = ttl_s
        self._nuid = uuid.uuid4().hex
        self._chunk_bytes = min(_CHUNK_BYTES, bus.max_data_bytes)
        self._buffer = bytearray()
        self._digest = hashlib.sha256()
        self._num_chunks = 0
        self._stored_at = bus.clock.now()
        self.size_bytes = 0

    async def write(self, data: bytes) -> None:
        """Add to it. Raises BrokerUnavailableError where the broker is away for long or takes no more."""
        self._buffer += data
        self.size_bytes += len(data)
        while len(self._buffer) >= self._chunk_bytes:
            await self._store_chunk(bytes(self._buffer[: self._chunk_bytes]))
            del self._buffer[: self._chunk_bytes]

    async def commit(self) -> ObjectInfo:
        """Write the rest and the description. Raises BrokerUnavailableError."""
        if self._buffer:
            await self._store_chunk(bytes(self._buffer))
            self._buffer.clear()
        info = msgspec.structs.replace(
            self._objects.describe(self._name, self._nuid),
            size=self.size_bytes,
            chunks=self._num_chunks,
            digest=digest_text(self._digest.digest()),
            options=_Options(self._chunk_bytes),
        )
        await self._store(self._objects.meta_subject(self._name), msgspec.json.encode(info), f"{self._nuid}.meta")
        return info

    async def abandon(self) -> None:
        """Drop what was written of an object that was not committed. Raises BrokerUnavailableError."""
        if self._num_chunks:
            await self._objects.purge(self._objects.chunk_subject(self._nuid))

    async def _store_chunk(self, chunk: bytes) -> None:
        await self._store(self._objects.chunk_subject(self._nuid), chunk, f"{self._nuid}.{self._num_chunks}")
        self._digest.update(chunk)
        self._num_chunks += 1

    async def _store(self, subject: str, data: bytes, message_id: str) -> None:
        if self._bus.clock.now() - self._stored_at > WRITER_RESTS_S:
            raise BrokerUnavailableError(f"object {self._name} was left alone for too long while it was written")
        headers = {subjects.HDR_MSG_ID: message_id, subjects.HDR_TTL: str(self._ttl_s)}
        result = await store_surely(self._bus, subject, data, headers=headers)
        if isinstance(result, Refused):
            raise BrokerUnavailableError(f"object {self._name} cannot be stored: {result.description}")
        self._stored_at = self._bus.clock.now()


def _stored_at(headers: Mapping[str, str] | None) -> float:
    """When a message was stored; a time that is not told counts as never long ago."""
    return parse_time((headers or {}).get(subjects.HDR_TIMESTAMP, "")) or math.inf


def digest_text(digest: bytes) -> str:
    """A SHA-256 digest as the store writes it."""
    return f"SHA-256={base64.urlsafe_b64encode(digest).decode()}"
