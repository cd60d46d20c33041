"""Agents in this process over the real broker, with workers that only beat."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

import msgspec
import pytest
import pytest_asyncio

from headrace.bus.connection import Bus, Stored, connect
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.instances import InstancesBucket, InstancesView
from headrace.errors import ConfigError
from headrace.host import HostOptions, run_host
from headrace.host.launching import Order
from headrace.lifecycle import wait_first
from headrace.schemas.instances import Device, GroupName, Slot, SlotName
from headrace.schemas.replicas import ReplicaGroup
from headrace.schemas.workers import Heartbeat, WorkerState
from tests.hosts import configure, ready, until_slots

MODEL = "m"
GROUP = GroupName(MODEL, "default")
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

    def __init__(self, url: str, bus: Bus) -> None:
        self.bus = bus
        self.view = InstancesView(bus)
        self.children: list[FakeChild] = []
        self.state_of: Callable[[ReplicaGroup], tuple[WorkerState, str]] = lambda group: ("Ready", "")
        self._url = url
        self._agents: list[RunningAgent] = []

    async def agent(self, host: str, *gibs: int) -> RunningAgent:
        """Start one with GPUs of so many GiB."""
        devices = tuple(
            Device(name=f"GPU-{host}-{number}", kind="gpu", total_bytes=gib * GIB) for number, gib in enumerate(gibs)
        )
        stopping = asyncio.Event()

        async def run() -> None:
            async with connect(self._url, self.bus.settings, name=host) as bus:
                await run_host(bus, HostOptions(host=host, devices=devices), self._launch, stop=stopping)

        agent = RunningAgent(asyncio.create_task(run()), stopping)
        self._agents.append(agent)
        return agent

    def running(self) -> list[FakeChild]:
        return [child for child in self.children if child.is_running]

    def _launch(self, order: Order) -> FakeChild:
        child = FakeChild(self.bus, order, *self.state_of(order.group))
        self.children.append(child)
        return child

    async def stop(self) -> None:
        for agent in self._agents:
            if not agent.task.done():
                await agent.stop()


@pytest_asyncio.fixture
async def ground(bus: Bus) -> AsyncIterator[Ground]:
    made = Ground(bus.url, bus)
    async with made.view.running():
        try:
            yield made
        finally:
            await made.stop()


def gpu_group(replicas: int, memory_mib: int | None = 1024, restarts: int = 0) -> ReplicaGroup:
    return ReplicaGroup(engine="sim", replicas=replicas, memory_mib=memory_mib, restarts=restarts)


async def test_agents_share_replicas_out_and_take_those_of_one_that_leaves(ground: Ground) -> None:
    first = await ground.agent("a", 4)
    await ground.agent("b", 4)
    await ground.agent("c", 4)
    await until_slots(ground.view, lambda view: len(view.hosts) == 3)
    await configure(ground.bus, MODEL, gpu_group(6))
    await until_slots(ground.view, lambda view: len(ready(view)) == 6)
    assert {child.order.device for child in ground.running()} == {"GPU-a-0", "GPU-b-0", "GPU-c-0"}
    assert len({child.order.worker for child in ground.running()}) == 6
    assert [slot.device for slot in ready(ground.view) if slot.host == "a"].count("GPU-a-0") == sum(
        child.order.device == "GPU-a-0" for child in ground.running()
    )
    await first.stop()
    assert {child.order.device for child in ground.running()} <= {"GPU-b-0", "GPU-c-0"}
    await until_slots(ground.view, lambda view: len(ready(view)) == 6 and set(view.hosts) == {"b", "c"})
    assert {slot.host for slot in ready(ground.view)} == {"b", "c"}


async def test_an_agent_answers_the_services_protocol(ground: Ground) -> None:
    await ground.agent("a", 1)
    await until_slots(ground.view, lambda view: "a" in view.hosts)
    reply = msgspec.json.decode((await ground.bus.request("$SRV.PING.headrace-host")).data)
    assert reply["metadata"] == {"host": "a"}


async def test_a_second_agent_of_the_same_name_is_refused(ground: Ground) -> None:
    await ground.agent("a", 1)
    await until_slots(ground.view, lambda view: "a" in view.hosts)
    second = await ground.agent("a", 1)
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(second.task, 30)
    assert raised.group_contains(ConfigError, match="another agent runs as host a")


async def test_a_generation_that_never_is_ready_is_given_up_with_the_workers_own_words(ground: Ground) -> None:
    await configure(ground.bus, MODEL, gpu_group(1))
    await ground.agent("a", 4)
    await until_slots(ground.view, lambda view: len(ready(view)) == 1)
    old = set(ground.view.slots)
    bad = gpu_group(1, restarts=1)
    ground.state_of = lambda group: ("Failed", "the probe got no token") if group == bad else ("Ready", "")
    await configure(ground.bus, MODEL, bad)
    await until_slots(ground.view, lambda view: bool(view.failed))
    await until_slots(ground.view, lambda view: set(view.slots) == old)
    ((key, failed),) = ground.view.failed.items()
    assert key == (GROUP, bad.generation)
    assert (failed.reason, failed.failures, failed.host) == ("the probe got no token", 3, "a")
    assert len(ready(ground.view)) == 1
    good = gpu_group(1, restarts=2)
    await configure(ground.bus, MODEL, good)
    await until_slots(ground.view, lambda view: set(view.slots) == {SlotName(GROUP, good.generation, 0)})


async def test_a_worker_that_ends_is_started_again_and_its_last_words_are_told(ground: Ground) -> None:
    await configure(ground.bus, MODEL, gpu_group(1))
    await ground.agent("a", 4)
    await until_slots(ground.view, lambda view: len(ready(view)) == 1)
    (child,) = ground.running()
    seen: list[Slot] = []
    child.end(1)

    def is_again_ready(view: InstancesView) -> bool:
        seen.extend(view.slots.values())
        return [slot.worker for slot in ready(view)] not in ([], [child.order.worker])

    await until_slots(ground.view, is_again_ready)
    assert "engine sim: it is out of luck" in {slot.reason for slot in seen}
    assert ready(ground.view)[0].failures == 1


async def test_a_lease_that_another_has_is_not_ours_and_one_that_nobody_has_is_written_again(ground: Ground) -> None:
    await configure(ground.bus, MODEL, gpu_group(1))
    agent = await ground.agent("a", 4)
    await until_slots(ground.view, lambda view: len(ready(view)) == 1)
    ((name, mine),) = ground.view.slots.items()
    bucket = InstancesBucket(ground.bus)
    (child,) = ground.running()
    await _overwrite(bucket, name, None)
    await until_slots(ground.view, lambda view: view.slots.get(name) == mine)
    assert child.is_running
    theirs = Slot(host="z", epoch="other", state="Ready")
    await _overwrite(bucket, name, theirs)
    await until_slots(ground.view, lambda view: not ground.running())
    await agent.stop()
    _, known = await bucket.slot(name)
    assert known == theirs


async def _overwrite(bucket: InstancesBucket, name: SlotName, slot: Slot | None) -> None:
    """Write over a lease, against an agent that renews it."""
    while True:
        revision, _ = await bucket.slot(name)
        if slot is None:
            result = await bucket.remove_slot(name, expected_revision=revision)
        else:
            result = await bucket.put_slot(name, slot, expected_revision=revision, ttl_s=60)
        if isinstance(result, Stored):
            return


async def test_a_device_of_its_own_goes_to_one_worker_alone(ground: Ground) -> None:
    await configure(ground.bus, MODEL, gpu_group(3, memory_mib=None))
    await ground.agent("a", 4, 4)
    await until_slots(ground.view, lambda view: len(ready(view)) == 2)
    await until_slots(ground.view, lambda view: "no host has room for replica 2" in view.hosts["a"].reason)
    assert sorted(child.order.device for child in ground.running()) == ["GPU-a-0", "GPU-a-1"]


async def test_workers_of_an_earlier_run_that_still_drain_are_waited_for(ground: Ground) -> None:
    earlier = Heartbeat(worker="a-0badcafe-1", epoch="e", state="Draining", model=MODEL)
    stored = await WorkersBucket(ground.bus).put(earlier, expected_revision=0, ttl_s=600)
    assert isinstance(stored, Stored)
    await configure(ground.bus, MODEL, gpu_group(1))
    await ground.agent("a", 4)
    await until_slots(ground.view, lambda view: "a" in view.hosts)
    revisions: set[int] = set()
    while len(revisions) < 3:
        revisions.add((await InstancesBucket(ground.bus).host("a"))[0])
        await wait_first(ground.view.changed, timeout_s=0.2)
    assert ground.view.slots == {}
    await WorkersBucket(ground.bus).remove("a-0badcafe-1", expected_revision=stored.sequence)
    await until_slots(ground.view, lambda view: len(ready(view)) == 1)
