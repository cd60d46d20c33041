"""Configured queue limits, brought to the streams that the broker enforces them on."""

import logging
from typing import Final

from headrace.bus.configuration import ConfigView
from headrace.bus.connection import Bus
from headrace.bus.provision import apply_queue_limit
from headrace.errors import BrokerError
from headrace.lifecycle import wait_first

__all__ = ["keep_queue_limits"]

log = logging.getLogger(__name__)

_AGAIN_S: Final = 10.0


async def keep_queue_limits(bus: Bus, view: ConfigView) -> None:
    """Apply the limits of configured models at the start and after each change, until cancelled.

    Every router does; the same change twice changes nothing. A model that is no longer configured gets the setting's
    limit back from the routers that saw it configured. What fails is tried again after a while.
    """
    applied: dict[str, int | None] = {}
    while True:
        view.changed.clear()
        has_failed = False
        models = view.config.models
        for model in {*models, *applied}:
            wanted = view.config.model(model).queue_limit
            if model in applied and applied[model] == wanted:
                continue
            if model not in applied and wanted is None:
                continue
            try:
                if await apply_queue_limit(bus, model, wanted):
                    log.info("the queue of %s holds at most %s requests now", model, wanted or bus.settings.queue_limit)
            except BrokerError as error:
                log.warning("the queue limit of %s is not applied yet: %s", model, error)
                has_failed = True
                continue
            applied[model] = wanted
        await wait_first(view.changed, timeout_s=_AGAIN_S if has_failed else None)
