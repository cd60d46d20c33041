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

__all__ = [
    "BATCH",
    "MAX_BATCH_BYTES",
    "batch_each",
    "batch_get",
    "has_more",
    "multi_last",
    "request_many",
    "sequence_of",
]

BATCH: Final = 1000
"""Most messages that one answer has."""
MAX_BATCH_BYTES: Final = 8 * 1024 * 1024
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
        wanted = BATCH if limit is None else min(BATCH, limit - num_given)
        if up_to is not None:
            wanted = min(wanted, up_to - sequence + 1)
        if wanted <= 0:
            return
        payload = {"batch": wanted, "max_bytes": MAX_BATCH_BYTES, "seq": sequence, "next_by_subj": subject}
        batch = await _get(bus, stream, payload)
        for message in batch:
            if up_to is None or sequence_of(message) <= up_to:
                num_given += 1
                yield message
        if not has_more(batch):
            return
        sequence = sequence_of(batch[-1]) + 1


async def batch_get(
    bus: Bus, stream: str, subject: str, *, from_sequence: int, up_to: int | None = None, limit: int | None = None
) -> list[Msg]:
    """What `batch_each` gives, as a list."""
    found = batch_each(bus, stream, subject, from_sequence=from_sequence, up_to=up_to, limit=limit)
    return [message async for message in found]


async def multi_last(bus: Bus, stream: str, *subjects: str) -> list[Msg]:
    """The last message of each subject that matches one of these (at most 1,024; the broker answers 413 beyond)."""
    return await _get(bus, stream, {"multi_last": list(subjects)})


async def request_many(bus: Bus, subject: str, data: bytes, *, what: str) -> list[Msg]:
    """Ask on a subject, and return the messages of the broker's batched answer.

    `what` is what cannot be read where it fails: raises BrokerUnavailableError.
    """
    timeout_s = bus.settings.request_timeout_s
    inbox = bus.new_inbox()
    subscription = await bus.subscribe(inbox)
    messages: list[Msg] = []
    try:
        await bus.publish(subject, data, reply=inbox)
        while True:
            message = await bus.next_message(subscription, timeout_s)
            if message is None:
                if (denial := bus.denial_of(subject)) is not None:
                    raise denial
                raise BrokerUnavailableError(f"cannot read {what}: no answer within {timeout_s:g} s")
            headers = message.headers or {}
            status = headers.get("Status")
            if status is None and subjects.HDR_SEQUENCE not in headers:
                raise BrokerUnavailableError(f"cannot read {what}: it was refused")
            if status is None:
                messages.append(message)
            elif status == _STATUS_EOB or status in _STATUS_NONE:
                return messages
            else:
                raise BrokerUnavailableError(f"cannot read {what}: status {status}")
    finally:
        with contextlib.suppress(NatsError):  # the connection may be closed by now
            await subscription.unsubscribe()


def has_more(batch: list[Msg]) -> bool:
    """Whether the broker, which may send fewer than asked for, has more beyond this answer."""
    return bool(batch) and (batch[-1].headers or {}).get(_HDR_NUM_PENDING, "0") != "0"


async def _get(bus: Bus, stream: str, payload: dict[str, Any]) -> list[Msg]:
    return await request_many(bus, f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode(payload), what=stream)


def sequence_of(message: Msg) -> int:
    """Sequence of a message in such an answer."""
    return int((message.headers or {})[subjects.HDR_SEQUENCE])
