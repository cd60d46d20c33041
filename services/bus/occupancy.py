"""How many messages a queue name holds in a model's stream, over all pools and lanes, and which is the last."""

import msgspec

from headrace.bus.connection import ERR_STREAM_NOT_FOUND, ApiRefused, Bus
from headrace.errors import BrokerUnavailableError, NotProvisionedError
from headrace.schemas import subjects

__all__ = ["last_sequence", "num_messages"]


class _State(msgspec.Struct, frozen=True):
    subjects: dict[str, int] | None = None


class _Info(msgspec.Struct, frozen=True):
    state: _State = _State()


async def last_sequence(bus: Bus, model: str, queue: str) -> int:
    """Sequence of the last message, 0 if there is none; what `JobQueue.publish` takes as `after`.

    Raises NotProvisionedError where the model has no stream that is served, BrokerUnavailableError.
    """
    payload = {"last_by_subj": bus.names.jobs_of_queue(model, queue)}
    reply = await bus.request(f"$JS.API.DIRECT.GET.{bus.names.jobs_stream(model)}", msgspec.json.encode(payload))
    return int((reply.headers or {}).get(subjects.HDR_SEQUENCE, "0"))


async def num_messages(bus: Bus, model: str, queue: str) -> int:
    """Messages, waiting and running alike. Raises as `last_sequence` does."""
    stream = bus.names.jobs_stream(model)
    try:
        data = await bus.api(f"STREAM.INFO.{stream}", {"subjects_filter": bus.names.jobs_of_queue(model, queue)})
    except ApiRefused as refused:
        if refused.err_code == ERR_STREAM_NOT_FOUND:
            raise NotProvisionedError(f"model {model!r} has no stream {stream}") from None
        raise BrokerUnavailableError(f"{stream}: {refused}") from None
    return sum((msgspec.json.decode(data, type=_Info).state.subjects or {}).values())
