"""Configured queue limits, brought to the streams that the broker enforces them on."""

import logging

from headrace.bus.configuration import ConfigView
from headrace.bus.connection import Bus
from headrace.bus.provision import apply_queue_limit
from headrace.errors import BrokerError

__all__ = ["keep_queue_limits"]

log = logging.getLogger(__name__)


async def keep_queue_limits(bus: Bus, view: ConfigView) -> None:
    """Apply the limits of configured models at the start and after each change, until cancelled.

    Every router does; the same change twice changes nothing. A model that is no longer configured gets the setting's
    limit back from the routers that saw it configured. What fails is tried again at the next change.
    """
    applied: dict[str, int | None] = {}
    while True:
        view.changed.clear()
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
                log.warning("the queue limit of %s is not applied: %s", model, error)
                continue
            applied[model] = wanted
        await view.changed.wait()
