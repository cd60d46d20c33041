"""Host agents: one is killed; a new generation comes under load; the broker goes away."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

import headrace.client
from headrace.bus.connection import Bus, connect
from headrace.bus.heartbeats import WorkersBucket, WorkersView
from headrace.bus.instances import InstancesView
from headrace.bus.provision import ensure_provisioned
from headrace.bus.server import BrokerInfo
from headrace.client import Client
from headrace.lifecycle import ChildProcess, wait_first
from headrace.settings import Settings
from tests.fake_workers import Ground as Workers
from tests.fake_workers import gpu_group
from tests.faults.broker import RestartableBroker
from tests.hosts import GRACE, configure, ready, sim_group, until_renewed, until_slots
from tests.processes import part, serving

MODEL = "sim-model"
LEASE_S = 2.0


class Ground:
    """A deployment without workers, and what its buckets say. `host` makes agents."""

    def __init__(self, broker: BrokerInfo, prefix: str, state_dir: Path, client: Client) -> None:
        self._broker = broker
        self._prefix = prefix
        self._state_dir = state_dir
        self.client = client
        self.bus: Bus = client.bus
        self.view = InstancesView(client.bus)
        self.workers = WorkersView(client.bus)

    def host(self, name: str, **variables: str) -> ChildProcess:
        """An agent that lends 4 GiB."""
        return part(
            "serve", "host", "--host-id", name, "--memory", "4GiB",
            url=self._broker.url, prefix=self._prefix, state_dir=self._state_dir, **GRACE, **variables,
        )  # fmt: skip

    def beating(self) -> set[str]:
        """Workers that can serve, by their heartbeats."""
        return {worker for worker, beat in self.workers.beats.items() if beat.state in ("Ready", "Busy")}


@pytest_asyncio.fixture
async def ground(broker: BrokerInfo, prefix: str, tmp_path: Path) -> AsyncIterator[Ground]:
    def started(*arguments: str) -> ChildProcess:
        return part(*arguments, url=broker.url, prefix=prefix, state_dir=tmp_path)

    async with (
        started("serve", "router"),
        started("serve", "monitor"),
        headrace.client.connect(broker.url, settings=Settings(prefix=prefix)) as client,
    ):
        await ensure_provisioned(client.bus)
        made = Ground(broker, prefix, tmp_path, client)
        async with made.view.running(), made.workers.running():
            yield made


async def test_replicas_of_a_killed_agent_move_and_when_it_returns_there_are_not_four(ground: Ground) -> None:
    await configure(ground.bus, MODEL, sim_group(2))
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(ground.host("first"))
        await until_slots(ground.view, lambda view: len(ready(view)) == 2)
        assert {slot.host for slot in ready(ground.view)} == {"first"}
        before = ground.beating()
        await stack.enter_async_context(ground.host("second"))
        await until_slots(ground.view, lambda view: set(view.hosts) == {"first", "second"})
        first.send_signal(signal.SIGKILL)
        await until_slots(ground.view, lambda view: [slot.host for slot in ready(view)] == ["second"] * 2)
        await until_slots(ground.view, lambda view: len(ground.beating()) == 2 and not ground.beating() & before)
        await stack.enter_async_context(ground.host("first"))
        await until_renewed(ground.bus, "first", 3)
        assert [slot.host for slot in ready(ground.view)] == ["second"] * 2
        assert len(ground.beating()) == 2


async def test_an_agent_that_stood_still_for_longer_than_its_leases_live_gives_way(ground: Ground) -> None:
    await configure(ground.bus, MODEL, sim_group(1))
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(ground.host("first"))
        await until_slots(ground.view, lambda view: len(ready(view)) == 1)
        (old,) = ground.beating()
        await stack.enter_async_context(ground.host("second"))
        await until_slots(ground.view, lambda view: set(view.hosts) == {"first", "second"})
        first.send_signal(signal.SIGSTOP)
        try:
            await until_slots(ground.view, lambda view: [slot.host for slot in ready(view)] == ["second"])
            assert old in ground.beating(), "its worker did not stand still"
        finally:
            first.send_signal(signal.SIGCONT)
        await until_slots(
            ground.view, lambda view: len(ground.beating()) == 1 and set(view.hosts) == {"first", "second"}
        )
        await until_renewed(ground.bus, "first", 3)
        assert old not in ground.beating()
        assert [slot.host for slot in ready(ground.view)] == ["second"]
        assert first.returncode is None


async def test_under_load_nothing_is_lost_by_an_update_one_that_does_not_start_and_an_agent_that_leaves(
    ground: Ground,
) -> None:
    await configure(ground.bus, MODEL, sim_group(2, "tokens_per_second=200"))
    stop, is_updated = asyncio.Event(), asyncio.Event()
    num_done = 0
    fewest = 2

    async def ask() -> None:
        nonlocal num_done
        while not stop.is_set():
            done = await ground.client.complete(model=MODEL, prompt="and now?", max_tokens=20, deadline_s=60)
            assert done.text
            num_done += 1

    async def count() -> None:  # a listing is of one moment; a view may hear of one worker later than of another
        nonlocal fewest
        while not is_updated.is_set():
            ground.workers.changed.clear()
            seen = [each.beat for each in (await WorkersBucket(ground.bus).list()).values()]
            fewest = min(fewest, sum(beat is not None and beat.state in ("Ready", "Busy") for beat in seen))
            await wait_first(is_updated, ground.workers.changed, timeout_s=0.1)

    patient = {"HEADRACE_WORKER_TTL_S": "10"}  # nobody dies here, however busy the machine is
    async with ground.host("first", **patient) as first, ground.host("second", **patient):
        await until_slots(ground.view, lambda view: len(ready(view)) == 2)
        await until_slots(ground.view, lambda view: len(ground.beating()) == 2)
        await serving(ground.client, MODEL)
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(ask())
            group.create_task(count())
            new = sim_group(2, "tokens_per_second=300")
            await configure(ground.bus, MODEL, new)
            await until_slots(
                ground.view,
                lambda view: (
                    len(ready(view)) == len(view.slots) == 2
                    and {name.generation for name in view.slots} == {new.generation}
                ),
            )
            bad = sim_group(2, "fail_probes=1000")
            await configure(ground.bus, MODEL, bad)
            await until_slots(ground.view, lambda view: bool(view.failed))
            await until_slots(ground.view, lambda view: len(view.slots) == 2)
            (failed,) = ground.view.failed.values()
            is_updated.set()
            await configure(ground.bus, MODEL, new)
            first.send_signal(signal.SIGTERM)
            await until_slots(ground.view, lambda view: [slot.host for slot in ready(view)] == ["second"] * 2)
            assert await asyncio.wait_for(first.wait(), 30) == 0
            num_before = num_done
            await until_slots(ground.view, lambda view: num_done > num_before + 4)
            stop.set()
    assert fewest == 2
    assert {name.generation for name in ground.view.slots} <= {new.generation}
    assert "probe" in failed.reason, failed.reason
    assert failed.failures == 3


async def test_a_broker_that_is_away_for_longer_than_leases_live_takes_no_worker_down(
    prefix: str, tmp_path: Path
) -> None:
    settings = Settings(prefix=prefix, worker_ttl_s=1, heartbeat_s=0.25, request_timeout_s=1)
    async with (
        RestartableBroker(tmp_path) as broker,
        connect(broker.info.url, settings, name="test") as bus,
    ):
        await ensure_provisioned(bus)
        await configure(bus, MODEL, gpu_group(4))
        async with Workers(bus).running() as workers:
            await workers.agent("first", 4)
            await workers.agent("second", 4)
            await until_slots(workers.view, lambda view: len(ready(view)) == 4)
            before = workers.running_children()
            slots = dict(workers.view.slots)
            await broker.end(signal.SIGKILL)
            await asyncio.sleep(2 * LEASE_S)
            await broker.start()
            await asyncio.gather(*(until_renewed(bus, host, 6) for host in ("first", "second")))
            await until_slots(workers.view, lambda view: view.slots == slots)
            assert workers.running_children() == workers.children == before
