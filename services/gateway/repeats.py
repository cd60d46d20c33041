"""Which requests to begin a batch are repeats: by a key that was seen, or by what the client says of them."""

import hashlib
import uuid
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from headrace.errors import RequestError
from headrace.schemas.batches import BatchRecord
from headrace.schemas.json_checks import invalid
from headrace.schemas.subjects import Tenant

__all__ = ["MAX_KEY_CHARS", "RepeatKey", "batch_id", "is_same_request", "is_sent_again", "made_before", "repeat_key"]

MAX_KEY_CHARS: Final = 255

_KEYS: Final = ("X-Headrace-Id", "Idempotency-Key")
_RETRY_COUNT: Final = "x-stainless-retry-count"
_SENT_AGAIN_WITHIN_S: Final = 900.0
"""OpenAI's clients wait ten minutes for an answer before they send a request again."""


class RepeatKey(msgspec.Struct, frozen=True):
    """What names a request: the same value, of the same tenant, is the same request. `header` is where it stands."""

    header: str
    value: str


def repeat_key(headers: Mapping[str, str]) -> RepeatKey | None:
    """The key of a request, `X-Headrace-Id` before `Idempotency-Key`; None without. Raises RequestError for a bad one.

    `headers` are found in any case.
    """
    for header in _KEYS:
        if (value := headers.get(header)) is not None:
            if not 0 < len(value) <= MAX_KEY_CHARS:
                raise RequestError(invalid(header, f"must have 1 to {MAX_KEY_CHARS} characters"))
            return RepeatKey(header, value)
    return None


def batch_id(tenant: Tenant, key: RepeatKey | None) -> str:
    """The id of a batch: the same for the same key of a tenant; a new one without."""
    if key is None:
        return f"batch_{uuid.uuid4().hex}"
    return f"batch_{hashlib.blake2b(f'{tenant}/{key.value}'.encode(), digest_size=16).hexdigest()}"


def is_sent_again(headers: Mapping[str, str]) -> bool:
    """Whether the client says that it got no answer to this before. OpenAI's clients count so, and send no key."""
    count = headers.get(_RETRY_COUNT, "0")
    return count.isascii() and count.isdigit() and count.strip("0") != ""


def made_before(wanted: BatchRecord, records: Iterable[BatchRecord]) -> BatchRecord | None:
    """The newest of a tenant's batches that a request which is sent again can mean, None if there is none.

    It was asked for in the same words within the last quarter of an hour.
    """
    since = wanted.created_at - _SENT_AGAIN_WITHIN_S
    same = [record for record in records if record.created_at >= since and is_same_request(record, wanted)]
    return max(same, key=lambda record: record.created_at, default=None)


def is_same_request(one: BatchRecord, other: BatchRecord) -> bool:
    """Whether two batches were asked for in the same words."""
    return _asked(one) == _asked(other)


def _asked(record: BatchRecord) -> tuple[object, ...]:
    return (
        record.tenant,
        record.input_file_id,
        record.endpoint,
        record.completion_window,
        record.metadata or None,
        record.output_ttl_s,
    )
