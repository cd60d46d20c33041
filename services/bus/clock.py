"""The broker's clock, which all parts use for deadlines, since their own may be minutes off."""

import time
from datetime import datetime

import msgspec

__all__ = ["BrokerClock", "parse_time"]


class _Stamped(msgspec.Struct, frozen=True):
    ts: str = ""


class BrokerClock:
    """Unix seconds by the broker's clock: our own, corrected by what an answer of the broker last showed.

    Right to half the round trip of that answer. Before the first it is our own clock.
    """

    def __init__(self) -> None:
        self.offset_s = 0.0

    def now(self) -> float:
        """Unix seconds, UTC."""
        return time.time() + self.offset_s

    def learn(self, answer: bytes, *, asked_at: float, answered_at: float) -> None:
        """Take the time from a JetStream API answer that carries one (`ts`); both times are of our own clock."""
        try:
            stamp = msgspec.json.decode(answer, type=_Stamped).ts
        except msgspec.DecodeError:
            return
        server_time = parse_time(stamp)
        if server_time is not None:
            self.offset_s = server_time - (asked_at + answered_at) / 2


def parse_time(text: str) -> float | None:
    """Unix seconds of an RFC 3339 time with up to nanoseconds, as NATS writes it; None if it is none."""
    head, _, fraction = text.removesuffix("Z").partition(".")
    try:
        return datetime.fromisoformat(f"{head}+00:00").timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
    except ValueError:
        return None
