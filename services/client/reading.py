"""A job's log as its client reads it: asked of any router, answered by the broker itself."""

from typing import Final

import msgspec

from headrace.bus.batchget import has_more, request_many, sequence_of
from headrace.bus.connection import Bus
from headrace.bus.joblog import event_of_direct_get
from headrace.errors import BrokerUnavailableError, NotProvisionedError
from headrace.schemas import subjects
from headrace.schemas.events import Event
from headrace.schemas.jobs import StatusRequest

__all__ = ["LogReader"]

_NOTHING: Final = "404"


class LogReader:
    """Reads the logs of one tenant's jobs.

    JetStream cannot permit a client the log of its own tenant alone, so clients have no call of JetStream: they ask on
    the status subject, which can be permitted by tenant, and a router has the broker send what is asked for.
    """

    def __init__(self, bus: Bus, tenant: str) -> None:
        self._bus = bus
        self._tenant = tenant

    async def last(self, job: str) -> Event | None:
        """The last event, None for an empty log. Raises BrokerUnavailableError."""
        what = self._what(job)
        try:
            reply = await self._bus.request(self._subject(job), msgspec.json.encode(StatusRequest(last_event=True)))
        except NotProvisionedError:
            raise BrokerUnavailableError(f"cannot read {what}: no router answers") from None
        headers = reply.headers or {}
        if headers.get("Status") != _NOTHING and subjects.HDR_SEQUENCE not in headers:
            raise BrokerUnavailableError(f"cannot read {what}: it was refused")
        return event_of_direct_get(reply)

    async def read(self, job: str, *, from_sequence: int = 1) -> list[Event]:
        """All events from a sequence on, in order. Raises BrokerUnavailableError."""
        events: list[Event] = []
        while True:
            wish = msgspec.json.encode(StatusRequest(events_from=from_sequence))
            batch = await request_many(self._bus, self._subject(job), wish, what=self._what(job))
            events += [event for message in batch if (event := event_of_direct_get(message)) is not None]
            if not has_more(batch):
                return events
            from_sequence = sequence_of(batch[-1]) + 1

    def _subject(self, job: str) -> str:
        return self._bus.names.status(self._tenant, job)

    def _what(self, job: str) -> str:
        return f"the log of job {job}"
