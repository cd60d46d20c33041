"""One read of the deployment: who works, what waits. Writes nothing, so anybody may call it at any time."""

from datetime import UTC, datetime
from typing import Final

import msgspec
from nats.aio.msg import Msg

from headrace.bus.batchget import multi_last
from headrace.bus.configuration import read_config
from headrace.bus.connection import ERR_STREAM_NOT_FOUND, ApiRefused, Bus
from headrace.discipline.position import eta_s, position
from headrace.errors import BrokerUnavailableError, BrokerUnsuitableError, NotProvisionedError
from headrace.schemas import subjects
from headrace.schemas.config import Config
from headrace.schemas.overview import Ending, GoneWorker, Overview, QueueOverview, WorkerOverview
from headrace.schemas.subjects import QueueName
from headrace.schemas.workers import Heartbeat, decode_heartbeat

__all__ = ["list_models", "list_workers", "overview"]

_GONE_FOR_S: Final = 60.0
"""How long a worker that ended is still shown; its marker lasts about as long."""

_MAX_PAGES: Final = 1000
_OPERATION: Final = "KV-Operation"


class _NamesPage(msgspec.Struct, frozen=True):
    total: int = 0
    streams: list[str] | None = None


class _Position(msgspec.Struct, frozen=True):
    stream_seq: int = 0


class _ConsumerInfo(msgspec.Struct, frozen=True):
    name: str
    delivered: _Position = _Position()
    num_pending: int = 0
    num_ack_pending: int = 0


class _ConsumersPage(msgspec.Struct, frozen=True):
    total: int = 0
    consumers: list[_ConsumerInfo] | None = None


class _StreamState(msgspec.Struct, frozen=True):
    subjects: dict[str, int] | None = None


class _StreamInfo(msgspec.Struct, frozen=True):
    state: _StreamState = _StreamState()


async def overview(bus: Bus) -> Overview:
    """The deployment as it is now.

    Raises NotProvisionedError where it was never provisioned, BrokerUnavailableError where the broker does not answer.
    """
    streams = await _stream_names(bus)
    if f"KV_{bus.names.workers_bucket}" not in streams:
        raise NotProvisionedError(
            f"nothing is provisioned under the prefix {bus.names.prefix}; start Headrace with `headrace up`, "
            "or make its streams with `headrace provision`"
        )
    beats, gone = await _list_beats(bus)
    workers = [WorkerOverview.from_heartbeat(beat, age_s=age_s) for beat, age_s in beats]
    config = await read_config(bus)
    queues: list[QueueOverview] = []
    for model in _models_of(bus, streams):
        serving = [beat for beat, _ in beats if beat.model == model and beat.state in ("Ready", "Busy")]
        queues += _with_position(await _queues_of(bus, model), serving, config)
    return Overview(workers=tuple(workers), queues=tuple(queues), gone=tuple(gone))


async def list_models(bus: Bus) -> list[str]:
    """Every known model, sorted: those with a job stream."""
    return _models_of(bus, await _stream_names(bus))


async def list_workers(bus: Bus) -> tuple[list[WorkerOverview], list[GoneWorker]]:
    """Live workers by id, and those whose key ended within the last minute, last first."""
    beats, gone = await _list_beats(bus)
    return [WorkerOverview.from_heartbeat(beat, age_s=age_s) for beat, age_s in beats], gone


async def _list_beats(bus: Bus) -> tuple[list[tuple[Heartbeat, float]], list[GoneWorker]]:
    """Beats of live workers with their age in seconds, by id, and the workers that are gone."""
    now = bus.clock.now()
    live: list[tuple[Heartbeat, float]] = []
    gone: list[GoneWorker] = []
    bucket = bus.names.workers_bucket
    for message in await multi_last(bus, f"KV_{bucket}", f"$KV.{bucket}.>"):
        worker = (message.headers or {}).get(subjects.HDR_SUBJECT, "").rpartition(".")[2]
        age_s = _age_s(message, now)
        beat = decode_heartbeat(message.data) if message.data else None
        ending = _ending(message, is_tombstone=beat is not None and beat.is_tombstone)
        if ending is not None and age_s <= _GONE_FOR_S:
            gone.append(GoneWorker(id=worker, ending=ending, age_s=age_s, model=beat.model if beat else ""))
        elif ending is None and beat is not None:
            live.append((beat, age_s))
    return sorted(live, key=lambda each: each[0].worker), sorted(gone, key=lambda each: each.age_s)


def _ending(message: Msg, *, is_tombstone: bool) -> Ending | None:
    headers = message.headers or {}
    if is_tombstone:
        return "tombstoned"
    if headers.get(subjects.HDR_MARKER_REASON):
        return "expired"
    return "left" if headers.get(_OPERATION) else None


async def _stream_names(bus: Bus) -> list[str]:
    names: list[str] = []
    for _ in range(_MAX_PAGES):
        page = msgspec.json.decode(await _call(bus, "STREAM.NAMES", {"offset": len(names)}), type=_NamesPage)
        names += page.streams or []
        if not page.streams or len(names) >= page.total:
            break
    return names


