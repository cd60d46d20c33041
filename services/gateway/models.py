"""The models a client may name, in OpenAI's form."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.bus.configuration import ConfigView
from headrace.bus.connection import Bus
from headrace.bus.overview import list_models
from headrace.errors import RequestError
from headrace.gateway.tenants import tenant_of
from headrace.schemas.refusals import Refusal
from headrace.schemas.subjects import Tenant

__all__ = ["Models"]


class Models:
    """Models that a tenant may use: of those with a job stream, those that are configured, and the aliases."""

    def __init__(self, bus: Bus, view: ConfigView) -> None:
        self._bus = bus
        self._view = view

    async def list(self, request: Request) -> Response:
        """All of them, sorted. Raises BrokerError."""
        data = [_model(name) for name in sorted(await self._known(tenant_of(request)))]
        return _as_json({"object": "list", "data": data})

    async def show(self, request: Request) -> Response:
        """One of them. Raises RequestError (`model_not_found`), BrokerError."""
        name = request.path_params["model"]
        if name not in await self._known(tenant_of(request)):
            raise RequestError(
                Refusal(code="model_not_found", message="there is no model of this name here", param="model")
            )
        return _as_json(_model(name))

    async def _known(self, tenant: Tenant) -> set[str]:
        known = await list_models(self._bus)
        config = self._view.config
        may_name = config.tenant(tenant).may_name
        return {name for name in (*known, *config.models, *config.aliases) if may_name(name)}


def _model(name: str) -> dict[str, Any]:
    # `created` is required; there is no such time, and gateways must not differ.
    return {"id": name, "object": "model", "created": 0, "owned_by": "headrace"}


def _as_json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
