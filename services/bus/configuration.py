"""The config bucket: read and written as a whole by people, followed live by services."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import msgspec
from nats.aio.msg import Msg

from headrace.bus.connection import Bus
from headrace.bus.following import following
from headrace.bus.keyvalue import Bucket, KeyValue
from headrace.errors import BrokerError, NotProvisionedError
from headrace.schemas.config import AliasConfig, Config, ModelConfig, TenantConfig
from headrace.schemas.config_text import Entry, InvalidConfig, decode_entry, key_of, parse_key
from headrace.schemas.subjects import DEFAULT_TENANT

__all__ = ["ConfigView", "StoredEntry", "config_of", "read_config", "read_entries", "read_model"]

log = logging.getLogger(__name__)

_LOOK_AGAIN_S: Final = 1.0


class StoredEntry(msgspec.Struct, frozen=True):
    """A key of the bucket as it stands. `entry` is None where it was removed, or where `problem` says what is wrong."""

    key: str
    revision: int
    entry: Entry | None
    problem: str = ""


async def read_entries(bus: Bus) -> dict[str, StoredEntry]:
    """Every key, removed ones included, since their revisions are what a new write must expect.

    Raises NotProvisionedError where there is no bucket, BrokerUnavailableError.
    """
    bucket = Bucket(bus, bus.names.config_bucket)
    if await bucket.last_revision() == 0:
        return {}
    return {change.key: _stored(change) async for change in bucket.changes(after=0)}


async def read_config(bus: Bus) -> Config:
    """Everything configured, read now; what is bad is left out, and all of it where nothing is provisioned yet."""
    try:
        stored = await read_entries(bus)
    except NotProvisionedError:
        return Config()
    return config_of({key: each.entry for key, each in stored.items() if each.entry is not None})


async def read_model(bus: Bus, model: str) -> ModelConfig:
    """One model's configuration, read now; the defaults where it has none, a bad one, or nothing is provisioned yet."""
    try:
        change = await Bucket(bus, bus.names.config_bucket).get(key_of("models", model))
    except NotProvisionedError:
        return ModelConfig()
    stored = _stored(change) if change is not None else None
    return stored.entry if stored is not None and isinstance(stored.entry, ModelConfig) else ModelConfig()


class ConfigView:
    """The configuration, kept current: pushed by the broker, and asked for anew each second in case a push was lost.

    A value that cannot be is logged and changes nothing: the one before it stays. `changed` is set at each change;
    its one reader clears it. `tenants` are all known ones, `unreadable` keys whose value cannot be and had none before.
    Before it `is_read` nothing is known.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._bucket = Bucket(bus, bus.names.config_bucket)
        self._revision = 0
        self._entries: dict[str, Entry] = {}
        self._pushed = asyncio.Event()
        self._is_behind = False
        self.is_read = False
        self.unreadable: frozenset[str] = frozenset()
        self.config = Config()
        self.tenants: frozenset[str] = frozenset({DEFAULT_TENANT})
        self.changed = asyncio.Event()

    def has_tenant(self, tenant: str) -> bool:
        """Whether it is `default`, or is configured, or may be: its value cannot be read."""
        return tenant in self.tenants or key_of("tenants", tenant) in self.unreadable

    @contextlib.asynccontextmanager
    async def running(self, *, may_come_later: bool = False) -> AsyncIterator[None]:
        """Follow the bucket inside this context.

        Raises BrokerError where the first reading fails, unless it `may_come_later`: then it is tried each second.
        """
        try:
            await self._read()
        except BrokerError as error:
            if not may_come_later:
                raise
            log.warning("the configuration cannot be read yet: %s", error)
        keys = f"{self._bucket.prefix}>"
        self._pushed.set()  # what was written between that reading and the subscription is looked for at once
        async with following(self._bus, keys, on_push=self._on_push, look_for_ever=self._read_for_ever):
            yield

    async def _on_push(self, message: Msg) -> None:
        self._pushed.set()  # the broker has not yet judged its compare-and-set, so it only says: look now

    async def _read_for_ever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_AGAIN_S):
                    await self._pushed.wait()
            self._pushed.clear()
            try:
                await self._read()
            except BrokerError as error:
                log.warning("cannot read the configuration; the last one stays: %s", error)

    async def _read(self) -> None:
        newest = await self._bucket.last_revision()
        if newest < self._revision:  # the bucket was made anew; the last configuration stays until all of it is read
            self._revision = 0
            self._entries.clear()
            self.unreadable = frozenset()
            self._is_behind = True
        if newest > self._revision:
            async for change in self._bucket.changes(after=self._revision):
                self._is_behind = True
                self._take(change)
                self._revision = max(self._revision, change.revision)
        if self._is_behind:
            self.config = config_of(self._entries)
            self.tenants = frozenset({DEFAULT_TENANT, *self.config.tenants})
            self.changed.set()
        self._is_behind = False
        self.is_read = True

    def _take(self, change: KeyValue) -> None:
        stored = _stored(change)
        if stored.problem:
            is_kept = change.key in self._entries
            if not is_kept:
                self.unreadable |= {change.key}
            log.error(
                "configuration: %s; %s", stored.problem, "the value before it stays" if is_kept else "it is left out"
            )
            return
        self.unreadable -= {change.key}
        if stored.entry is None:
            self._entries.pop(change.key, None)
        else:
            self._entries[change.key] = stored.entry


def _stored(change: KeyValue) -> StoredEntry:
    if change.value is None:
        return StoredEntry(change.key, change.revision, None)
    try:
        return StoredEntry(change.key, change.revision, decode_entry(change.key, change.value))
    except InvalidConfig as error:
        return StoredEntry(change.key, change.revision, None, str(error))


def config_of(entries: Mapping[str, Entry]) -> Config:
    """The configuration that entries of the bucket make, by their keys."""
    sections: dict[str, dict[str, Any]] = {"tenants": {}, "models": {}, "aliases": {}}
    for key, entry in entries.items():
        parsed = parse_key(key)
        if parsed is not None:
            sections[parsed[0]][parsed[1]] = entry
    tenants: dict[str, TenantConfig] = sections["tenants"]
    models: dict[str, ModelConfig] = sections["models"]
    aliases: dict[str, AliasConfig] = sections["aliases"]
    return Config(tenants=tenants, models=models, aliases=aliases)
