"""Keys of a bucket by compare-and-set, without what nats-py's key-value store lacks or gets wrong."""

from collections.abc import AsyncIterator
from typing import Final

import msgspec
from nats.aio.msg import Msg

from headrace.bus.batchget import batch_each
from headrace.bus.connection import ERR_STREAM_NOT_FOUND, ApiRefused, Bus, StoreResult
from headrace.errors import BrokerUnavailableError, NotProvisionedError
from headrace.schemas import subjects

__all__ = ["Bucket", "KeyValue"]

_HDR_OPERATION: Final = "KV-Operation"


class KeyValue(msgspec.Struct, frozen=True):
    """A key as it stands; `value` is None where it was removed or has expired."""

    key: str
    revision: int
    value: bytes | None


class _State(msgspec.Struct, frozen=True):
    last_seq: int = 0


class _Info(msgspec.Struct, frozen=True):
    state: _State = _State()


class Bucket:
    """One bucket, as the key-value ADR (ADR-8) lays it out."""

    def __init__(self, bus: Bus, bucket: str) -> None:
        self._bus = bus
        self.stream = f"KV_{bucket}"
        self.prefix = f"$KV.{bucket}."

    async def get(self, key: str) -> KeyValue | None:
        """The key as it stands; None if it was never written.

        Raises NotProvisionedError where there is no bucket, BrokerUnavailableError.
        """
        try:
            reply = await self._bus.request(f"$JS.API.DIRECT.GET.{self.stream}.{self.prefix}{key}")
        except NotProvisionedError:
            await self.last_revision()  # tells a bucket that is missing from one that is not served now
            raise BrokerUnavailableError(f"cannot read {key}: {self.stream} is not served now") from None
        status = (reply.headers or {}).get("Status")
        if status not in (None, "404"):
            raise BrokerUnavailableError(f"cannot read {key} of {self.stream}: status {status}")
        return self._entry(reply)

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        expected_revision: int,
        ttl_s: int | None = None,
        timeout_s: float | None = None,
    ) -> StoreResult:
        """Write a key if its revision is still that (0: there is none)."""
        headers = {subjects.HDR_EXPECTED_LAST_SUBJECT_SEQUENCE: str(expected_revision)}
        if ttl_s is not None:
            headers[subjects.HDR_TTL] = str(ttl_s)
        return await self._bus.store(f"{self.prefix}{key}", value, headers=headers, timeout_s=timeout_s)

    async def remove(self, key: str, *, expected_revision: int, ttl_s: int | None = None) -> StoreResult:
        """Take a key away if its revision is still that; what marks it as gone lives `ttl_s`, or for good.

        It is a PURGE, since of a DEL that expires the broker makes a marker of its own, as if the key had expired then.
        """
        headers = {subjects.HDR_EXPECTED_LAST_SUBJECT_SEQUENCE: str(expected_revision), _HDR_OPERATION: "PURGE"}
        if ttl_s is not None:
            headers[subjects.HDR_TTL] = str(ttl_s)
        return await self._bus.store(f"{self.prefix}{key}", b"", headers=headers)

    async def last_revision(self) -> int:
        """The newest revision of the bucket. Raises NotProvisionedError where there is no bucket."""
        try:
            data = await self._bus.api(f"STREAM.INFO.{self.stream}")
        except ApiRefused as refused:
            if refused.err_code == ERR_STREAM_NOT_FOUND:
                raise NotProvisionedError(f"there is no bucket {self.stream}; run `headrace provision`") from None
            raise BrokerUnavailableError(f"{self.stream}: {refused}") from None
        return msgspec.json.decode(data, type=_Info).state.last_seq

    async def changes(self, *, after: int, keys: str = ">") -> AsyncIterator[KeyValue]:
        """Writes since revision `after`, in order, of keys that match; of keys written often the later are left."""
        async for message in batch_each(self._bus, self.stream, f"{self.prefix}{keys}", from_sequence=after + 1):
            entry = self._entry(message)
            if entry is not None:
                yield entry

    def _entry(self, message: Msg) -> KeyValue | None:
        headers = message.headers or {}
        subject = headers.get(subjects.HDR_SUBJECT, "")
        if subjects.HDR_SEQUENCE not in headers or not subject.startswith(self.prefix):
            return None
        is_gone = _HDR_OPERATION in headers or subjects.HDR_MARKER_REASON in headers
        key = subject.removeprefix(self.prefix)
        return KeyValue(key, int(headers[subjects.HDR_SEQUENCE]), None if is_gone else message.data)
