"""Many messages of a stream in one request: the batched direct-get API, which nats-py does not offer."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from headrace.bus.connection import Bus
from headrace.errors import BrokerUnavailableError
from headrace.schemas import subjects

__all__ = ["batch_each", "batch_get", "multi_last"]

_BATCH: Final = 1000
_MAX_BATCH_BYTES: Final = 8 * 1024 * 1024
"""Well below what a subscription buffers before it drops."""

_HDR_NUM_PENDING: Final = "Nats-Num-Pending"
_STATUS_EOB = "204"
_STATUS_NONE = ("404", "408")


async def batch_each(
    bus: Bus, stream: str, subject: str, *, from_sequence: int, up_to: int | None = None, limit: int | None = None
) -> AsyncIterator[Msg]:
    """Stored messages of a subject from a sequence on, in order: all, those up to another sequence, or the first few.

    Holds one batch in memory. Raises BrokerUnavailableError where the broker does not send it in time.
    """
    sequence, num_given = max(from_sequence, 1), 0
    while True:
        wanted = _BATCH if limit is None else min(_BATCH, limit - num_given)
        if up_to is not None:
            wanted = min(wanted, up_to - sequence + 1)
        if wanted <= 0:
            return
        payload = {"batch": wanted, "max_bytes": _MAX_BATCH_BYTES, "seq": sequence, "next_by_subj": subject}
        batch = await _request_many(bus, stream, payload)
        for message in batch:
            if up_to is None or _sequence(message) <= up_to:
                num_given += 1
                yield message
        # The broker may send fewer than asked for.
        if not batch or (batch[-1].headers or {}).get(_HDR_NUM_PENDING, "0") == "0":
            return
        sequence = _sequence(batch[-1]) + 1


async def batch_get(
    bus: Bus, stream: str, subject: str, *, from_sequence: int, up_to: int | None = None, limit: int | None = None
) -> list[Msg]:
    """What `batch_each` gives, as a list."""
    found = batch_each(bus, stream, subject, from_sequence=from_sequence, up_to=up_to, limit=limit)
    return [message async for message in found]


async def multi_last(bus: Bus, stream: str, *subjects: str) -> list[Msg]:
    """The last message of each subject that matches one of these (at most 1,024; the broker answers 413 beyond)."""
    return await _request_many(bus, stream, {"multi_last": list(subjects)})


async def _request_many(bus: Bus, stream: str, payload: dict[str, Any]) -> list[Msg]:
    timeout_s = bus.settings.request_timeout_s
    inbox = bus.new_inbox()
    subscription = await bus.subscribe(inbox)
    messages: list[Msg] = []
    try:
        await bus.publish(f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode(payload), reply=inbox)
        while True:
            message = await bus.next_message(subscription, timeout_s)
            if message is None:
                raise BrokerUnavailableError(f"cannot read {stream}: no answer within {timeout_s:g} s")
            status = (message.headers or {}).get("Status")
            if status is None:
                messages.append(message)
            elif status == _STATUS_EOB or status in _STATUS_NONE:
                return messages
            else:
                raise BrokerUnavailableError(f"cannot read {stream}: status {status}")
    finally:
        with contextlib.suppress(NatsError):  # the connection may be closed by now
            await subscription.unsubscribe()


def _sequence(message: Msg) -> int:
    return int((message.headers or {})[subjects.HDR_SEQUENCE])
