"""The log of a process: one line per record on stderr, as text for people or as JSON for machines.

No prompt gets in by way of an exception: its text and its traceback are shown only at level DEBUG, else its type and
where it was raised. Other libraries are heard from WARNING on. A record is tied to its request by
`extra={"trace_id": span.trace_id, "job": job}`.
"""

import json as jsonlib
import logging
import os
import sys
import time
import traceback
from typing import Final, TextIO

from opentelemetry import trace

__all__ = ["configure_logging"]

_COLOURS: Final = {"DEBUG": "\x1b[2m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[1;31m"}
_CONTROLS: Final = {code: f"\\u{code:04x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)} | {10: "\\n"}
_MAX_FRAMES: Final = 5


def configure_logging(service: str, level: str, *, json: bool, worker: str = "", stream: TextIO | None = None) -> None:
    """Send `headrace`'s records from `level` on to stderr, naming service and worker. Calling it again replaces."""
    handler = _Handler(stream or sys.stderr)
    has_colours = handler.stream.isatty() and "NO_COLOR" not in os.environ
    handler.setFormatter(_Formatter(service, worker, is_json=json, has_colours=has_colours))
    root = logging.getLogger()
    for previous in [known for known in root.handlers if isinstance(known, _Handler)]:
        root.removeHandler(previous)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("headrace").setLevel(level.upper())


class _Handler(logging.StreamHandler[TextIO]):
    """Marks the handler as ours, so that another call finds it and leaves others alone."""


class _Formatter(logging.Formatter):
    def __init__(self, service: str, worker: str, *, is_json: bool, has_colours: bool) -> None:
        super().__init__()
        self._who = {"service": service, "worker": worker}
        self._is_json = is_json
        self._has_colours = has_colours

    def format(self, record: logging.LogRecord) -> str:
        current = trace.get_current_span().get_span_context()
        utc = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = {"time": f"{utc}.{int(record.msecs):03d}Z", "level": record.levelname, **self._who}
        tail = {
            "job": getattr(record, "job", ""),
            "trace_id": getattr(
                record, "trace_id", trace.format_trace_id(current.trace_id) if current.is_valid else ""
            ),
            "exception": _describe(record),
        }
        if self._is_json:
            fields = {**head, "logger": record.name, "message": record.getMessage(), **tail}
            return jsonlib.dumps({name: value for name, value in fields.items() if value}, default=str)
        who = "/".join(filter(None, self._who.values()))
        ids = "".join(f" {name}={value}" for name, value in tail.items() if value)
        line = f"{head['time']} {record.levelname:<7} {who} {record.getMessage()}{ids}".translate(_CONTROLS)
        colour = _COLOURS.get(record.levelname) if self._has_colours else None
        return f"{colour}{line}\x1b[0m" if colour else line


def _describe(record: logging.LogRecord) -> str:
    """The record's exception: all of it at level DEBUG, else its type and the innermost frames."""
    exc = record.exc_info[1] if record.exc_info else None
    if exc is None:
        return ""
    if logging.getLogger("headrace").isEnabledFor(logging.DEBUG):
        return "".join(traceback.format_exception(exc)).rstrip()
    frames = traceback.extract_tb(exc.__traceback__)[-_MAX_FRAMES:]
    places = " < ".join(f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    return f"{type(exc).__name__} ({places})"
