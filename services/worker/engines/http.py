"""The one adapter that speaks OpenAI's API over HTTP: chat, completions, embeddings, streamed as server-sent events."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec
from yarl import URL

from headrace.errors import EngineError
from headrace.schemas.chunks import EngineChunk
from headrace.schemas.openai import InferenceRequest
from headrace.worker.engines.answer import Answer
from headrace.worker.engines.base import Resume
from headrace.worker.engines.bodies import PATHS, Dialect, request_body, stops_to_cut
from headrace.worker.engines.frames import BadFrameError, ErrorFrame, FrameDecoder, usage_of
from headrace.worker.engines.replies import error_of_reply, error_of_status
from headrace.worker.engines.sse import SseParser, SseTooLongError

__all__ = ["HttpAdapter", "Reply", "Target"]

log = logging.getLogger(__name__)

_MAX_REPLY_BYTES: Final = 64 << 20
_MAX_ERROR_BYTES: Final = 64 << 10
_USAGE_WAIT_S: Final = 5.0
"""How long a finished stream may take to send its usage, or to end."""
_END_WAIT_S: Final = 0.25
"""How long after `[DONE]` the connection is watched for the end that makes it reusable."""
_KEEPALIVE_S: Final = 4.0
"""Below the 5 s after which vLLM and llama.cpp close an idle connection."""
_MAX_TRIES: Final = 3
"""Sends of one request; all but the last may only fail on a connection the server had closed."""
_DONE: Final = b"[DONE]"
_BROKEN: Final = (aiohttp.ClientError, OSError, RuntimeError)
"""What reading raises when the connection is gone; RuntimeError when it was our own `close`."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is called and understands, found out once at start."""

    model: str
    dialect: Dialect = Dialect.OTHER
    wants_token_ids: bool = False
    takes_priority: bool = False


