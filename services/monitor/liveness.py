"""Which workers count as dead: a pure rule over what was seen, with the monitor's own clock and its own excuses."""

from collections.abc import Mapping

import msgspec

from headrace.monitor.judgement import overdue_after_s
from headrace.schemas.workers import Heartbeat, SeenBeat

__all__ = ["Suspect", "Watch"]


class Suspect(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that must be declared dead: the revision to do it on, its last beat, and why."""

    seen: SeenBeat
    last_beat: Heartbeat
    reason: str


class Watch:
    """Remembers the last beat of each worker, and until when silence proves nothing.

    Silence counts only while the monitor itself was well: after a lag of its own loop, a failed JetStream call or a
    reconnect, every worker first gets a time to live to show itself.
    """

    def __init__(self, *, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._last_beats: dict[str, Heartbeat] = {}
        self._excused_until = -float("inf")

    def excuse(self, now: float) -> None:
        """Something was wrong with us or the broker: start all timers again."""
        self._excused_until = now + self._ttl_s

    def suspects(self, workers: Mapping[str, SeenBeat], heard: Mapping[str, float], *, now: float) -> list[Suspect]:
        """Workers to evict now. `heard` and `now` are monotonic seconds of this process."""
        found: list[Suspect] = []
        for worker, seen in workers.items():
            if seen.has_left:
                self._last_beats.pop(worker, None)
            elif seen.beat is None:
                last = self._last_beats.get(worker)
                if last is not None and now >= self._excused_until:
                    found.append(Suspect(seen=seen, last_beat=last, reason="heartbeat expired"))
            elif not seen.beat.is_tombstone:
                self._last_beats[worker] = seen.beat
                limit_s = overdue_after_s(seen.beat, ttl_s=self._ttl_s)
                if now - max(heard.get(worker, now), self._excused_until - self._ttl_s) > limit_s:
                    found.append(Suspect(seen=seen, last_beat=seen.beat, reason="heartbeats stopped"))
        return found

    def forget(self, worker: str) -> None:
        """It was dealt with, or left by itself."""
        self._last_beats.pop(worker, None)

    def replaced(self, workers: Mapping[str, SeenBeat]) -> list[Heartbeat]:
        """Last beats of registrations that a newer one of the same worker has replaced."""
        return [
            last
            for worker, last in self._last_beats.items()
            if (seen := workers.get(worker)) is not None
            and seen.beat is not None
            and not seen.beat.is_tombstone
            and seen.beat.epoch != last.epoch
        ]
