"""Whether this process lives, and whether a request would be taken in here now."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.bus.configuration import ConfigView
from headrace.bus.connection import Bus
from headrace.errors import BrokerError
from headrace.schemas.subjects import DEFAULT_TENANT

__all__ = ["Health"]


class Health:
    """Answers probes; needs no key and counts against no limit."""

    def __init__(self, bus: Bus, view: ConfigView) -> None:
        self._bus = bus
        self._view = view

    async def live(self, request: Request) -> Response:
        """200: the process answers."""
        return _as_json(200, "ok")

    async def ready(self, request: Request) -> Response:
        """200 if the broker is reached, the configuration is known and a router answers, else 503."""
        if not self._bus.is_connected:
            return _as_json(503, "the broker is not reached")
        if not self._view.is_read:
            return _as_json(503, "the configuration was not read yet")
        try:
            await self._bus.request(self._bus.names.status(DEFAULT_TENANT, "ready"))
        except BrokerError:
            return _as_json(503, "no router answers")
        return _as_json(200, "ok")


def _as_json(status: int, text: str) -> Response:
    return Response(msgspec.json.encode({"status": text}), status_code=status, media_type="application/json")