class Reply(NamedTuple):
    """A whole HTTP answer."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The decoded body. Raises `EngineError` if it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise EngineError(
                f"the engine answered HTTP {self.status} with {len(self.body)} bytes of no JSON"
            ) from None


class _Trace:
    """Whether a request went out on a connection used before."""

    is_reused = False


class HttpAdapter:
    """An HTTP session with one server; `root` is its URL without `/v1`.

    `stall_s` is the longest silence while an answer is due: no headers, no event. Comments sent to keep a connection
    open are silence too; time in which the caller does not ask for the next chunk is not.
    """

    def __init__(
        self,
        root: URL,
        *,
        api_key: str | None = None,
        connect_s: float = 5.0,
        stall_s: float = 30.0,
        can_keep_alive: bool = True,
    ) -> None:
        self._root = root
        self._headers = {"Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._connect_s = connect_s
        self._stall_s = stall_s
        self._can_keep_alive = can_keep_alive
        self._session: aiohttp.ClientSession | None = None
        self.num_running = 0

    async def open(self) -> None:
        """Make the session; nothing is sent."""
        trace = aiohttp.TraceConfig()

        async def on_reuse(session: object, context: Any, params: object) -> None:
            if isinstance(context.trace_request_ctx, _Trace):
                context.trace_request_ctx.is_reused = True

        trace.on_connection_reuseconn.append(on_reuse)
        if self._can_keep_alive:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
        else:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
            trace_configs=[trace],
        )

    async def close(self) -> None:
        """Close every connection, which aborts what runs on them."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def get(self, path: str, *, timeout_s: float) -> Reply:
        """A whole answer, any status. Raises `EngineError` if none comes in time."""
        return await self._whole("GET", path, None, timeout_s, _MAX_REPLY_BYTES)

    async def post(self, path: str, body: object, *, timeout_s: float) -> Reply:
        """A whole answer to a JSON body, any status. Raises `EngineError` if none comes in time."""
        return await self._whole("POST", path, msgspec.json.encode(body), timeout_s, _MAX_REPLY_BYTES)

    async def generate(
        self,
        request: InferenceRequest,
        target: Target,
        *,
        max_tokens: int,
        request_id: str,
        num_prompt_tokens: int,
        resume: Resume | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[EngineChunk, None]:
        """`Engine.generate` against `target`; `num_prompt_tokens` is used if the server sends no usage."""
        body = request_body(
            request,
            model=target.model,
            dialect=target.dialect,
            max_tokens=max_tokens,
            wants_token_ids=target.wants_token_ids,
            priority=priority if target.takes_priority else 0,
            resume=resume,
        )
        self.num_running += 1
        try:
            if request.op == "embeddings":
                yield await self._embeddings(request, body, request_id)
                return
            answer = Answer(
                num_choices=request.n,
                num_prompt_tokens=num_prompt_tokens,
                stops=stops_to_cut(request),
                is_resumed=resume is not None and bool(resume.text or resume.token_ids),
            )
            chunks = self._answer(request, body, request_id, answer)
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
            yield answer.last_chunk()
        finally:
            self.num_running -= 1

    async def _answer(
        self, request: InferenceRequest, body: dict[str, Any], request_id: str, answer: Answer
    ) -> AsyncGenerator[EngineChunk, None]:
        response = await self._post(PATHS[request.op], body, request_id, self._stall_s)
        try:
            await _check(response, request)
            frames = FrameDecoder()
            events = self._events(response, answer)
            async with contextlib.aclosing(events):
                async for event in events:
                    chunk = frames.decode(event)
                    if isinstance(chunk, ErrorFrame):
                        if answer.is_finished:
                            return
                        raise _error_of_frame(chunk, request, answer)
                    shown = answer.push(chunk)
                    if shown is not None or not answer.is_finished:
                        yield shown or EngineChunk()
                    if answer.is_finished and answer.is_cut:
                        return
            if not answer.is_finished:
                raise EngineError("the engine ended its stream without a finish_reason")
        except (BadFrameError, SseTooLongError) as error:
            raise EngineError(f"the engine sent what is no OpenAI stream: {error}") from None
        finally:
            if response.content.at_eof():
                response.release()
            else:
                response.close()

    async def _events(self, response: aiohttp.ClientResponse, answer: Answer) -> AsyncGenerator[bytes, None]:
        """Events up to `[DONE]` or the end; what goes wrong once the answer is finished only ends them."""
        parser = SseParser()
        loop = asyncio.get_running_loop()
        is_done = False
        deadline = loop.time() + self._stall_s
        while True:
            wait_s = (
                _END_WAIT_S if is_done else min(_USAGE_WAIT_S, self._stall_s) if answer.is_finished else self._stall_s
            )
            try:
                async with asyncio.timeout_at(min(deadline, loop.time() + wait_s)):
                    data = await response.content.readany()
            except TimeoutError:
                if is_done or answer.is_finished:
                    return
                raise EngineError(f"the engine sent nothing for {self._stall_s:g} s") from None
            except _BROKEN as error:
                if is_done or answer.is_finished:
                    return
                raise EngineError(f"the engine's stream broke off: {_name(error)}") from None
            if not data or is_done:
                return
            events = parser.feed(data)
            for event in events:
                if event.strip() == _DONE:
                    is_done = True
                    break
                yield event
            if events:
                deadline = loop.time() + self._stall_s

    async def _embeddings(self, request: InferenceRequest, body: dict[str, Any], request_id: str) -> EngineChunk:
        response = await self._post(PATHS[request.op], body, request_id, self._stall_s)
        try:
            await _check(response, request)
            data = await _read(response, self._stall_s, _MAX_REPLY_BYTES)
        finally:
            response.release()
        answer = Reply(response.status, data).json()
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), list):
            raise EngineError("the engine answered with no list of embeddings")
        return EngineChunk(response=answer, usage=usage_of(answer))

    async def _post(self, path: str, body: object, request_id: str, timeout_s: float) -> aiohttp.ClientResponse:
        """The response's head, whatever its status."""
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        return await self._send("POST", path, msgspec.json.encode(body), headers, timeout_s)

    async def _whole(self, method: str, path: str, data: bytes | None, timeout_s: float, max_bytes: int) -> Reply:
        headers = {"Content-Type": "application/json"} if data is not None else {}
        deadline = asyncio.get_running_loop().time() + timeout_s
        response = await self._send(method, path, data, headers, timeout_s)
        try:
            left_s = max(0.001, deadline - asyncio.get_running_loop().time())
            return Reply(response.status, await _read(response, left_s, max_bytes))
        finally:
            response.release()

    async def _send(
        self, method: str, path: str, data: bytes | None, headers: dict[str, str], timeout_s: float
    ) -> aiohttp.ClientResponse:
        if self._session is None:
            raise EngineError("the engine is not started")
        url = self._root.with_path(self._root.path.rstrip("/") + path)
        for tries_left in reversed(range(_MAX_TRIES)):
            trace = _Trace()
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._session.request(
                        method, url, data=data, headers=headers, allow_redirects=False, trace_request_ctx=trace
                    )
            except TimeoutError:
                raise EngineError(f"the engine did not answer {path} within {timeout_s:g} s") from None
            except _BROKEN as error:
                # A server may close an idle connection just as it is used again; nothing was received, so ask anew.
                if not trace.is_reused or not tries_left:
                    raise EngineError(f"the engine cannot be reached at {url.origin()}: {_name(error)}") from None
        raise AssertionError("the last try returns or raises")


@contextlib.asynccontextmanager
async def _reading(timeout_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise EngineError(f"the engine did not finish its answer within {timeout_s:g} s") from None
    except _BROKEN as error:
        raise EngineError(f"the engine's answer broke off: {_name(error)}") from None


async def _read(response: aiohttp.ClientResponse, timeout_s: float, max_bytes: int) -> bytes:
    """The whole body; more than `max_bytes` of it is an `EngineError`."""
    body = bytearray()
    async with _reading(timeout_s):
        async for data in response.content.iter_any():
            body += data
            if len(body) > max_bytes:
                response.close()
                raise EngineError(f"the engine answered with more than {max_bytes} bytes")
    return bytes(body)


async def _check(response: aiohttp.ClientResponse, request: InferenceRequest) -> None:
    """Raise what any status but 200 means."""
    if response.status == 200:
        if request.op != "embeddings" and response.content_type == "application/json":
            response.close()
            raise EngineError("the engine answered a streaming request with application/json")
        return
    try:
        body = await _read(response, 5.0, _MAX_ERROR_BYTES)
    except EngineError:
        body = b""
    raise error_of_reply(response.status, body, request)


def _error_of_frame(frame: ErrorFrame, request: InferenceRequest, answer: Answer) -> EngineError:
    """An error in the stream is the request's only if the engine has produced nothing yet."""
    status = 500 if answer.has_tokens or frame.status is None else frame.status
    return error_of_status(status, frame.message, request)


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]
