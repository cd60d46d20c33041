"""A deployment in this process, of real parts over the real broker: each with a connection of its own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from nats.aio.msg import Msg

import headrace.client
from headrace.bus.connection import Bus, connect
from headrace.bus.heartbeats import WorkersBucket
from headrace.cli.http import answers, free_port
from headrace.client import Client
from headrace.gateway import run_gateway
from headrace.monitor import run_monitor
from headrace.router import run_router
from headrace.settings import Settings
from headrace.worker.engines.base import Engine
from headrace.worker.engines.sim import SimEngine
from headrace.worker.engines.sim_script import SimOptions
from headrace.worker.worker import WorkerOptions, run_worker

MODEL = "sim-model"


class Part:
    """A running router, worker or monitor: `stop` drains it, `kill` ends it with what it holds not handed back."""

    def __init__(self, task: asyncio.Task[None], stopping: asyncio.Event) -> None:
        self._task = task
        self._stopping = stopping

    async def stop(self) -> None:
        """Drain; raises what the part raised."""
        self._stopping.set()
        await self._task

    async def kill(self) -> None:
        """End it at once."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def failure(self, *, timeout_s: float = 10.0) -> BaseException:
        """Wait until it ends by itself; what it raised. For parts that were started with `may_fail`."""
        done, _ = await asyncio.wait([self._task], timeout=timeout_s)
        assert done, "it runs on"
        error = self._task.exception()
        assert error is not None, "it ended as if nothing was wrong"
        return error


class Gateway(Part):
    """A running gateway, and where it answers."""

    def __init__(self, task: asyncio.Task[None], stopping: asyncio.Event, url: str) -> None:
        super().__init__(task, stopping)
        self.url = url


class Deployment:
    """Starts parts under one prefix; made by `deployment`."""

    def __init__(self, url: str, settings: Settings, group: asyncio.TaskGroup, client: Client) -> None:
        self.url = url
        self.settings = settings
        self.client = client
        self._group = group
        self._parts: list[Part] = []
        self._num_workers = 0

    @property
    def bus(self) -> Bus:
        """The client's connection, to look at things with."""
        return self.client.bus

    async def router(self) -> Part:
        """Start a router and wait until it answers."""
        part = self._start(lambda bus, stop: run_router(bus, stop=stop), "router")
        await until(lambda: self._answers(self.bus.names.status("default", "nothing")))
        return part

    async def monitor(self, *, url: str | None = None) -> Part:
        """Start a monitor and wait until it answers; `url` is another way to the broker.

        It answers over HTTP too where the settings name a port.
        """
        has_http = self.settings.monitor_port != 0
        part = self._start(lambda bus, stop: run_monitor(bus, stop=stop, has_http=has_http), "monitor", url=url)
        await until(lambda: self._answers(self.bus.names.monitor_state()))
        return part

    async def worker(
        self,
        engine: Engine | None = None,
        *,
        model: str = MODEL,
        worker: str | None = None,
        url: str | None = None,
        may_fail: bool = False,
        is_awaited: bool = True,
        **options: Any,
    ) -> Part:
        """Start a worker and wait until it is ready; `url` is another way to the broker than the deployment's."""
        self._num_workers += 1
        worker = worker or f"w{self._num_workers}"
        running = engine if engine is not None else sim()
        told = WorkerOptions(worker=worker, model=model, **options)
        part = self._start(
            lambda bus, stop: run_worker(bus, running, told, stop=stop), worker, url=url, may_fail=may_fail
        )
        if is_awaited:
            await until(lambda: self.is_ready(worker))
        return part

    async def gateway(self) -> Gateway:
        """Start a gateway and wait until it listens."""
        port = free_port("127.0.0.1", 0)
        assert port is not None
        settings = msgspec.structs.replace(self.settings, http_port=port)
        part = self._start(lambda bus, stop: run_gateway(bus, stop=stop), "gateway", settings=settings)
        await until(lambda: answers("127.0.0.1", port))
        return Gateway(part._task, part._stopping, f"http://127.0.0.1:{port}")

    async def is_ready(self, worker: str) -> bool:
        """Whether a worker says that it can take requests, or would if it were not full."""
        seen = await WorkersBucket(self.bus).get(worker)
        beat = seen.beat if seen is not None else None
        return beat is not None and not beat.is_tombstone and beat.state in ("Ready", "Busy")

    async def stop(self) -> None:
        """Stop what still runs."""
        for part in reversed(self._parts):
            if not part._task.done():
                await part.stop()

    def _start(
        self,
        run: Any,
        name: str,
        *,
        url: str | None = None,
        may_fail: bool = False,
        settings: Settings | None = None,
    ) -> Part:
        stopping = asyncio.Event()

        async def go() -> None:
            async with connect(url or self.url, settings or self.settings, name=name) as bus:
                await run(bus, stopping)

        task = asyncio.create_task(go(), name=name) if may_fail else self._group.create_task(go(), name=name)
        part = Part(task, stopping)
        self._parts.append(part)
        return part

    async def _answers(self, subject: str) -> bool:
        with contextlib.suppress(headrace.errors.BrokerError):
            await self.bus.request(subject, timeout_s=0.5)
            return True
        return False


@contextlib.asynccontextmanager
async def deployment(url: str, prefix: str, *, routers: int = 1, **settings: Any) -> AsyncIterator[Deployment]:
    """A deployment with `routers` routers and no worker yet; everything is stopped at the end."""
    told = Settings(prefix=prefix, **{"grace_s": 5.0, "monitor_port": 0, **settings})
    async with headrace.client.connect(url, settings=told) as client, asyncio.TaskGroup() as group:
        running = Deployment(url, told, group, client)
        for _ in range(routers):
            await running.router()
        try:
            yield running
        finally:
            await running.stop()


def sim(**options: Any) -> SimEngine:
    """A simulated engine; fast unless told otherwise."""
    return SimEngine(MODEL, msgspec.convert({"tokens_per_second": 200.0, **options}, SimOptions))


def header(message: Msg, name: str) -> str:
    """One header of a message as received."""
    assert message.headers is not None
    return message.headers[name]


async def until(condition: Any, *, timeout_s: float = 30.0) -> None:
    """Wait until an async condition holds, which another process or task brings about.

    The time is what a slow machine may need, not what is promised: whoever promises one measures it.
    """
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.02)
