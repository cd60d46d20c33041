"""When a pool of a model was last at work, as the broker remembers it of its consumers."""

from typing import Final

import msgspec

from headrace.bus.clock import parse_time
from headrace.bus.connection import ERR_STREAM_NOT_FOUND, ApiRefused, Bus
from headrace.errors import BrokerUnavailableError, NotProvisionedError
from headrace.schemas.subjects import QueueName

__all__ = ["last_worked_at"]

_MAX_PAGES: Final = 16
"""Of 256 consumers each; a stream has at most 1,000."""


class _Place(msgspec.Struct, frozen=True):
    last_active: str | None = None


class _Consumer(msgspec.Struct, frozen=True):
    name: str
    delivered: _Place = _Place()
    ack_floor: _Place = _Place()


class _Page(msgspec.Struct, frozen=True):
    total: int = 0
    consumers: list[_Consumer] | None = None


async def last_worked_at(bus: Bus, model: str, pool: str) -> float | None:
    """Unix seconds, by the broker's clock, at which it last handed out a job of the pool or took its settlement.

    None where it remembers none: nothing was fetched yet, or it was started since. Raises BrokerUnavailableError.
    """
    stream = bus.names.jobs_stream(model)
    moments: list[float] = []
    num_listed = 0
    for _ in range(_MAX_PAGES):
        try:
            data = await bus.api(f"CONSUMER.LIST.{stream}", {"offset": num_listed})
        except ApiRefused as refused:
            if refused.err_code == ERR_STREAM_NOT_FOUND:
                return None
            raise BrokerUnavailableError(f"{stream}: {refused}") from None
        except NotProvisionedError:
            raise BrokerUnavailableError(f"{stream}: JetStream does not answer") from None
        page = msgspec.json.decode(data, type=_Page)
        for consumer in page.consumers or []:
            queue = QueueName.from_consumer(consumer.name)
            if queue is not None and queue.pool == pool:
                at = (parse_time(place.last_active or "") for place in (consumer.delivered, consumer.ack_floor))
                moments += [moment for moment in at if moment is not None]
        num_listed += len(page.consumers or [])
        if not page.consumers or num_listed >= page.total:
            break
    return max(moments, default=None)
