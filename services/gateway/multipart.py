"""Forms with files in them (multipart/form-data, RFC 7578), read as they come and never held."""

import re
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from headrace.errors import RequestError
from headrace.schemas.json_checks import invalid

__all__ = ["Part", "boundary_of", "read_parts"]

_MAX_HEAD_BYTES: Final = 8_192
_MAX_PARTS: Final = 32
_BOUNDARY: Final = re.compile(r'multipart/form-data\s*;.*?\bboundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_NAME: Final = re.compile(r'[;\s]name="((?:[^"\\]|\\.)*)"')
_FILENAME: Final = re.compile(r'[;\s]filename="((?:[^"\\]|\\.)*)"')
_END_OF_HEAD: Final = b"\r\n\r\n"


class Part(msgspec.Struct, frozen=True):
    """Begins a field of the form; what comes until the next one is its value."""

    name: str
    filename: str | None


def boundary_of(content_type: str) -> bytes:
    """What separates the parts. Raises RequestError where the body is no such form."""
    found = _BOUNDARY.match(content_type)
    if found is None:
        raise RequestError(invalid("Content-Type", "must be multipart/form-data with a boundary"))
    return str(found[1] or found[2]).encode("latin-1", "replace")


async def read_parts(pieces: AsyncIterator[bytes], boundary: bytes) -> AsyncIterator[Part | bytes]:
    """Each part, and after it its bytes as they come. Holds one piece and a head.

    Raises RequestError for a form that is not well-formed, and what `pieces` raises.
    """
    delimiter = b"\r\n--" + boundary
    buffer = bytearray(b"\r\n")  # the first delimiter has no line before it
    num_parts, is_in_part = 0, False
    while True:
        at = buffer.find(delimiter)
        if at < 0:
            keep = len(delimiter) - 1
            if is_in_part and len(buffer) > keep:
                yield bytes(buffer[:-keep])
            del buffer[:-keep]
            await _more(pieces, buffer)
            continue
        if is_in_part and at:
            yield bytes(buffer[:at])
        del buffer[: at + len(delimiter)]
        while len(buffer) < 2:
            await _more(pieces, buffer)
        if buffer.startswith(b"--"):
            return
        while (end := buffer.find(_END_OF_HEAD)) < 0:
            if len(buffer) > _MAX_HEAD_BYTES:
                raise _malformed()
            await _more(pieces, buffer)
        num_parts += 1
        if num_parts > _MAX_PARTS or end > _MAX_HEAD_BYTES:
            raise _malformed()
        yield _part(bytes(buffer[:end]))
        del buffer[: end + len(_END_OF_HEAD)]
        is_in_part = True


async def _more(pieces: AsyncIterator[bytes], buffer: bytearray) -> None:
    try:
        buffer += await anext(pieces)
    except StopAsyncIteration:
        raise _malformed() from None


def _part(head: bytes) -> Part:
    for line in head.decode("utf-8", "replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition" and (name := _NAME.search(value)) is not None:
            filename = _FILENAME.search(value)
            return Part(name[1], filename[1] if filename is not None else None)
    raise _malformed()


def _malformed() -> RequestError:
    return RequestError(invalid("body", "is not a well-formed form, or was cut off"))
