"""What answers requests is there once the broker is, however mute that was as it began."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from headrace.bus.connection import connect
from headrace.bus.server import EmbeddedBroker
from headrace.bus.services import Endpoint, IncomingRequest, answering, reply_with
from headrace.settings import Settings
from tests.deployment import until


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
async def test_a_mute_broker_does_not_keep_a_service_from_starting(tmp_path: Path) -> None:
    settings = Settings(state_dir=str(tmp_path), request_timeout_s=0.5)
    async with (
        EmbeddedBroker(tmp_path, port=0) as broker,
        connect(broker.info.url, settings, name="service") as bus,
        connect(broker.info.url, settings, name="caller") as caller,
    ):

        async def answer(request: IncomingRequest) -> None:
            await reply_with(bus, request, {"ok": True})

        endpoint = Endpoint(name="ask", subject="tested.ask", handler=answer)
        began = time.monotonic()
        os.kill(broker.info.pid, signal.SIGSTOP)
        try:
            await until(lambda: _is_stopped(broker.info.pid))
            service = answering(bus, "tested", [endpoint], description="a test")
            await asyncio.wait_for(service.__aenter__(), 5.0)  # before the client library's own 10 s
        finally:
            os.kill(broker.info.pid, signal.SIGCONT)
        assert time.monotonic() - began < 5.0
        try:
            await bus.flush()
            assert (await caller.request("tested.ask")).data == b'{"ok":true}'
        finally:
            await service.__aexit__(None, None, None)


async def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
