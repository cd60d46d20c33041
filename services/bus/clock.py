"""The broker's clock, which all parts use for deadlines, since their own may be minutes off."""

import time
from datetime import UTC, datetime

import msgspec

__all__ = ["BrokerClock", "format_time", "parse_time"]


class _Stamped(msgspec.Struct, frozen=True):
    ts: str = ""


class BrokerClock:
    """Unix seconds by the broker's clock: monotonic, set by what an answer of the broker last showed.

    Right to half the round trip of that answer. Before the first it is our own clock.
    """

    def __init__(self) -> None:
        self._ahead_s = time.time() - time.monotonic()

    def now(self) -> float:
        """Unix seconds, UTC. Steps of the machine's own clock do not move it."""
        return time.monotonic() + self._ahead_s

    def to_local(self, at: float) -> float:
        """A moment by this machine's own clock."""
        return at + time.time() - self.now()

    def learn(self, answer: bytes, *, asked_at: float, answered_at: float) -> None:
        """Take the time from a JetStream API answer that carries one (`ts`); both times are monotonic."""
        try:
            stamp = msgspec.json.decode(answer, type=_Stamped).ts
        except msgspec.DecodeError:
            return
        server_time = parse_time(stamp)
        if server_time is not None:
            self._ahead_s = server_time - (asked_at + answered_at) / 2


def format_time(at: float) -> str:
    """Unix seconds as an RFC 3339 time in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


def parse_time(text: str) -> float | None:
    """Unix seconds of an RFC 3339 time with up to nanoseconds, as NATS writes it; None if it is none."""
    head, _, fraction = text.removesuffix("Z").partition(".")
    try:
        return datetime.fromisoformat(f"{head}+00:00").timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
    except ValueError:
        return None