def _models_of(bus: Bus, streams: list[str]) -> list[str]:
    models = (bus.names.model_of_stream(stream) for stream in streams)
    return sorted(model for model in models if model is not None)


async def _queues_of(bus: Bus, model: str) -> list[QueueOverview]:
    """The queues of one model in the order of their lanes; none if its stream is being removed right now."""
    stream = bus.names.jobs_stream(model)
    try:
        consumers = await _consumers(bus, stream)
        info = msgspec.json.decode(
            await _call(bus, f"STREAM.INFO.{stream}", {"subjects_filter": bus.names.jobs_filter(model)}),
            type=_StreamInfo,
        )
        stored = {
            queue: count
            for subject, count in (info.state.subjects or {}).items()
            if (queue := QueueName.from_subject(subject)) is not None
        }
        names = consumers.keys() | stored.keys() or {QueueName()}
        in_order = sorted(names, key=lambda each: (each.pool, subjects.LANES.index(each.lane), each.queue))
        return [await _queue(bus, model, name, consumers.get(name), stored.get(name, 0)) for name in in_order]
    except NotProvisionedError:
        return []


def _with_position(queues: list[QueueOverview], beats: list[Heartbeat], config: Config) -> list[QueueOverview]:
    """The queues of one model with the place and the wait of a request that came now."""
    waiting = {QueueName(each.pool, each.lane, each.queue): each.queued for each in queues}
    weights = {queue: config.weight_of(queue.queue) for queue in waiting}
    placed = []
    for each, queue in zip(queues, waiting, strict=True):
        pools = config.model(each.model).servers_of(each.pool)
        place = position(waiting, queue, num_ahead=each.queued, weights=weights)
        is_paused = config.model(each.model).paused
        wait_s = eta_s(place, [beat for beat in beats if beat.pool in pools], is_paused=is_paused)
        placed.append(msgspec.structs.replace(each, position=place, eta_s=wait_s, paused=is_paused))
    return placed


async def _queue(
    bus: Bus, model: str, name: QueueName, consumer: _ConsumerInfo | None, num_stored: int
) -> QueueOverview:
    # A queue nobody has fetched from yet has no consumer: all that is stored waits.
    queued = consumer.num_pending if consumer is not None else num_stored
    after = consumer.delivered.stream_seq if consumer is not None else 0
    return QueueOverview(
        model=model,
        pool=name.pool,
        lane=name.lane,
        queue=name.queue,
        queued=queued,
        running=consumer.num_ack_pending if consumer is not None else 0,
        oldest_age_s=await _oldest_age_s(bus, model, name, after) if queued else None,
    )


async def _consumers(bus: Bus, stream: str) -> dict[QueueName, _ConsumerInfo]:
    consumers: dict[QueueName, _ConsumerInfo] = {}
    offset = 0
    for _ in range(_MAX_PAGES):
        data = await _call(bus, f"CONSUMER.LIST.{stream}", {"offset": offset})
        page = msgspec.json.decode(data, type=_ConsumersPage)
        for consumer in page.consumers or []:
            if (name := QueueName.from_consumer(consumer.name)) is not None:
                consumers[name] = consumer
        offset += len(page.consumers or [])
        if not page.consumers or offset >= page.total:
            break
    return consumers


async def _oldest_age_s(bus: Bus, model: str, queue: QueueName, after: int) -> float | None:
    """Age of the first message never handed out; None if it was fetched in the meantime."""
    payload = {"seq": after + 1, "next_by_subj": bus.names.jobs(model, queue)}
    reply = await bus.request(f"$JS.API.DIRECT.GET.{bus.names.jobs_stream(model)}", msgspec.json.encode(payload))
    return _age_s(reply, bus.clock.now()) if subjects.HDR_TIMESTAMP in (reply.headers or {}) else None


def _age_s(message: Msg, now: float) -> float:
    """Seconds since the broker stored the message; never negative, whatever the two clocks say."""
    text = (message.headers or {}).get(subjects.HDR_TIMESTAMP, "")
    try:
        stored = datetime.fromisoformat(text)
    except ValueError:
        return 0.0
    stored = stored if stored.tzinfo is not None else stored.replace(tzinfo=UTC)
    return round(max(0.0, now - stored.timestamp()), 3)


async def _call(bus: Bus, subject: str, payload: dict[str, object]) -> bytes:
    try:
        return await bus.api(subject, payload)
    except ApiRefused as refused:
        if refused.err_code == ERR_STREAM_NOT_FOUND:
            raise NotProvisionedError(f"{subject}: {refused}") from None
        raise BrokerUnavailableError(f"{subject}: {refused}") from None
    except NotProvisionedError:
        raise BrokerUnsuitableError(
            "the NATS server runs without JetStream (or this user has none); start it with a `jetstream {}` block"
        ) from None
