"""A program in the place of vLLM's: a server and the process of an engine core below it, started in half a second.

Run as `python -m tests.fake_vllm serve MODEL …`. It knows vLLM's own arguments as far as they change anything here, and
for tests `--fake-version`, `--fake-metrics FILE` (in place of its own), `--fake-hangs` (no figure moves and no token
comes) and `--fake-exit CODE` (at once). What it was asked for is at `/asked`.
"""

import argparse
import asyncio
import ctypes
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from aiohttp import web

_PR_SET_NAME = 15


def core() -> None:
    """Be there, under the name vLLM gives to it; it ignores the end of its parent, as the real one does."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"VLLM::EngineCore")
    print("core", flush=True)
    while True:
        time.sleep(60)


class Server:
    """What the worker asks of vLLM."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._asked: list[dict[str, Any]] = []
        self._num_steps = 0
        self._num_running = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/asked", self._tell)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self._options.fake_version})

    async def _models(self, request: web.Request) -> web.Response:
        served = {"id": self._options.served_model_name, "owned_by": "vllm", "max_model_len": 512}
        return web.json_response({"data": [served]})

    async def _metrics(self, request: web.Request) -> web.Response:
        if self._options.fake_metrics:
            return web.Response(text=Path(self._options.fake_metrics).read_text())
        return web.Response(
            text=f'vllm:num_requests_running{{engine="0"}} {self._num_running}\n'
            f'vllm:num_requests_waiting{{engine="0"}} 0\nvllm:kv_cache_usage_perc{{engine="0"}} 0\n'
            f'vllm:num_preemptions_total{{engine="0"}} 3\n'
            f'vllm:generation_tokens_total{{engine="0"}} {self._num_steps}\n'
            'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="11"} 1.0\n'
        )

    async def _tell(self, request: web.Request) -> web.Response:
        return web.json_response({"argv": sys.argv[1:], "bodies": self._asked})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "a"}]})
        self._asked.append(body)
        self._num_running += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            for number in range(body["max_tokens"]):
                if self._options.fake_hangs:
                    await asyncio.get_running_loop().create_future()
                self._num_steps += 1
                is_last = number == body["max_tokens"] - 1
                choice = {"text": f"{number} ", "token_ids": [number], "finish_reason": "length" if is_last else None}
                await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
                await asyncio.sleep(0.01)
            await response.write(b"data: [DONE]\n\n")
        finally:
            self._num_running -= 1
        return response


async def serve(options: argparse.Namespace) -> None:
    runner = web.AppRunner(Server(options).app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port).start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await runner.cleanup()


def main() -> None:
    if sys.argv[1] == "core":
        core()
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("model")
    parser.add_argument("--served-model-name")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--fake-version", default="0.32.0")
    parser.add_argument("--fake-metrics")
    parser.add_argument("--fake-hangs", action="store_true")
    parser.add_argument("--fake-exit", type=int)
    options, _ = parser.parse_known_args()
    if options.fake_exit is not None:
        print("no such device", flush=True)
        sys.exit(options.fake_exit)
    with subprocess.Popen([sys.executable, "-m", "tests.fake_vllm", "core"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        asyncio.run(serve(options))
        child.kill()


if __name__ == "__main__":
    main()
