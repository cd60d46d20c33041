"""Traces: who asks for how much and when, and their file format, one JSON object per line."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Final

import msgspec

from headrace.schemas.subjects import DEFAULT_LANE, Lane, is_name

__all__ = ["MAX_ARRIVALS", "Arrival", "TraceError", "read_trace", "trace_lines"]

MAX_ARRIVALS: Final = 2_000_000
"""Arrivals of one trace; a longer file is refused rather than read into all memory."""

_Count = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]


class TraceError(ValueError):
    """A trace that cannot be played; the message names the line and what is wrong with it."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request: when it arrives, of whom, and how many tokens it has and asks for.

    `output_tokens` is what the engine will generate, which no scheduler knows; `max_tokens` the limit sent along. The
    first `prefix_tokens` of the prompt are the same for all requests that name the same `prefix`.
    """

    time_s: Annotated[float, msgspec.Meta(ge=0, le=1e7)]
    prompt_tokens: _Count
    output_tokens: _Count
    max_tokens: _Count = 1024
    tenant: str = "default"
    lane: Lane = DEFAULT_LANE
    prefix: str = ""
    prefix_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0


def read_trace(lines: Iterable[str]) -> list[Arrival]:
    """The arrivals of a JSONL file, in its order; empty lines are skipped.

    Raises TraceError for a line that is no arrival or goes back in time, for a trace without arrivals and for one of
    more than MAX_ARRIVALS.
    """
    arrivals: list[Arrival] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if len(arrivals) == MAX_ARRIVALS:
            raise TraceError(f"line {number}: more than {MAX_ARRIVALS:,} arrivals")
        try:
            arrival = msgspec.json.decode(line.encode("utf-8", "surrogatepass"), type=Arrival)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise TraceError(f"line {number}: {error}") from None
        wrong = _what_is_wrong(arrival)
        if not wrong and arrivals and arrival.time_s < arrivals[-1].time_s:
            wrong = f"time_s {arrival.time_s:g} lies before {arrivals[-1].time_s:g} of the arrival before it"
        if wrong:
            raise TraceError(f"line {number}: {wrong}")
        arrivals.append(arrival)
    if not arrivals:
        raise TraceError("no arrivals in it")
    return arrivals


def trace_lines(arrivals: Iterable[Arrival]) -> Iterator[str]:
    """What `read_trace` reads back as the same arrivals."""
    for arrival in arrivals:
        yield msgspec.json.encode(arrival).decode() + "\n"


def _what_is_wrong(arrival: Arrival) -> str:
    if arrival.output_tokens > arrival.max_tokens:
        return f"output_tokens {arrival.output_tokens} above max_tokens {arrival.max_tokens}"
    if not is_name(arrival.tenant):
        return f"tenant {arrival.tenant!r} is not 1 to 40 characters of a-z, 0-9 and -"
    if arrival.prefix_tokens > arrival.prompt_tokens:
        return f"prefix_tokens {arrival.prefix_tokens} above prompt_tokens {arrival.prompt_tokens}"
    if bool(arrival.prefix) != bool(arrival.prefix_tokens):
        return "prefix and prefix_tokens come together or not at all"
    return ""
