"""Streams and buckets of a deployment: made where missing, changed where they differ, refused where they cannot be."""

import logging
from typing import Any, Final, Literal

import msgspec

from headrace.bus.configuration import read_model
from headrace.bus.connection import ERR_STREAM_NOT_FOUND, ApiRefused, Bus, require_jetstream
from headrace.errors import BrokerUnavailableError, BrokerUnsuitableError, NotProvisionedError
from headrace.lifecycle import Backoff
from headrace.schemas.subjects import Names
from headrace.settings import Settings

__all__ = [
    "MINIMUM_SERVER",
    "Difference",
    "Provisioned",
    "StreamConfig",
    "apply_queue_limit",
    "deployment_streams",
    "differences",
    "ensure_jobs_stream",
    "ensure_provisioned",
    "jobs_stream",
    "provision",
]

log = logging.getLogger(__name__)

MINIMUM_SERVER: Final = (2, 12)
"""Per-message TTL, delete markers and batched direct get; older servers ignore unknown settings in silence."""

_NANOSECONDS: Final = 1_000_000_000
_MAX_LOG_CONSUMERS: Final = 100_000
"""The server's default of 1,000 would bound the clients that wait on inboxes of their own."""
_MARKER_TTL_S: Final = 60
_RETRY_FIRST_S: Final = 0.1
_RETRY_MAX_S: Final = 2.0
_CONFIG_HISTORY: Final = 8
_CHUNK_DEDUPE_S: Final = 600
"""Longer than anybody repeats the storing of a chunk that got no answer."""

Action = Literal["created", "changed", "unchanged"]
StreamConfig = dict[str, Any]


class Provisioned(msgspec.Struct, frozen=True):
    """What became of one stream; `changes` are `field: old → new`."""

    stream: str
    action: Action
    changes: tuple[str, ...] = ()


class Difference(msgspec.Struct, frozen=True):
    """One setting of a stream that is not what it should be."""

    key: str
    has: Any
    wanted: Any

    def __str__(self) -> str:
        return f"{self.key}: {_short(self.has)} → {_short(self.wanted)}"


def differences(current: StreamConfig, wanted: StreamConfig) -> list[Difference]:
    """What provisioning would change. Settings that it does not make are the operator's own."""
    return [
        Difference(key, current.get(key), value) for key, value in wanted.items() if not _same(current.get(key), value)
    ]


class _InfoReply(msgspec.Struct, frozen=True):
    config: dict[str, Any]


async def provision(bus: Bus, *, models: tuple[str, ...] = ()) -> list[Provisioned]:
    """Bring all streams and buckets, and the job streams of `models`, to the settings. Idempotent.

    Raises BrokerUnsuitableError where the server is too old or something cannot be changed in place.
    """
    await require_jetstream(bus, minimum=MINIMUM_SERVER)
    made = [await _ensure(bus, config) for config in deployment_streams(bus.names, bus.settings)]
    return made + [await _ensure(bus, await _configured_jobs_stream(bus, model)) for model in models]


async def ensure_provisioned(bus: Bus) -> None:
    """Make what is missing and leave alone what is there; what every service does at its start.

    Tries for `retry_for_s` where the broker does not answer. Raises BrokerUnavailableError then, BrokerUnsuitableError
    at once.
    """
    retries = Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S, for_s=bus.settings.retry_for_s)
    while True:
        try:
            await _make_missing(bus)
            break
        except BrokerUnavailableError as error:
            if retries.is_over:
                raise
            log.warning("the broker does not answer yet: %s", error)
            await retries.pause()
    await bus.sync_clock()


async def _make_missing(bus: Bus) -> None:
    await require_jetstream(bus, minimum=MINIMUM_SERVER)
    for config in deployment_streams(bus.names, bus.settings):
        if await _current(bus, config) is None:
            log.info("stream %s is missing; making it", config["name"])
            await _create(bus, config)


