"""Facts of a deployment in which nothing is wrong, for tests that break one thing at a time."""

from typing import Any

import msgspec

from headrace import __version__
from headrace.bus.configuration import StoredEntry, config_of
from headrace.bus.consumers import Consumer
from headrace.bus.instancelist import Snapshot
from headrace.bus.provision import deployment_streams, jobs_stream
from headrace.bus.survey import Account, Beat, Part, StreamInfo
from headrace.doctor.facts import BrokerFacts, Facts, Known, StreamFacts, SystemFacts, WaitingJob
from headrace.doctor.finding import Check, Finding, Severity
from headrace.schemas.config import Config
from headrace.schemas.config_text import Entry, key_of
from headrace.schemas.overview import Overview, QueueOverview
from headrace.schemas.subjects import Names, QueueName
from headrace.schemas.workers import Heartbeat
from headrace.settings import Settings

__all__ = ["MODEL", "beat", "changed_stream", "configured", "consumer", "healthy", "queue", "severity_of", "waiting"]

MODEL = "m"
SETTINGS = Settings(state_dir="unused")
NAMES = Names()


def beat(worker: str = "w1", *, age_s: float = 0.2, ttl_s: float | None = 2.0, **fields: Any) -> Beat:
    """A worker's heartbeat."""
    told = {"state": "Ready", "model": MODEL, "kv_capacity_tokens": 4096, "kv_capacity_source": "engine"}
    return Beat(beat=Heartbeat(worker=worker, epoch="e", **{**told, **fields}), age_s=age_s, ttl_s=ttl_s)


def part(kind: str, *, version: str = __version__, **told: str) -> Part:
    """A part that answers."""
    return Part(name=f"headrace-{kind}", id=kind, version=version, metadata=told)


def consumer(name: str = "default_normal_default", **fields: Any) -> Consumer:
    """A consumer of the model's stream, one of Headrace's unless it is told otherwise."""
    queue = QueueName.from_consumer(name)
    own = {"config": {"filter_subject": NAMES.jobs(MODEL, queue)}} if queue is not None else {}
    return msgspec.convert({"name": name, **own, **fields}, Consumer)


def queue(queued: int = 3, **fields: Any) -> QueueOverview:
    """A queue in which requests wait."""
    told = {"model": MODEL, "pool": "default", "lane": "normal", "queue": "default", "running": 0, "oldest_age_s": 7.0}
    return QueueOverview(queued=queued, **{**told, **fields})


def waiting(left_s: float = 50.0, **fields: Any) -> WaitingJob:
    """A request that waits."""
    told = {"model": MODEL, "tenant": "default", "job": "j1", "queue": QueueName()}
    return WaitingJob(left_s=left_s, **{**told, **fields})


def healthy(**changes: Any) -> Facts:
    """One model, one worker, one of each part; `changes` replace fields."""
    wanted = [(None, config) for config in deployment_streams(NAMES, SETTINGS)]
    streams = tuple(
        StreamFacts(
            name=config["name"],
            wanted=config,
            found=Known(StreamInfo(config=config, leader="n1", ahead_s=0.001, round_trip_s=0.002)),
            model=model,
        )
        for model, config in [*wanted, (MODEL, jobs_stream(NAMES, SETTINGS, MODEL))]
    )
    facts = Facts(
        settings=SETTINGS,
        broker=BrokerFacts(
            url="nats://h:4222", version="2.15.1", numbers=(2, 15), max_payload_bytes=1024 * 1024, name="n1"
        ),
        account=Known(Account(streams=len(streams))),
        system=SystemFacts(is_set=True),
        stream_names=Known([stream.name for stream in streams]),
        streams=streams,
        consumers={MODEL: Known([consumer()])},
        parts=Known(
            [
                part("router", prefix=NAMES.prefix),
                part("monitor", prefix=NAMES.prefix, notices="yes"),
                part("gateway", prefix=NAMES.prefix),
                part("worker", worker="w1", model=MODEL),
            ]
        ),
        beats=Known([beat()]),
        overview=Known(Overview(workers=(), queues=(queue(),))),
        entries=Known({}),
        instances=Known(Snapshot()),
        waiting=Known([waiting()]),
        num_dead=Known(0),
    )
    return msgspec.structs.replace(facts, **changes)


def changed_stream(facts: Facts, name: str, **changes: Any) -> Facts:
    """The same, but one stream has other settings, or other `fields` of its information."""
    fields = changes.pop("fields", {})
    streams = []
    for stream in facts.streams:
        if stream.name == name:
            assert stream.info is not None
            info = msgspec.structs.replace(stream.info, config={**stream.info.config, **changes}, **fields)
            streams.append(msgspec.structs.replace(stream, found=Known(info)))
        else:
            streams.append(stream)
    return msgspec.structs.replace(facts, streams=tuple(streams))


def configured(facts: Facts, config: Config) -> Facts:
    """The same with a live configuration."""
    keyed: dict[str, Entry] = {key_of("tenants", name): entry for name, entry in config.tenants.items()}
    keyed |= {key_of("models", name): entry for name, entry in config.models.items()}
    keyed |= {key_of("aliases", name): entry for name, entry in config.aliases.items()}
    entries = {key: StoredEntry(key, 1, entry) for key, entry in keyed.items()}
    return msgspec.structs.replace(facts, entries=Known(entries), config=config_of(keyed))


def severity_of(findings: list[Finding], check: Check) -> Severity | None:
    """The worst that a check found; None where it says nothing."""
    return next((finding.severity for finding in findings if finding.id == check), None)
