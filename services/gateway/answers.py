"""The two responses that follow a job: its events as a stream, or its whole answer at the end."""

import asyncio
import logging
import time
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.client import Accepted, Client, Delta, Done, JobStream, Requeued, Started, StreamEvent
from headrace.errors import HeadraceError, RequestError
from headrace.gateway.errors import as_response, http_refusal, refusal_of
from headrace.gateway.sse import Frames, comment, error_frames, waiting_comment
from headrace.gateway.watching import CLIENT_LEFT, SHUTTING_DOWN, Gone, OpenRequests, cancel
from headrace.schemas.refusals import Refusal

__all__ = ["EventStream", "WholeAnswer"]

log = logging.getLogger(__name__)

_HDR_JOB: Final = "x-headrace-job"
"""Header of a response: the id of its job."""

_FIRST_COMMENT_S: Final = 1.0
_COMMENT_EVERY_S: Final = 10.0
_STATUS_WITHIN_S: Final = 2.0
_MAX_HELD_BYTES: Final = 16_384


class EventStream(Response):
    """The stream of a job that was accepted, `first` being the first of its events.

    A client that leaves ends the job, unless the job was there before. In any silence comments say what is going on. A
    client that reads slowly holds back this stream alone: what it has not read is read from the log later.
    """

    media_type = "text/event-stream"

    def __init__(
        self, client: Client, stream: JobStream, open_requests: OpenRequests, *, first: StreamEvent, frames: Frames
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", _HDR_JOB: stream.job})
        self._client = client
        self._stream = stream
        self._open = open_requests
        self._first = first
        self._events = aiter(stream)
        self._frames = frames
        self._is_queued = True
        self._sent_at = time.monotonic()
        self._held: list[bytes] = []
        self._num_held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the stream to its end; an error after its begin is a frame. Asked for the head alone, write that."""
        async with self._stream as stream:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if scope["method"] == "HEAD":
                await send({"type": "http.response.body"})
                return
            last = await self._open.unless_gone(self._write(send), receive)
            if last is Gone.CLIENT:
                await cancel(stream)
                return
            if isinstance(last, Gone):
                last = self._flushed(error_frames(SHUTTING_DOWN))
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _write(self, send: Send) -> bytes:
        """Write all but the last frames, which are returned."""
        async with asyncio.TaskGroup() as group:
            commenting = group.create_task(self._comment(send), name=f"comments of {self._stream.job}")
            try:
                return await self._write_events(send)
            except HeadraceError as error:
                return self._flushed(error_frames(refusal_of(error)))
            except Exception:  # the edge: the stream has begun, so only a frame can say it
                log.exception("a stream failed", extra={"job": self._stream.job})
                return self._flushed(
                    error_frames(Refusal(code="internal", message="the stream could not be continued"))
                )
            finally:
                commenting.cancel()

    async def _write_events(self, send: Send) -> bytes:
        last = await self._write_event(send, self._first)
        while last is None:
            try:
                event = await anext(self._events)
            except StopAsyncIteration:
                refusal = Refusal(code="internal", message="the stream ended without an end")
                raise RequestError(refusal, job=self._stream.job) from None
            last = await self._write_event(send, event)
        return last

    async def _write_event(self, send: Send, event: StreamEvent) -> bytes | None:
        """Write what an event has for the reader; the last frames where it is the end."""
        if isinstance(event, Delta):
            self._is_queued = False
            frame = self._frames.delta(event)
            if frame is None:
                return self._flushed(error_frames(_GAP))
            await self._send_together(send, frame)
        elif isinstance(event, Done):
            return self._flushed(self._frames.end(event) or error_frames(_GAP))
        elif isinstance(event, Accepted | Requeued):
            self._is_queued = True
            if isinstance(event, Accepted) and event.position:
                await self._send(send, waiting_comment(event.position, event.eta_s))
        elif isinstance(event, Started):
            self._is_queued = False
        return None

    async def _send_together(self, send: Send, frame: bytes) -> None:
        """Send a chunk, with those that are here already: a stream that is behind costs a call for many of them.

        Others have a turn after each call, however far behind this stream is.
        """
        self._held.append(frame)
        self._num_held_bytes += len(frame)
        if self._stream.has_more and self._num_held_bytes < _MAX_HELD_BYTES:
            return
        is_behind = len(self._held) > 1
        await self._send(send, self._flushed())
        if is_behind:
            await asyncio.sleep(0)

    def _flushed(self, last: bytes = b"") -> bytes:
        """What is held back, and what comes after it."""
        data = b"".join((*self._held, last))
        self._held.clear()
        self._num_held_bytes = 0
        return data

    async def _send(self, send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._sent_at = time.monotonic()

    async def _comment(self, send: Send) -> None:
        """Say what is going on whenever nothing else was sent for a while; for ever."""
        every_s = _FIRST_COMMENT_S
        while True:
            silence_s = time.monotonic() - self._sent_at
            if silence_s < every_s:
                await asyncio.sleep(every_s - silence_s)
                continue
            every_s = _COMMENT_EVERY_S
            where = await self._where_it_is()
            await self._send(send, self._flushed(where))

    async def _where_it_is(self) -> bytes:
        if not self._is_queued:
            return comment("running")
        try:
            async with asyncio.timeout(_STATUS_WITHIN_S):
                status = await self._client.status(self._stream.job)
        except (HeadraceError, TimeoutError):
            return waiting_comment(None, None)
        if status.state != "queued":
            return comment(status.state)
        return waiting_comment(status.position, status.eta_s, is_paused=status.paused)


class WholeAnswer(Response):
    """The response of a request that does not stream: sent once the job has ended."""

    def __init__(self, stream: JobStream, open_requests: OpenRequests) -> None:
        super().__init__()
        self._stream = stream
        self._open = open_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the end and send it; a client that leaves before ends the job, unless that was there before."""
        async with self._stream as stream:
            try:
                answer = await self._open.unless_gone(_done(stream), receive)
            except HeadraceError as error:
                response = as_response(refusal_of(error))
            else:
                if answer is Gone.CLIENT:
                    response = Response(status_code=CLIENT_LEFT)
                    await cancel(stream)
                elif isinstance(answer, Gone):
                    response = as_response(http_refusal(SHUTTING_DOWN))
                else:
                    response = Response(answer.data, media_type="application/json")
        response.headers[_HDR_JOB] = self._stream.job
        await response(scope, receive, send)


_GAP: Final = Refusal(
    code="stream_gap",
    message="Tokens after this offset are gone from the job's log. Read the stream from 0: the whole answer is there.",
)


async def _done(stream: JobStream) -> Done:
    async for event in stream:
        if isinstance(event, Done):
            return event
    raise RequestError(Refusal(code="internal", message="the stream ended without an end"), job=stream.job)
