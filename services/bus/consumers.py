"""Whether the consumers of a job stream are Headrace's own: any other takes jobs that then no worker sees."""

import itertools
from collections.abc import Iterable

import msgspec

from headrace.bus.connection import ApiRefused, Bus
from headrace.errors import BrokerUnavailableError, BrokerUnsuitableError
from headrace.schemas.subjects import Names, QueueName

__all__ = ["Consumer", "are_overlapping", "is_own", "list_consumers", "require_own_consumers"]

_NANOSECONDS = 1_000_000_000


class _Config(msgspec.Struct, frozen=True):
    filter_subject: str = ""
    filter_subjects: tuple[str, ...] = ()


class Consumer(msgspec.Struct, frozen=True):
    """A consumer as the broker lists it."""

    name: str
    config: _Config = _Config()
    paused: bool = False
    pause_remaining: int = 0

    @property
    def filters(self) -> tuple[str, ...]:
        """Subjects whose messages it takes."""
        return self.config.filter_subjects or ((self.config.filter_subject or ">"),)

    @property
    def paused_for_s(self) -> float | None:
        """For how many seconds it still hands nothing out; None for one that is not paused."""
        return self.pause_remaining / _NANOSECONDS if self.paused else None


class _Page(msgspec.Struct, frozen=True):
    total: int = 0
    consumers: tuple[Consumer, ...] | None = None


async def require_own_consumers(bus: Bus, model: str, *, wanted: QueueName) -> None:
    """Check that a model's job stream has no consumer but those that workers make, one for each queue.

    `wanted` is the queue that is about to be served. Raises BrokerUnsuitableError, which names both consumers that
    would take the same jobs.
    """
    stream = bus.names.jobs_stream(model)
    listed = await list_consumers(bus, stream)
    ours = {wanted.consumer: bus.names.jobs(model, wanted)} | _own(bus.names, model, listed)
    strangers = [consumer for consumer in listed if not is_own(bus.names, model, consumer)]
    for stranger, (name, subject) in itertools.product(strangers, ours.items()):
        if any(are_overlapping(each, subject) for each in stranger.filters):
            raise BrokerUnsuitableError(
                f"stream {stream} has a consumer {stranger.name!r} that is none of Headrace's and takes jobs of "
                f"consumer {name!r} ({subject}); delete it with `nats consumer rm {stream} {stranger.name}`"
            )


def is_own(names: Names, model: str, consumer: Consumer) -> bool:
    """Whether a worker made it: it has the name of a queue, and takes that queue's jobs."""
    queue = QueueName.from_consumer(consumer.name)
    return queue is not None and consumer.filters == (names.jobs(model, queue),)


def are_overlapping(one: str, other: str) -> bool:
    """Whether some subject matches both filters."""
    pairs = itertools.zip_longest(one.split("."), other.split("."))
    for mine, yours in pairs:
        if ">" in (mine, yours):
            return mine is not None and yours is not None
        if mine is None or yours is None or (mine != yours and "*" not in (mine, yours)):
            return False
    return True


async def list_consumers(bus: Bus, stream: str) -> list[Consumer]:
    """All consumers of a stream. Raises BrokerUnavailableError, also where there is no such stream."""
    found: list[Consumer] = []
    while True:
        try:
            data = await bus.api(f"CONSUMER.LIST.{stream}", {"offset": len(found)})
        except ApiRefused as refused:
            raise BrokerUnavailableError(f"cannot list the consumers of {stream}: {refused}") from None
        page = msgspec.json.decode(data, type=_Page)
        found += page.consumers or ()
        if not page.consumers or len(found) >= page.total:
            return found


def _own(names: Names, model: str, consumers: Iterable[Consumer]) -> dict[str, str]:
    return {each.name: each.filters[0] for each in consumers if is_own(names, model, each)}
