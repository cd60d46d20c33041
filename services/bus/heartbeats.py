"""The workers bucket: beats by compare-and-set with a time to live, reads, and a watcher that cannot go deaf."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator
from typing import Final

import msgspec
from nats.aio.msg import Msg

from headrace.bus.batchget import multi_last
from headrace.bus.connection import Bus, StoreResult
from headrace.bus.following import following
from headrace.bus.keyvalue import Bucket
from headrace.errors import BrokerUnavailableError
from headrace.schemas import subjects
from headrace.schemas.workers import Heartbeat, SeenBeat, decode_heartbeat

__all__ = ["WorkersBucket", "WorkersView"]

log = logging.getLogger(__name__)

_RELIST_S: Final = 0.5
_LEFT_FOR_S: Final = 60
_KV_OPERATION: Final = "KV-Operation"
_REMOVED_TTL_S: Final = 60


class WorkersBucket:
    """Reads and writes heartbeats."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._keys = Bucket(bus, bus.names.workers_bucket)
        self._stream = f"KV_{bus.names.workers_bucket}"
        self._subject = f"$KV.{bus.names.workers_bucket}"

    @property
    def stream(self) -> str:
        """The stream behind the bucket."""
        return self._stream

    async def put(
        self, beat: Heartbeat, *, expected_revision: int, ttl_s: float, timeout_s: float | None = None
    ) -> StoreResult:
        """Write a beat if the key's revision is still `expected_revision`; it expires after `ttl_s` (1 s at least)."""
        return await self._keys.put(
            beat.worker,
            msgspec.json.encode(beat),
            expected_revision=expected_revision,
            ttl_s=max(1, math.ceil(ttl_s)),
            timeout_s=timeout_s,
        )

    async def get(self, worker: str) -> SeenBeat | None:
        """The key as it stands; None if it was never written, `beat` None if it expired."""
        reply = await self._bus.request(f"$JS.API.DIRECT.GET.{self._stream}.{self._subject}.{worker}")
        status = (reply.headers or {}).get("Status")
        if status is not None and status != "404":
            raise BrokerUnavailableError(f"cannot read the heartbeat of {worker}: status {status}")
        return self._seen(reply)

    async def remove(self, worker: str, *, expected_revision: int) -> StoreResult:
        """Take the key away at a worker's own end, so that nobody waits for it to expire.

        What marks it as gone expires too: a listing holds 1,024 keys at most, and worker ids come and go.
        """
        return await self._keys.remove(worker, expected_revision=expected_revision, ttl_s=_REMOVED_TTL_S)

    async def list(self) -> dict[str, SeenBeat]:
        """All keys, by worker; expired ones come with `beat` None while their markers last."""
        seen: dict[str, SeenBeat] = {}
        for message in await multi_last(self._bus, self._stream, f"{self._subject}.>"):
            entry = self._seen(message)
            subject = (message.headers or {}).get(subjects.HDR_SUBJECT, "")
            if entry is not None and subject:
                seen[subject.rpartition(".")[2]] = entry
        return seen

    def _seen(self, message: Msg) -> SeenBeat | None:
        headers = message.headers or {}
        if subjects.HDR_SEQUENCE not in headers:
            return None
        return SeenBeat(
            revision=int(headers[subjects.HDR_SEQUENCE]), beat=_beat(message), has_left=_KV_OPERATION in headers
        )


class WorkersView:
    """All heartbeats, kept current: pushed by the broker, and listed anew twice a second in case a push was lost.

    `changed` is set at each change; readers clear it. `is_fresh` says the last listing succeeded.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._bucket = WorkersBucket(bus)
        self.workers: dict[str, SeenBeat] = {}
        self.heard: dict[str, float] = {}
        self._listed_at = -math.inf
        self.changed = asyncio.Event()
        self.is_fresh = False

    @property
    def beats(self) -> dict[str, Heartbeat]:
        """Live workers only: not expired, not tombstoned."""
        return {
            worker: seen.beat
            for worker, seen in self.workers.items()
            if seen.beat is not None and not seen.beat.is_tombstone
        }

    async def refresh(self, worker: str) -> SeenBeat | None:
        """Read one key now; returns it as it stands."""
        seen = await self._bucket.get(worker)
        if seen is not None:
            self._take(worker, seen)
        return seen

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the bucket inside this context. Raises where the first listing fails."""
        await self._relist()
        beats = f"$KV.{self._bus.names.workers_bucket}.*"
        async with following(self._bus, beats, on_push=self._on_push, look_for_ever=self._relist_for_ever):
            yield

    async def _on_push(self, message: Msg) -> None:
        # A beat passes here before the broker has judged its compare-and-set, so it only says: look now.
        worker = message.subject.rpartition(".")[2]
        known = self.workers.get(worker)
        beat = decode_heartbeat(message.data)
        if known is not None and known.beat is not None and beat is not None and beat.epoch == known.beat.epoch:
            self.heard[worker] = time.monotonic()
        if known is None or known.beat is None or beat is None or _differs(known.beat, beat):
            with contextlib.suppress(BrokerUnavailableError):
                seen = await self._bucket.get(worker)
                if seen is not None:
                    self._take(worker, seen)

    async def _relist_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_RELIST_S)
            try:
                await self._relist()
            except BrokerUnavailableError as error:
                if self.is_fresh:
                    log.warning("cannot list workers: %s", error)
                self.is_fresh = False

    async def _relist(self) -> None:
        before = set(self.workers)  # whoever is pushed meanwhile may be missing from the listing
        listed_at, self._listed_at = self._listed_at, time.monotonic()
        listed = await self._bucket.list()
        for worker, seen in listed.items():
            self._take(worker, seen, unless_heard_since=listed_at)
        for worker in before - listed.keys():
            del self.workers[worker]
            self.changed.set()
        self.is_fresh = True

    def _take(self, worker: str, seen: SeenBeat, *, unless_heard_since: float = math.inf) -> None:
        """What is new in a listing was heard before, if a push came since the last one: a beat is heard once."""
        known = self.workers.get(worker)
        if known is None or seen.revision > known.revision:
            self.workers[worker] = seen
            if self.heard.get(worker, -math.inf) < unless_heard_since:
                self.heard[worker] = time.monotonic()
            self.changed.set()


def _differs(known: Heartbeat, beat: Heartbeat) -> bool:
    return (known.epoch, known.state, known.held) != (beat.epoch, beat.state, beat.held)


def _beat(message: Msg) -> Heartbeat | None:
    if (message.headers or {}).get(subjects.HDR_MARKER_REASON):
        return None
    return decode_heartbeat(message.data) if message.data else None
