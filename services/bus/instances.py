"""The instances bucket: leases of slots and beats of hosts by compare-and-set, and a view of it, kept current."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec
from nats.aio.msg import Msg

from headrace.bus.connection import Bus, StoreResult
from headrace.bus.following import following
from headrace.bus.instancelist import Snapshot, decoded
from headrace.bus.keyvalue import Bucket
from headrace.errors import BrokerError
from headrace.schemas.instances import (
    FailedGeneration,
    GroupName,
    HostBeat,
    ProvenGeneration,
    Scale,
    Slot,
    SlotName,
    failed_key,
    host_key,
    proven_key,
)

__all__ = ["InstancesBucket", "InstancesView"]

log = logging.getLogger(__name__)

_LOOK_AGAIN_S: Final = 0.5
_GATHER_S: Final = 0.02
"""How long a push waits for others, and for the broker to have stored what it told of, before the bucket is read."""
_REMOVED_TTL_S: Final = 60
_WHOLE_EVERY_S: Final = 20.0
"""How often all of it is read, not only what is new: what tells that a key is gone is gone itself after a minute."""

_T = TypeVar("_T")


class InstancesBucket:
    """Reads and writes its keys. Reads raise BrokerError; writes say what became of them."""

    def __init__(self, bus: Bus) -> None:
        self._bucket = Bucket(bus, bus.names.instances_bucket)

    async def slot(self, name: SlotName) -> tuple[int, Slot | None]:
        """The lease of a slot as it stands, with the revision that the next write must expect."""
        return await self._read(name.key, Slot)

    async def put_slot(
        self, name: SlotName, slot: Slot, *, expected_revision: int, ttl_s: float, timeout_s: float | None = None
    ) -> StoreResult:
        """Take or renew a lease, if its revision is still that; it expires after `ttl_s`, in whole seconds."""
        return await self._put(name.key, slot, expected_revision, ttl_s=ttl_s, timeout_s=timeout_s)

    async def remove_slot(self, name: SlotName, *, expected_revision: int) -> StoreResult:
        """Give a lease back, if its revision is still that."""
        return await self._bucket.remove(name.key, expected_revision=expected_revision, ttl_s=_REMOVED_TTL_S)

    async def host(self, host: str) -> tuple[int, HostBeat | None]:
        """The beat of a host as it stands, with the revision that the next write must expect."""
        return await self._read(host_key(host), HostBeat)

    async def put_host(
        self, beat: HostBeat, *, expected_revision: int, ttl_s: float, timeout_s: float | None = None
    ) -> StoreResult:
        """Write a host's beat, if its revision is still that; it expires after `ttl_s`, in whole seconds."""
        return await self._put(host_key(beat.host), beat, expected_revision, ttl_s=ttl_s, timeout_s=timeout_s)

    async def remove_host(self, host: str, *, expected_revision: int) -> StoreResult:
        """Take a host's beat away, if its revision is still that."""
        return await self._bucket.remove(host_key(host), expected_revision=expected_revision, ttl_s=_REMOVED_TTL_S)

    async def mark_failed(self, group: GroupName, generation: str, failed: FailedGeneration) -> None:
        """Stop a generation, unless it is stopped already. Who sees no sign of it does it again. Raises BrokerError."""
        key = failed_key(group, generation)
        revision, known = await self._read(key, FailedGeneration)
        if known is None:
            await self._put(key, failed, revision)

    async def forget_failed(self, group: GroupName, generation: str) -> None:
        """Let a stopped generation be tried again, the next time that it is configured. Raises BrokerError."""
        key = failed_key(group, generation)
        revision, known = await self._read(key, FailedGeneration)
        if known is not None:
            await self._bucket.remove(key, expected_revision=revision, ttl_s=_REMOVED_TTL_S)

    async def mark_proven(self, group: GroupName, generation: str) -> None:
        """Say that a worker of this generation came up. Who sees no sign of it does it again. Raises BrokerError."""
        revision, known = await self._read(proven_key(group), ProvenGeneration)
        if known is None or known.generation != generation:
            await self._put(proven_key(group), ProvenGeneration(generation=generation), revision)

    async def _read(self, key: str, kind: type[_T]) -> tuple[int, _T | None]:
        found = await self._bucket.get(key)
        if found is None:
            return 0, None
        return found.revision, decoded(key, found.value, kind)

    async def _put(
        self,
        key: str,
        value: Any,
        expected_revision: int,
        *,
        ttl_s: float | None = None,
        timeout_s: float | None = None,
    ) -> StoreResult:
        return await self._bucket.put(
            key,
            msgspec.json.encode(value),
            expected_revision=expected_revision,
            ttl_s=None if ttl_s is None else max(1, math.ceil(ttl_s)),
            timeout_s=timeout_s,
        )


