"""Many streams over HTTP from one process, timed as cheaply as it can be: what a client costs is not to be measured."""

import asyncio
import json
import re
import time
from typing import Any, Final

import msgspec

from headrace.errors import HeadraceError

__all__ = ["Arrivals", "StreamPlan", "open_streams"]

_OFFSET: Final = re.compile(rb'"offset":(\d+)}')
_DONE: Final = b"data: [DONE]"
_KEPT: Final = 40
"""Bytes of a piece that are looked at again with the next one: an offset may be cut in two."""


class StreamPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Streams to open: `rate` of them a second; each makes `pace` tokens a second until `seconds` after the last began.

    What has not come `patience_s` after that is given up.
    """

    num_streams: int
    pace: int
    rate: int
    seconds: float
    patience_s: float = 5.0

    @property
    def ramp_s(self) -> float:
        """Seconds until the last has begun."""
        return self.num_streams / self.rate

    def num_tokens(self, number: int) -> int:
        """Tokens the stream `number`, counted from 0, asks for."""
        return max(1, int(self.pace * (self.ramp_s + self.seconds - number / self.rate)))


class Arrivals(asyncio.Protocol):
    """One stream: when it was asked for, and how many of its tokens were there at which moments (monotonic seconds)."""

    def __init__(self, request: bytes, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.sent_at = 0.0
        self.seen: list[tuple[float, int]] = []
        self.is_done = False
        self.problem = ""
        self.ended = asyncio.Event()
        self._request = request
        self._tail = b""
        self._reached = 0
        self._is_begun = False
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.sent_at = time.monotonic()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Note how far it is."""
        now = time.monotonic()
        if not self._is_begun:
            self._is_begun = True
            if not data.startswith(b"HTTP/1.1 200"):
                self.problem = data[-300:].decode(errors="replace")
                self._end()
                return
        data = self._tail + data
        found = _OFFSET.findall(data)
        if found and (reached := int(found[-1])) > self._reached:
            self._reached = reached
            self.seen.append((now, reached))
        self._tail = data[-_KEPT:]
        if _DONE in data:
            self.is_done = self._reached == self.num_tokens
            if not self.is_done:
                self.problem = f"it ended with {self._reached} of {self.num_tokens} tokens"
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Over, however it ended."""
        self.ended.set()

    def _end(self) -> None:
        self.ended.set()
        if self.transport is not None:
            self.transport.close()


async def open_streams(port: int, model: str, plan: StreamPlan) -> list[Arrivals]:
    """Open all of them against a server on loopback, and wait until they have ended or are given up.

    Raises HeadraceError where one is refused or ends short of its tokens.
    """
    loop = asyncio.get_running_loop()
    streams: list[Arrivals] = []
    began = time.monotonic()
    try:
        for number in range(plan.num_streams):
            await asyncio.sleep(max(0.0, began + number / plan.rate - time.monotonic()))
            tokens = plan.num_tokens(number)
            stream = Arrivals(_request(port, model, number, tokens), tokens)
            streams.append(stream)
            await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", port)  # type: ignore[misc]
        last = began + plan.ramp_s + plan.seconds + plan.patience_s
        for stream in streams:
            if (left_s := last - time.monotonic()) <= 0:
                break
            try:
                async with asyncio.timeout(left_s):
                    await stream.ended.wait()
            except TimeoutError:
                break
    except OSError as error:
        raise HeadraceError(f"the server of the measurement cannot be reached: {error.strerror or error}") from None
    finally:
        for stream in streams:
            if stream.transport is not None:
                stream.transport.abort()
    if problem := next((stream.problem for stream in streams if stream.problem), ""):
        raise HeadraceError(f"a stream failed: {problem}")
    return streams


def _request(port: int, model: str, number: int, num_tokens: int) -> bytes:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": f"stream {number}"}],
        "stream": True,
        "max_tokens": num_tokens,
        "ignore_eos": True,
    }
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
