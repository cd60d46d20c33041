"""The same chats for any server that speaks OpenAI's API, timed at the client."""

import asyncio
import time
from typing import Any, Final

import aiohttp
import msgspec

from headrace.errors import HeadraceError

__all__ = ["Answered", "ask", "ask_all"]

_PATIENCE_S: Final = 600.0
_PREFIX: Final = b"data: "


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """One answer: seconds until its first token, and to its end; and its tokens, as the server counts them."""

    first_token_s: float
    seconds: float
    num_tokens: int


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder: Final = msgspec.json.Decoder(_Chunk)


async def ask_all(url: str, model: str, numbers: list[int], *, num_tokens: int) -> list[Answered]:
    """So many chats at once, one for each number, which stands in its prompt. Raises HeadraceError as `ask`."""
    timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        asking = [asyncio.ensure_future(ask(session, url, model, number, num_tokens=num_tokens)) for number in numbers]
        try:
            return list(await asyncio.gather(*asking))
        finally:
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)


async def ask(session: aiohttp.ClientSession, url: str, model: str, number: int, *, num_tokens: int) -> Answered:
    """One chat of exactly `num_tokens` tokens. Raises HeadraceError where it is refused, fails, or has others."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"{number} stones lie by the river. Tell me about each of them."}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.monotonic()
    first_token_s: float | None = None
    is_finished = False
    usage = 0
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise HeadraceError(f"HTTP {response.status} from {url}: {(await response.text())[:200]}")
            async for line in response.content:
                if not line.startswith(_PREFIX) or line.startswith(b"data: [DONE]"):
                    continue
                chunk = _decoder.decode(line[len(_PREFIX) :])
                if chunk.error is not None:
                    raise HeadraceError(f"a stream from {url} failed: {str(chunk.error)[:200]}")
                for choice in chunk.choices:
                    if choice.delta.content and first_token_s is None:
                        first_token_s = time.monotonic() - began
                    is_finished = is_finished or choice.finish_reason is not None
                if chunk.usage is not None:
                    usage = chunk.usage.completion_tokens
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
        raise HeadraceError(f"a stream from {url} broke: {type(error).__name__} {error}"[:300]) from None
    if not is_finished or usage != num_tokens or first_token_s is None:
        raise HeadraceError(f"a stream from {url} ended with {usage} of {num_tokens} tokens")
    return Answered(first_token_s=first_token_s, seconds=time.monotonic() - began, num_tokens=usage)
