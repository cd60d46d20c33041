"""A job's history with the times the broker stored it at, for people."""

import msgspec

from headrace.bus.batchget import batch_get
from headrace.bus.connection import Bus
from headrace.bus.joblog import event_of_direct_get
from headrace.schemas import subjects
from headrace.schemas.events import Event

__all__ = ["TimedEvent", "timeline"]


class TimedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event and when the broker stored it, as RFC 3339 in UTC."""

    time: str
    event: Event


async def timeline(bus: Bus, tenant: str, job: str) -> list[TimedEvent]:
    """All events of a job that the log still has, in order; none for a job it does not know.

    Raises BrokerUnavailableError where the log cannot be read.
    """
    stream = bus.names.log_stream(bus.names.shard_of(job))
    messages = await batch_get(bus, stream, bus.names.log(tenant, job), from_sequence=1)
    return [
        TimedEvent(time=(message.headers or {}).get(subjects.HDR_TIMESTAMP, ""), event=event)
        for message in messages
        if (event := event_of_direct_get(message)) is not None
    ]
