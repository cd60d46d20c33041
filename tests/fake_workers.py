"""Agents in this process whose workers only beat."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from headrace.bus.connection import Bus, Stored, connect
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.instances import InstancesView
from headrace.host import HostOptions, run_host
from headrace.host.launching import Order
from headrace.schemas.instances import Device
from headrace.schemas.replicas import ReplicaGroup
from headrace.schemas.workers import Heartbeat, WorkerState

__all__ = ["FakeChild", "Ground", "RunningAgent", "gpu_group"]

GIB = 1 << 30


class FakeChild:
    """Beats while it runs. It says `state`, with a reason; `end` ends it by itself."""

    def __init__(self, bus: Bus, order: Order, state: WorkerState, reason: str) -> None:
        self.order = order
        self.is_running = False
        self._bus = bus
        self._beat = Heartbeat(worker=order.worker, epoch="e", state=state, reason=reason, model=order.model)
        self._revision = 0
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        self.is_running = True
        stored = await WorkersBucket(self._bus).put(self._beat, expected_revision=0, ttl_s=600)
        assert isinstance(stored, Stored)
        self._revision = stored.sequence
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await WorkersBucket(self._bus).remove(self.order.worker, expected_revision=self._revision)
        self.is_running = False

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def tail(self) -> str:
        return "starting\nheadrace: engine sim: it is out of luck\n"

    def end(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)


class RunningAgent:
    """One agent; `stop` lets it leave."""

    def __init__(self, task: asyncio.Task[None], stopping: asyncio.Event) -> None:
        self.task = task
        self._stopping = stopping

    async def stop(self) -> None:
        self._stopping.set()
        await self.task


class Ground:
    """Starts agents, each with a connection of its own. `state_of` says how workers of a group do."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.view = InstancesView(bus)
        self.children: list[FakeChild] = []
        self.state_of: Callable[[ReplicaGroup], tuple[WorkerState, str]] = lambda group: ("Ready", "")
        self._agents: list[RunningAgent] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Follow the bucket inside this context; at its end the agents leave."""
        async with self.view.running():
            try:
                yield self
            finally:
                for agent in self._agents:
                    if not agent.task.done():
                        await agent.stop()

    async def agent(self, host: str, *gibs: int, url: str = "") -> RunningAgent:
        """Start one with GPUs of so many GiB; `url` is another way to the broker."""
        devices = tuple(
            Device(name=f"GPU-{host}-{number}", kind="gpu", total_bytes=gib * GIB) for number, gib in enumerate(gibs)
        )
        stopping = asyncio.Event()

        async def run() -> None:
            async with connect(url or self.bus.url, self.bus.settings, name=host) as bus:
                await run_host(bus, HostOptions(host=host, devices=devices), self._launch, stop=stopping)

        agent = RunningAgent(asyncio.create_task(run()), stopping)
        self._agents.append(agent)
        return agent

    def running_children(self) -> list[FakeChild]:
        """Those that run now, draining or not."""
        return [child for child in self.children if child.is_running]

    def _launch(self, order: Order) -> FakeChild:
        child = FakeChild(self.bus, order, *self.state_of(order.group))
        self.children.append(child)
        return child


def gpu_group(replicas: int, memory_mib: int | None = 1024, restarts: int = 0) -> ReplicaGroup:
    return ReplicaGroup(engine="sim", replicas=replicas, memory_mib=memory_mib, restarts=restarts)
