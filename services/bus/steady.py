"""nats-py's client, steadied against what other clients may send."""

import logging

from nats.aio.client import Client

__all__ = ["SteadyClient"]

log = logging.getLogger(__name__)


class SteadyClient(Client):
    """The client, but a message it cannot decode is dropped.

    Subjects, replies and headers are bytes that any publisher chooses. nats-py ends its read loop over what it does
    not expect there, and the process stays deaf until its pings go unanswered, ten seconds later.
    """

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        try:
            await super()._process_msg(sid, subject, reply, data, headers)
        except Exception as error:  # the edge of the read loop: whatever one message does, the next must be read
            log.warning("a message that cannot be decoded was dropped: %s", type(error).__name__)