async def ensure_jobs_stream(bus: Bus, model: str) -> None:
    """Make a model's job stream if it has none; from then on the model is known."""
    config = await _configured_jobs_stream(bus, model)
    if await _current(bus, config) is None:
        await _create(bus, config)


async def apply_queue_limit(bus: Bus, model: str, queue_limit: int | None) -> bool:
    """Give a model's job stream its configured limit (None: the setting's); False where it has none or has it already.

    A stream that holds more than a lower limit keeps what it has and refuses until it is below.
    """
    wanted = jobs_stream(bus.names, bus.settings, model, queue_limit)
    current = await _current(bus, wanted)
    if current is None or current.get("max_msgs") == wanted["max_msgs"]:
        return False
    try:
        await bus.api(f"STREAM.UPDATE.{wanted['name']}", {**current, "max_msgs": wanted["max_msgs"]})
    except ApiRefused as refused:
        raise BrokerUnsuitableError(f"the limit of stream {wanted['name']} cannot be changed: {refused}") from None
    return True


async def _configured_jobs_stream(bus: Bus, model: str) -> StreamConfig:
    return jobs_stream(bus.names, bus.settings, model, (await read_model(bus, model)).queue_limit)


def jobs_stream(names: Names, settings: Settings, model: str, queue_limit: int | None = None) -> StreamConfig:
    """The job stream of one model: a bounded work queue that refuses when full and never drops."""
    return {
        "name": names.jobs_stream(model),
        "subjects": [names.jobs_filter(model)],
        "retention": "workqueue",
        "storage": "file",
        "num_replicas": settings.replicas,
        "max_msgs": queue_limit if queue_limit is not None else settings.queue_limit,
        "max_age": 0,
        "max_msgs_per_subject": -1,
        "discard": "new",
        "duplicate_window": int(settings.max_queue_timeout_s * _NANOSECONDS),
        "allow_direct": True,
        "republish": {"src": names.jobs_filter(model), "dest": names.wake_filter(model), "headers_only": True},
    }


def deployment_streams(names: Names, settings: Settings) -> list[StreamConfig]:
    """The streams that every deployment has, buckets and the object store among them."""
    logs = [_log_stream(names, settings, shard) for shard in range(names.num_shards)]
    dead = {
        "name": names.dead_stream,
        "subjects": [names.dead_filter()],
        "retention": "limits",
        "storage": "file",
        "num_replicas": settings.replicas,
        "discard": "new",
        "allow_direct": True,
    }
    workers = _bucket(names.workers_bucket, settings, history=1) | {
        "allow_msg_ttl": True,
        "subject_delete_marker_ttl": _MARKER_TTL_S * _NANOSECONDS,
    }
    usage = _bucket(names.usage_bucket, settings, history=1) | {"allow_msg_ttl": True}
    config = _bucket(names.config_bucket, settings, history=_CONFIG_HISTORY)
    instances = _bucket(names.instances_bucket, settings, history=1) | {
        "allow_msg_ttl": True,
        "subject_delete_marker_ttl": _MARKER_TTL_S * _NANOSECONDS,
    }
    return [*logs, dead, workers, config, usage, instances, *_batch_streams(names, settings)]


def _batch_streams(names: Names, settings: Settings) -> list[StreamConfig]:
    batches = _bucket(names.batches_bucket, settings, history=1) | {
        "allow_msg_ttl": True,
        "subject_delete_marker_ttl": _MARKER_TTL_S * _NANOSECONDS,
    }
    results = {
        "name": names.batch_stream,
        "subjects": [names.batch_filter()],
        "retention": "limits",
        "storage": "file",
        "num_replicas": settings.replicas,
        "discard": "new",
        "max_msgs_per_subject": -1,
        "allow_direct": True,
        "allow_msg_ttl": True,
    }
    # As the object-store ADR (ADR-20) lays one out.
    files = {
        "name": names.files_stream,
        "subjects": [f"$O.{names.files_store}.C.>", f"$O.{names.files_store}.M.>"],
        "retention": "limits",
        "storage": "file",
        "num_replicas": settings.replicas,
        "discard": "new",
        "max_msgs_per_subject": -1,
        "allow_direct": True,
        "allow_rollup_hdrs": True,
        "allow_msg_ttl": True,
        "duplicate_window": _CHUNK_DEDUPE_S * _NANOSECONDS,
    }
    return [batches, results, files]


