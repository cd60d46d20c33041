"""What is known of a deployment and of this machine, as the judgements take it; plain values, gathered once."""

from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

from headrace.bus.configuration import StoredEntry
from headrace.bus.consumers import Consumer
from headrace.bus.instancelist import Snapshot
from headrace.bus.provision import StreamConfig
from headrace.bus.survey import Account, Beat, Part, Server, StreamInfo
from headrace.schemas.config import Config
from headrace.schemas.overview import Overview
from headrace.schemas.subjects import Names, QueueName
from headrace.settings import Settings

__all__ = [
    "BrokerFacts",
    "Facts",
    "Known",
    "MachineFacts",
    "OpenSecret",
    "StreamFacts",
    "SystemFacts",
    "Unread",
    "WaitingJob",
    "value_of",
]

T = TypeVar("T")


class Unread(msgspec.Struct, frozen=True, kw_only=True):
    """Why something is not known. `is_denied`: the credential does not permit to ask."""

    reason: str
    is_denied: bool = False


class Known(msgspec.Struct, Generic[T], frozen=True):
    """An answer that came."""

    value: T


class OpenSecret(msgspec.Struct, frozen=True):
    """A file with a secret that other users of the machine may read."""

    setting: str
    path: str
    mode: int


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """This machine. `state_dir_trouble` says why the state directory, or where it would be made, cannot be written."""

    state_dir: str
    state_dir_trouble: str = ""
    has_own_broker: bool = False
    free_bytes: int | None = None
    total_bytes: int | None = None
    max_open_files: int | None = None
    open_secrets: tuple[OpenSecret, ...] = ()


class BrokerFacts(Server, frozen=True, kw_only=True):
    """The server that is connected to, where, and how soon it answers."""

    url: str
    round_trip_s: float = 0.0


class SystemFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The system account as this machine's settings lead to it. `trouble` says why no notice came."""

    is_set: bool
    trouble: str = ""


class StreamFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A stream of the deployment: as it should be, and as it is. `model` is set for a job stream."""

    name: str
    wanted: StreamConfig
    found: Known[StreamInfo | None] | Unread
    model: str | None = None

    @property
    def info(self) -> StreamInfo | None:
        """The stream; None where it is missing or not known."""
        return self.found.value if isinstance(self.found, Known) else None

    @property
    def is_missing(self) -> bool:
        """Whether the broker says that there is none."""
        return isinstance(self.found, Known) and self.found.value is None


class WaitingJob(msgspec.Struct, frozen=True, kw_only=True):
    """One of the oldest jobs that wait. `left_s` is until it must have started (or, once it did, ended); negative when
    over. `router_ahead_s` is how far the clock that its router goes by is ahead of the broker's.
    """

    model: str
    tenant: str
    job: str
    queue: QueueName
    left_s: float
    router_ahead_s: float | None = None


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a reachable broker and its deployment told. `waiting` are the oldest queued jobs of each model."""

    settings: Settings
    broker: BrokerFacts
    account: Known[Account] | Unread
    has_jetstream: bool = True
    system: SystemFacts
    stream_names: Known[list[str]] | Unread
    streams: tuple[StreamFacts, ...] = ()
    consumers: Mapping[str, Known[list[Consumer]] | Unread] = {}
    parts: Known[list[Part]] | Unread
    beats: Known[list[Beat]] | Unread
    overview: Known[Overview] | Unread
    entries: Known[dict[str, StoredEntry]] | Unread
    config: Config = Config()
    instances: Known[Snapshot] | Unread
    waiting: Known[list[WaitingJob]] | Unread
    num_dead: Known[int] | Unread

    @property
    def names(self) -> Names:
        """Names of the deployment."""
        return Names(prefix=self.settings.prefix)

    @property
    def is_provisioned(self) -> bool:
        """Whether any of its streams is there, or may be."""
        return not self.streams or any(not stream.is_missing for stream in self.streams)

    @property
    def live(self) -> list[Beat]:
        """Heartbeats; none where they are not known."""
        return self.beats.value if isinstance(self.beats, Known) else []

    @property
    def own_parts(self) -> list[Part]:
        """Parts of this deployment that answer, as far as they say; another may share the broker."""
        workers = {each.beat.worker for each in self.live}
        return [
            part
            for part in value_of(self.parts, [])
            if part.told.get("prefix", self.settings.prefix) == self.settings.prefix
            and (part.name != "headrace-worker" or part.told.get("worker") in workers)
        ]

    @property
    def models(self) -> frozenset[str]:
        """Known models: those with a job stream and those that are configured."""
        streams = (self.names.model_of_stream(name) for name in value_of(self.stream_names, []))
        return frozenset({model for model in streams if model is not None}) | self.config.models.keys()


def value_of(found: Known[T] | Unread, otherwise: T) -> T:
    """The answer, or something else where there is none."""
    return found.value if isinstance(found, Known) else otherwise
