"""Storing what may safely be stored again: repeated until the broker's answer is clear."""

from collections.abc import Mapping
from typing import Final

from headrace.bus.connection import Bus, Refused, Stored, Unknown
from headrace.errors import BrokerUnavailableError
from headrace.lifecycle import Backoff

__all__ = ["store_surely"]

_RETRY_FIRST_S: Final = 0.1
_RETRY_MAX_S: Final = 2.0


async def store_surely(bus: Bus, subject: str, data: bytes, *, headers: Mapping[str, str]) -> Stored | Refused:
    """Store a message whose headers keep it from being stored twice: by a message id, or by what they expect.

    With an expectation, a refusal as a lost race may mean that an earlier try was stored. Tries for `retry_for_s`, then
    raises BrokerUnavailableError: it may be stored or not.
    """
    retries = Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S, for_s=bus.settings.retry_for_s)
    while True:
        result = await bus.store(subject, data, headers=headers)
        if not isinstance(result, Unknown):
            return result
        if retries.is_over:
            raise BrokerUnavailableError(f"the broker did not take a message for {subject}: {result.reason}")
        await retries.pause()
