"""One request for inference: read, submitted, and answered once a router has accepted it."""

from starlette.requests import Request
from starlette.responses import Response

from headrace import telemetry
from headrace.bus.connection import Bus
from headrace.client import Client
from headrace.errors import RequestError
from headrace.gateway.answers import EventStream, WholeAnswer
from headrace.gateway.limits import pending, read_body
from headrace.gateway.requests import read_request
from headrace.gateway.sse import Frames
from headrace.gateway.tenants import tenant_of
from headrace.gateway.watching import OpenRequests
from headrace.schemas.openai import Operation, RequestLimits
from headrace.schemas.refusals import Refusal

__all__ = ["Inference"]


class Inference:
    """Answers requests for inference: HTTP on one side, the client SDK on the other."""

    def __init__(self, bus: Bus, open_requests: OpenRequests) -> None:
        self._bus = bus
        self._open = open_requests

    async def answer(self, op: Operation, request: Request) -> Response:
        """Submit it; the response is begun once a router has accepted. Raises RequestError, BrokerError."""
        limits = RequestLimits()
        max_bytes = min(limits.max_body_bytes, self._bus.max_data_bytes)
        data = await read_body(request, max_bytes=max_bytes)
        asked = read_request(op, request.headers, data, limits=limits)
        if isinstance(asked, Refusal):
            raise RequestError(asked)
        client = Client(self._bus, tenant_of(request))
        stream = client.submit(
            op,
            asked.model,
            asked.body,
            job_id=asked.job_id,
            priority=asked.priority,
            pool=asked.pool,
            queue_timeout_s=asked.queue_timeout_s,
            deadline_s=asked.deadline_s,
            fallback=asked.fallback,
            is_streaming=asked.is_streaming,
            parent=telemetry.extract(request.headers),
            max_pending=pending(self._bus.max_data_bytes),
        )
        # Not given up half-way: a job that is accepted after its client has left could not be cancelled.
        accepted = await anext(aiter(stream))
        if asked.is_streaming:
            frames = Frames(has_usage=asked.has_usage)
            return EventStream(client, stream, self._open, first=accepted, frames=frames)
        return WholeAnswer(stream, self._open)
