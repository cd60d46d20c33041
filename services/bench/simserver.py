"""The `sim` engine with an HTTP server of its own, as real engines have one: OpenAI's chat, streamed.

Run as a program it prints its port, and serves loopback until it is told to stop.
"""

import asyncio
import contextlib
import sys
import time
import uuid
from typing import Final

import msgspec
from aiohttp import web

from headrace.lifecycle import stop_event
from headrace.schemas.openai import RequestLimits, parse_request
from headrace.schemas.openai_chunks import ChunkEncoder
from headrace.schemas.refusals import Refusal
from headrace.worker.engines.sim import SimEngine, SimOptions

__all__ = ["serve"]

_DONE: Final = b"data: [DONE]\n\n"
_BACKLOG: Final = 1024


class _Server:
    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Every chunk as it is made, with the number of tokens so far, in the gateway's form."""
        data = await request.read()
        parsed = parse_request("chat", data, limits=RequestLimits())
        if isinstance(parsed, Refusal):
            return web.Response(body=msgspec.json.encode(parsed.body()), status=parsed.info.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        job = uuid.uuid4().hex
        encoder = ChunkEncoder("chat", id=f"chatcmpl-{job}", created=int(time.time()), model="bench")
        offset = 0
        chunks = self._engine.generate(parsed, max_tokens=parsed.max_tokens or 16, request_id=job)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                if chunk.choices:
                    offset += sum(choice.num_tokens for choice in chunk.choices)
                    body = encoder.encode(chunk.choices)[:-1]
                    await response.write(b'data: %b,"headrace":{"offset":%d}}\n\n' % (body, offset))
        await response.write(_DONE)
        return response


async def serve(options: SimOptions) -> None:
    """Serve on a port the system chose, which is printed, until SIGTERM."""
    engine = SimEngine("bench", options)
    await engine.start()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", _Server(engine).chat)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5, access_log=None)
    await runner.setup()
    try:
        async with stop_event() as stop:
            await web.TCPSite(runner, "127.0.0.1", 0, backlog=_BACKLOG).start()
            print(runner.addresses[0][1], flush=True)
            await stop.wait()
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(msgspec.json.decode(sys.argv[1], type=SimOptions)))
