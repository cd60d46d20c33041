"""Until when nothing that a monitor sees is acted on: a pure rule with the monitor's own clock."""

from typing import Final

__all__ = ["Quiet"]

_MAX_LAG_S: Final = 2.0


class Quiet:
    """Nothing is done for `span_s` after anything was wrong with us or the broker: workers seem gone until they beat.

    Asked each `every_s`; to be asked much later than that is something wrong with us too. What was done meanwhile, and
    has a time limit of its own, is none: `note_asked` tells its end.
    """

    def __init__(self, *, span_s: float, every_s: float, now: float) -> None:
        self._span_s = span_s
        self._every_s = every_s
        self._asked_at = now
        self._until = now + span_s

    def begin(self, now: float) -> None:
        """Something was wrong until now."""
        self._until = now + self._span_s

    def may_act(self, now: float, *, is_well: bool) -> bool:
        """Whether all was well for long enough; `is_well` says that it is so right now."""
        if not is_well or now - self._asked_at > self._every_s + _MAX_LAG_S:
            self.begin(now)
        self._asked_at = now
        return self.is_over(now)

    def note_asked(self, now: float) -> None:
        """What followed from the last answer is done."""
        self._asked_at = now

    def is_over(self, now: float) -> bool:
        """Whether nothing is known to have been wrong of late."""
        return now >= self._until
