"""Whether a worker may start requests of its model, as operators say: `paused` in the model's configuration."""

import logging
from collections.abc import Callable
from typing import Final

from headrace.bus.configuration import ConfigView
from headrace.lifecycle import wait_first
from headrace.worker.gate import Gate

__all__ = ["Pause"]

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.25
"""How often it is looked whether the configuration was read after all."""


class Pause:
    """Pauses the gate while the model is paused, so that what was fetched and has not started goes back to its queue.

    What runs is left alone. Before the configuration was read nobody knows, and nothing may start. Whoever fetches asks
    `may_start`, which is true to the configuration at once.
    """

    def __init__(self, view: ConfigView, model: str, gate: Gate) -> None:
        self._view = view
        self._model = model
        self._gate = gate

    @property
    def may_start(self) -> bool:
        """Whether a request that was fetched now might start."""
        return not self.reason

    @property
    def reason(self) -> str:
        """Why none might; "" where one might."""
        if not self._view.is_read:
            return "the configuration cannot be read yet"
        return "the model is paused" if self._view.config.model(self._model).paused else ""

    def look(self) -> str:
        """Have the gate do as the configuration says; returns the reason."""
        reason = self.reason
        if reason:
            self._gate.pause("operator")
        else:
            self._gate.resume("operator")
        return reason

    async def follow(self, *, changed: Callable[[], None]) -> None:
        """Look at each change of the configuration, for ever; `changed` is called after those that matter here."""
        last = self.look()
        while True:
            await wait_first(self._view.changed, timeout_s=None if self._view.is_read else _LOOK_S)
            self._view.changed.clear()
            reason = self.look()
            if reason != last:
                log.info("nothing is started: %s" if reason else "requests are started again%s", reason)
                changed()
            last = reason
