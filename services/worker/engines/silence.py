"""Whether an engine computes: its figures change with each step, whatever its health check says."""

from collections.abc import Hashable

__all__ = ["Silence"]


class Silence:
    """How long the figures of an engine that has work have stood still, by what was read of them.

    Only what was read counts: with nothing read for a while nothing is known, and `seconds` stays.
    """

    def __init__(self) -> None:
        self._figures: Hashable = None
        self._since: float | None = None
        self.seconds = 0.0

    def note(self, figures: Hashable, *, has_work: bool, now: float) -> None:
        """Take in a reading; without work, silence means nothing. `now` is monotonic."""
        if not has_work or self._since is None or figures != self._figures:
            self._since = now if has_work else None
        self._figures = figures
        self.seconds = now - self._since if self._since is not None else 0.0
