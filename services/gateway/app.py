"""Which URL is answered by what, and what every answer has."""

import re
import uuid
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace import metrics
from headrace.batch import BatchKeeper
from headrace.bus.configuration import ConfigView
from headrace.bus.connection import Bus
from headrace.errors import BrokerUnavailableError, HeadraceError, RequestError
from headrace.gateway.batches import batch_routes
from headrace.gateway.errors import as_response, no_such_url, refusal_of
from headrace.gateway.health import Health
from headrace.gateway.inference import Inference
from headrace.gateway.jobs import Jobs
from headrace.gateway.models import Models
from headrace.gateway.openapi import OpenApi
from headrace.gateway.origins import Origins
from headrace.gateway.routing import route
from headrace.gateway.tenants import Tenants
from headrace.gateway.watching import CLIENT_LEFT, OpenRequests
from headrace.schemas.openai import Operation

__all__ = ["make_app", "routes_of"]

_REQUEST_ID: Final = b"x-request-id"
_GOOD_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}\Z")


def make_app(
    bus: Bus, view: ConfigView, open_requests: OpenRequests, keeper: BatchKeeper, *, is_loopback: bool = True
) -> ASGIApp:
    """The application: OpenAI's API, jobs, files and batches, probes.

    `is_loopback`: it is reached by this machine alone.
    """
    handlers: dict[Any, Any] = {
        HeadraceError: _on_error,
        Exception: _on_error,
        HTTPException: _on_no_route,
        ClientDisconnect: _on_disconnect,
    }
    app = Starlette(routes=routes_of(bus, view, open_requests, keeper), exception_handlers=handlers)
    doors = _Doors(app, open_requests, Tenants(view))
    # A browser asks whether a page may send a key before it sends one.
    return _Named(Origins(doors, allowed=bus.settings.allowed_origins, is_loopback=is_loopback))


def routes_of(bus: Bus, view: ConfigView, open_requests: OpenRequests, keeper: BatchKeeper) -> list[Route]:
    """All URLs that are served."""
    inference, jobs = Inference(bus, open_requests), Jobs(bus, open_requests)
    models, health = Models(bus, view), Health(bus, view)

    def infer(op: Operation) -> Any:
        async def answer(request: Request) -> Response:
            return await inference.answer(op, request)

        return answer

    return [
        route("/v1/chat/completions", POST=infer("chat")),
        route("/v1/completions", POST=infer("completions")),
        route("/v1/embeddings", POST=infer("embeddings")),
        route("/v1/models", GET=models.list),
        route("/v1/models/{model:path}", GET=models.show),
        route("/v1/jobs/{job}", GET=jobs.show, DELETE=jobs.cancel),
        route("/v1/jobs/{job}/stream", GET=jobs.stream),
        *batch_routes(bus, keeper, open_requests),
        route("/openapi.json", GET=OpenApi().show),
        route("/healthz", GET=health.live),
        route("/readyz", GET=health.ready),
    ]


class _Named:
    """Around every request: its id goes back with the answer.

    A client's own id is echoed where it is short and plain, else one is made up; it names nothing anywhere else.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = next((value for name, value in scope["headers"] if name == _REQUEST_ID), b"")
        if not _GOOD_REQUEST_ID.match(request_id):
            request_id = f"req_{uuid.uuid4().hex}".encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                metrics.HTTP_REQUESTS.add(str(message["status"]))
                message = {**message, "headers": [*message["headers"], (_REQUEST_ID, request_id)]}
            await send(message)

        await self._app(scope, receive, send_with_id)


class _Doors:
    """Below /v1/ the key of a request is checked, and what is open counted."""

    def __init__(self, app: ASGIApp, open_requests: OpenRequests, tenants: Tenants) -> None:
        self._app = app
        self._open = open_requests
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        try:
            tenant = self._tenants.authenticate(scope)
            with self._open.one_more(tenant, is_alone=not self._tenants.are_many), metrics.HTTP_OPEN:
                await self._app(scope, receive, send)
        except (RequestError, BrokerUnavailableError) as error:
            await as_response(refusal_of(error))(scope, receive, send)


async def _on_error(request: Request, error: Exception) -> Response:
    return as_response(refusal_of(error))


async def _on_no_route(request: Request, error: HTTPException) -> Response:
    return no_such_url(error.status_code, error.headers)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)
