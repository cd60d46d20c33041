"""Jobs by their id: what one is now, its cancelling, and its stream read anew, at any gateway."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace import telemetry
from headrace.bus.connection import Bus
from headrace.client import Client
from headrace.errors import RequestError
from headrace.gateway.answers import EventStream
from headrace.gateway.limits import pending
from headrace.gateway.sse import Frames
from headrace.gateway.tenants import tenant_of
from headrace.gateway.watching import OpenRequests
from headrace.schemas.jobs import JobStatus
from headrace.schemas.json_checks import invalid

__all__ = ["Jobs"]


class Jobs:
    """Answers requests about jobs of the caller's tenant; those of others it does not find."""

    def __init__(self, bus: Bus, open_requests: OpenRequests) -> None:
        self._bus = bus
        self._open = open_requests

    async def show(self, request: Request) -> Response:
        """What the job is now. Raises RequestError (`job_not_found`), BrokerError."""
        return _as_json(await self._client(request).status(request.path_params["job"]))

    async def cancel(self, request: Request) -> Response:
        """End the job, unless it has ended; answers with what it is now. Raises like `show`."""
        return _as_json(await self._client(request).cancel(request.path_params["job"]))

    async def stream(self, request: Request) -> Response:
        """The job's stream: all of it, or the chunks after `after` tokens, as `headrace.offset` of a chunk names them.

        Its reader may leave without ending the job. Raises RequestError (`job_not_found`), BrokerError.
        """
        after = request.query_params.get("after", "0")
        if not (after.isascii() and after.isdigit() and len(after) < 12):
            raise RequestError(invalid("after", "must be a number of tokens, from 0"))
        client = self._client(request)
        stream = client.attach(
            request.path_params["job"],
            after=int(after),
            parent=telemetry.extract(request.headers),
            max_pending=pending(self._bus.max_data_bytes),
        )
        first = await anext(aiter(stream))
        has_usage = request.query_params.get("include_usage") == "true"
        frames = Frames(has_usage=has_usage, after=int(after))
        return EventStream(client, stream, self._open, first=first, frames=frames)

    def _client(self, request: Request) -> Client:
        return Client(self._bus, tenant_of(request))


def _as_json(status: JobStatus) -> Response:
    return Response(msgspec.json.encode(status), media_type="application/json")