class InstancesView:
    """All of the bucket, kept current: pushed by the broker, and asked for twice a second in case a push was lost.

    `changed` is set at each change of what a key says; its one reader clears it. `is_fresh` says that the last reading
    succeeded. What cannot be decoded is left out. However long it could not be read, no key stays that is not there.
    `unsure_at` is when it last could not be read, or was found to have been made anew (seconds on the monotonic clock):
    what is missing then may be about to be written again.
    """

    def __init__(self, bus: Bus, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bucket = Bucket(bus, bus.names.instances_bucket)
        self._bus = bus
        self._clock = clock
        self._revision = 0
        self._whole_at = -math.inf
        self._values: dict[str, bytes] = {}
        self._pushed = asyncio.Event()
        self._known = Snapshot()
        self.changed = asyncio.Event()
        self.is_fresh = False
        self.unsure_at = -math.inf

    @property
    def slots(self) -> Mapping[SlotName, Slot]:
        """Leases."""
        return self._known.slots

    @property
    def hosts(self) -> Mapping[str, HostBeat]:
        """Beats of hosts, by their names."""
        return self._known.hosts

    @property
    def scales(self) -> Mapping[GroupName, Scale]:
        """What the autoscaler decided."""
        return self._known.scales

    @property
    def failed(self) -> Mapping[tuple[GroupName, str], FailedGeneration]:
        """Generations that nobody starts."""
        return self._known.failed

    @property
    def proven(self) -> Mapping[GroupName, str]:
        """The generation of each group that came up last."""
        return {group: each.generation for group, each in self._known.proven.items()}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the bucket inside this context. Raises BrokerError where the first reading fails."""
        await self._read()
        keys = f"{self._bucket.prefix}>"
        self._pushed.set()  # what was written between that reading and the subscription is looked for at once
        async with following(self._bus, keys, on_push=self._on_push, look_for_ever=self._read_for_ever):
            yield

    async def _on_push(self, message: Msg) -> None:
        # The broker has not yet judged its compare-and-set, so it only says: look now. A mere renewal says nothing.
        if self._values.get(message.subject.removeprefix(self._bucket.prefix)) != message.data:
            self._pushed.set()

    async def _read_for_ever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_AGAIN_S):
                    await self._pushed.wait()
                await asyncio.sleep(_GATHER_S)
            self._pushed.clear()
            try:
                await self._read()
            except BrokerError as error:
                if self.is_fresh:
                    log.warning("cannot read who runs what: %s", error)
                self.is_fresh = False
                self.unsure_at = self._clock()
                self._whole_at = -math.inf

    async def _read(self) -> None:
        now = self._clock()
        newest = await self._bucket.last_revision()
        if newest < self._revision:
            self.unsure_at = now
        if newest < self._revision or now - self._whole_at >= _WHOLE_EVERY_S:  # or the bucket was made anew
            await self._read_whole(newest)
            self._whole_at = now
        elif newest > self._revision:
            async for change in self._bucket.changes(after=self._revision):
                self._take(change.key, change.value)
                self._revision = max(self._revision, change.revision)
        self.is_fresh = True

    async def _read_whole(self, newest: int) -> None:
        found: dict[str, bytes | None] = {}
        revision = 0
        if newest:
            async for change in self._bucket.changes(after=0):  # a key that is written meanwhile comes again
                found[change.key] = change.value
                revision = max(revision, change.revision)
        if revision < self._revision <= newest:  # who answered is behind: that knows nothing of what is gone
            return
        for key in self._values.keys() - found.keys():
            self._take(key, None)
        for key, value in found.items():
            self._take(key, value)
        self._revision = revision

    def _take(self, key: str, value: bytes | None) -> None:
        if self._values.get(key) == value:
            return
        self.changed.set()
        if value is None:
            del self._values[key]
        else:
            self._values[key] = value
        self._known.take(key, value)
