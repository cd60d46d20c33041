"""Whether the consumers of a job stream are Headrace's own: any other takes jobs that then no worker sees."""

import itertools

import msgspec

from headrace.bus.connection import ApiRefused, Bus
from headrace.errors import BrokerUnavailableError, BrokerUnsuitableError
from headrace.schemas.subjects import QueueName

__all__ = ["are_overlapping", "require_own_consumers"]


class _Config(msgspec.Struct, frozen=True):
    filter_subject: str = ""
    filter_subjects: tuple[str, ...] = ()


class _Consumer(msgspec.Struct, frozen=True):
    name: str
    config: _Config

    @property
    def filters(self) -> tuple[str, ...]:
        return self.config.filter_subjects or ((self.config.filter_subject or ">"),)


class _Page(msgspec.Struct, frozen=True):
    total: int = 0
    consumers: tuple[_Consumer, ...] | None = None


async def require_own_consumers(bus: Bus, model: str, *, wanted: QueueName) -> None:
    """Check that a model's job stream has no consumer but those that workers make, one for each queue.

    `wanted` is the queue that is about to be served. Raises BrokerUnsuitableError, which names both consumers that
    would take the same jobs.
    """
    stream = bus.names.jobs_stream(model)
    ours: dict[str, str] = {wanted.consumer: bus.names.jobs(model, wanted)}
    strangers: list[_Consumer] = []
    for consumer in await _consumers(bus, stream):
        queue = QueueName.from_consumer(consumer.name)
        if queue is not None and consumer.filters == (bus.names.jobs(model, queue),):
            ours[consumer.name] = consumer.filters[0]
        else:
            strangers.append(consumer)
    for stranger, (name, subject) in itertools.product(strangers, ours.items()):
        if any(are_overlapping(each, subject) for each in stranger.filters):
            raise BrokerUnsuitableError(
                f"stream {stream} has a consumer {stranger.name!r} that is none of Headrace's and takes jobs of "
                f"consumer {name!r} ({subject}); delete it with `nats consumer rm {stream} {stranger.name}`"
            )


def are_overlapping(one: str, other: str) -> bool:
    """Whether some subject matches both filters."""
    pairs = itertools.zip_longest(one.split("."), other.split("."))
    for mine, yours in pairs:
        if ">" in (mine, yours):
            return mine is not None and yours is not None
        if mine is None or yours is None or (mine != yours and "*" not in (mine, yours)):
            return False
    return True


async def _consumers(bus: Bus, stream: str) -> list[_Consumer]:
    found: list[_Consumer] = []
    while True:
        try:
            data = await bus.api(f"CONSUMER.LIST.{stream}", {"offset": len(found)})
        except ApiRefused as refused:
            raise BrokerUnavailableError(f"cannot list the consumers of {stream}: {refused}") from None
        page = msgspec.json.decode(data, type=_Page)
        found += page.consumers or ()
        if not page.consumers or len(found) >= page.total:
            return found