def _log_stream(names: Names, settings: Settings, shard: int) -> StreamConfig:
    # No max_age, no discard-old limit, no delete markers: the fence stands on the last sequence of each subject.
    return {
        "name": names.log_stream(shard),
        "subjects": [names.log_filter(shard)],
        "retention": "limits",
        "storage": "file",
        "num_replicas": settings.replicas,
        "discard": "new",
        "max_age": 0,
        "max_msgs": -1,
        "max_bytes": -1,
        "max_msgs_per_subject": -1,
        "allow_direct": True,
        "allow_msg_ttl": True,
        "max_consumers": _MAX_LOG_CONSUMERS,
        "duplicate_window": _NANOSECONDS,
        "republish": {"src": names.log_filter(shard), "dest": "_INBOX.{{wildcard(1)}}.{{wildcard(2)}}"},
    }


def _bucket(bucket: str, settings: Settings, *, history: int) -> StreamConfig:
    # As the key-value ADR (ADR-8) lays a bucket out.
    return {
        "name": f"KV_{bucket}",
        "subjects": [f"$KV.{bucket}.>"],
        "retention": "limits",
        "storage": "file",
        "num_replicas": settings.replicas,
        "max_msgs_per_subject": history,
        "discard": "new",
        "allow_direct": True,
        "allow_rollup_hdrs": True,
        "deny_delete": True,
    }


async def _ensure(bus: Bus, config: StreamConfig) -> Provisioned:
    name = config["name"]
    current = await _current(bus, config)
    if current is None:
        await _create(bus, config)
        return Provisioned(name, "created")
    changes = tuple(str(difference) for difference in differences(current, config))
    if not changes:
        return Provisioned(name, "unchanged")
    try:
        await bus.api(f"STREAM.UPDATE.{name}", {**current, **config})
    except ApiRefused as refused:
        raise BrokerUnsuitableError(
            f"stream {name} differs and cannot be changed in place ({'; '.join(changes)}): {refused}. "
            "Drain it and remove it, or use another HEADRACE_PREFIX"
        ) from None
    return Provisioned(name, "changed", changes)


async def _current(bus: Bus, config: StreamConfig) -> StreamConfig | None:
    name = config["name"]
    try:
        data = await bus.api(f"STREAM.INFO.{name}")
    except ApiRefused as refused:
        if refused.err_code == ERR_STREAM_NOT_FOUND:
            return None
        raise BrokerUnavailableError(f"stream {name}: {refused}") from None
    except NotProvisionedError:
        raise BrokerUnsuitableError("JetStream does not answer") from None
    current = msgspec.json.decode(data, type=_InfoReply).config
    if current.get("subjects") != config["subjects"]:  # `a.b` and `A_b` have the same upper case
        raise BrokerUnsuitableError(
            f"stream {name} is another deployment's: it has the subjects {_short(current.get('subjects'))}. "
            "Use another HEADRACE_PREFIX"
        )
    return current


async def _create(bus: Bus, config: StreamConfig) -> None:
    try:
        await bus.api(f"STREAM.CREATE.{config['name']}", config, timeout_s=bus.settings.retry_for_s)
    except ApiRefused as refused:
        raise BrokerUnsuitableError(f"cannot make stream {config['name']}: {refused}") from None


def _same(current: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return isinstance(current, dict) and all(_same(current.get(key), value) for key, value in wanted.items())
    return bool(current == wanted)


def _short(value: Any) -> str:
    return msgspec.json.encode(value).decode()[:80]
