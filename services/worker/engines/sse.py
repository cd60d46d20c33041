"""Server-sent events from bytes, however the network cut them."""

from typing import Final

__all__ = ["MAX_EVENT_BYTES", "SseParser", "SseTooLongError"]

MAX_EVENT_BYTES: Final = 8 << 20
"""Longest line or event accepted: room for a first chunk that lists a million prompt token ids."""

_BOM: Final = b"\xef\xbb\xbf"


class SseTooLongError(Exception):
    """A line or an event is longer than the limit; the stream cannot be followed any further."""


class SseParser:
    """The `data` of each complete event, the same for every split of the same bytes.

    Follows the WHATWG event stream grammar: lines end in LF, CRLF or CR, several `data` lines are joined by LF,
    comments and other fields are skipped, and what is not closed by an empty line is no event.
    """

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._line = bytearray()
        self._data: list[bytes] = []
        self._num_data_bytes = 0
        self._is_after_cr = False
        self._is_at_start = True

    def feed(self, data: bytes) -> list[bytes]:
        """The events these bytes complete, in order. Raises `SseTooLongError`."""
        if self._is_after_cr and data:
            self._is_after_cr = False
            data = data.removeprefix(b"\n")
        if not data:
            return []
        events: list[bytes] = []
        for piece in data.splitlines(keepends=True):
            self._line += piece
            if len(self._line) > self._max_event_bytes:
                raise SseTooLongError(f"a line of more than {self._max_event_bytes} bytes")
            if piece[-1:] in (b"\n", b"\r"):
                line = bytes(self._line).rstrip(b"\r\n")
                self._line.clear()
                self._take_line(line, events)
        self._is_after_cr = data.endswith(b"\r")
        return events

    def _take_line(self, line: bytes, events: list[bytes]) -> None:
        if self._is_at_start:
            self._is_at_start = False
            line = line.removeprefix(_BOM)
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
                self._num_data_bytes = 0
            return
        field, _, value = line.partition(b":")
        if field != b"data":
            return
        value = value.removeprefix(b" ")
        self._num_data_bytes += len(value) + 1
        if self._num_data_bytes > self._max_event_bytes:
            raise SseTooLongError(f"an event of more than {self._max_event_bytes} bytes")
        self._data.append(value)
