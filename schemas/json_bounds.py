"""Untrusted bytes to one JSON object, in linear time and with a bounded stack.

Size and nesting are checked on the bytes, before anything is decoded: a decoder that meets 100,000 open
brackets has already spent the stack.
"""

import re
from array import array
from itertools import accumulate
from typing import Any, Final

import msgspec

from headrace.schemas.refusals import Refusal

__all__ = ["INT64_MAX", "INT64_MIN", "decode_object", "nesting_depth"]

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1

_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A JSON string, or all that follows a quote without its partner: as it always matches, no byte is read twice."""

_LONG_DIGITS: Final = re.compile(rb"[0-9]{19}")
"""Only an integer of this many digits can leave the range of 64 bits."""

_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[{]}"))


def nesting_depth(data: bytes) -> int:
    """Greatest number of arrays and objects open at once; brackets inside strings do not count.

    Exact for valid JSON, and for the valid beginning of anything else, which is all a decoder ever enters.
    """
    return _depth(_STRING.sub(b"", data))


def _depth(without_strings: bytes) -> int:
    steps = array("b", without_strings.translate(_STEPS, _NOT_BRACKETS))
    return max(accumulate(steps), default=0)


def decode_object(data: bytes, *, max_bytes: int, max_depth: int) -> dict[str, Any] | Refusal:
    """One JSON object within bounds, or why not. Never raises; messages never repeat the input.

    Every integer of the result fits 64 bits, every float is finite, every string is encodable as UTF-8.
    Refuses with `request_too_large`, `json_too_deep`, `invalid_json` or `invalid_value` (a number out of range).
    Of duplicate keys the last one counts.
    """
    if len(data) > max_bytes:
        return Refusal(
            code="request_too_large",
            message=f"The body has {len(data)} bytes, the limit is {max_bytes}. Shorten it or split the request.",
        )
    skeleton = _STRING.sub(b"", data)
    if _depth(skeleton) > max_depth:
        return Refusal(
            code="json_too_deep",
            message=f"The body nests arrays and objects deeper than {max_depth} levels.",
        )
    try:
        decoded: Any = msgspec.json.decode(data)
    except msgspec.ValidationError:
        return Refusal(code="invalid_value", message="A number in the body is out of range.")
    except msgspec.DecodeError as error:
        return Refusal(code="invalid_json", message=f"The body is not valid JSON in UTF-8: {error}.")
    if not isinstance(decoded, dict):
        return Refusal(code="invalid_json", message="The body must be a JSON object.")
    if _LONG_DIGITS.search(skeleton):
        for key, value in decoded.items():
            if _has_wide_int(value):
                return Refusal(
                    code="invalid_value", message="It holds an integer that does not fit 64 bits.", param=key[:100]
                )
    return decoded


def _has_wide_int(root: Any) -> bool:
    todo = [root]
    while todo:
        value = todo.pop()
        if isinstance(value, int):
            if not INT64_MIN <= value <= INT64_MAX:
                return True
        elif isinstance(value, list):
            todo.extend(value)
        elif isinstance(value, dict):
            todo.extend(value.values())
    return False
