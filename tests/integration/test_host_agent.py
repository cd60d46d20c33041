"""Agents in this process over the real broker, with workers that only beat."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from headrace.bus.connection import Bus, Stored, connect
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.instances import InstancesBucket, InstancesView
from headrace.errors import ConfigError
from headrace.host import lease
from headrace.lifecycle import wait_first
from headrace.schemas.instances import FailedGeneration, GroupName, Slot, SlotName
from headrace.schemas.workers import Heartbeat
from tests.fake_workers import Ground, gpu_group
from tests.faults.link import Link
from tests.hosts import configure, ready, until_slots

MODEL = "m"
GROUP = GroupName(MODEL, "default")


@pytest_asyncio.fixture
async def ground(bus: Bus) -> AsyncIterator[Ground]:
    """Leases live for two seconds here."""
    settings = msgspec.structs.replace(bus.settings, worker_ttl_s=1.0, heartbeat_s=0.25)
    async with connect(bus.url, settings, name="agents") as own, Ground(own).running() as made:
        yield made


async def test_agents_share_replicas_out_and_take_those_of_one_that_leaves(ground: Ground) -> None:
    first = await ground.agent("a", 4)
    await ground.agent("b", 4)
    await ground.agent("c", 4)
    await until_slots(ground.view, lambda view: len(view.hosts) == 3)
    await configure(ground.bus, MODEL, gpu_group(6))
    await until_slots(ground.view, lambda view: len(ready(view)) == 6)
    assert {child.order.device for child in ground.running_children()} == {"GPU-a-0", "GPU-b-0", "GPU-c-0"}
    assert len({child.order.worker for child in ground.running_children()}) == 6
    assert [slot.device for slot in ready(ground.view) if slot.host == "a"].count("GPU-a-0") == sum(
        child.order.device == "GPU-a-0" for child in ground.running_children()
    )
    await first.stop()
    assert {child.order.device for child in ground.running_children()} <= {"GPU-b-0", "GPU-c-0"}
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
    (child,) = ground.running_children()
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
    (child,) = ground.running_children()
    await _overwrite(bucket, name, None)
    await until_slots(ground.view, lambda view: view.slots.get(name) == mine)
    assert child.is_running
    theirs = Slot(host="z", epoch="other", state="Ready")
    await _overwrite(bucket, name, theirs)
    await until_slots(ground.view, lambda view: not ground.running_children())
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


async def test_a_bucket_that_is_lost_and_made_anew_restarts_nobody(ground: Ground) -> None:
    await ground.agent("a", 4)
    await ground.agent("b", 4)
    await until_slots(ground.view, lambda view: len(view.hosts) == 2)
    await configure(ground.bus, MODEL, gpu_group(4))
    await until_slots(ground.view, lambda view: len(ready(view)) == 4)
    before, workers = dict(ground.view.slots), ground.running_children()
    stream = f"KV_{ground.bus.names.instances_bucket}"
    config = msgspec.json.decode(await ground.bus.api(f"STREAM.INFO.{stream}"))["config"]
    await ground.bus.api(f"STREAM.DELETE.{stream}")
    await until_slots(ground.view, lambda view: not view.is_fresh)
    await ground.bus.api(f"STREAM.CREATE.{stream}", config)
    await until_slots(ground.view, lambda view: view.is_fresh and len(view.hosts) == 2 and len(ready(view)) == 4)
    assert {name: slot.worker for name, slot in ground.view.slots.items()} == {
        name: slot.worker for name, slot in before.items()
    }
    assert ground.running_children() == workers == ground.children


async def test_a_device_of_its_own_goes_to_one_worker_alone(ground: Ground) -> None:
    await configure(ground.bus, MODEL, gpu_group(3, memory_mib=None))
    await ground.agent("a", 4, 4)
    await until_slots(ground.view, lambda view: len(ready(view)) == 2)
    await until_slots(ground.view, lambda view: "no host has room for replica 2" in view.hosts["a"].reason)
    assert sorted(child.order.device for child in ground.running_children()) == ["GPU-a-0", "GPU-a-1"]


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


async def test_numbers_change_with_the_configuration_down_to_zero(ground: Ground) -> None:
    await ground.agent("a", 4)
    await ground.agent("b", 4)
    for wanted in (1, 5, 2, 0):
        await configure(ground.bus, MODEL, gpu_group(wanted))

        def is_so(view: InstancesView, wanted: int = wanted) -> bool:
            indexes = sorted(name.index for name in view.slots)
            return len(ready(view)) == wanted and indexes == list(range(wanted))

        await until_slots(ground.view, is_so)


async def test_an_agent_that_was_cut_off_keeps_what_nobody_took_and_drains_what_another_has(ground: Ground) -> None:
    await configure(ground.bus, MODEL, gpu_group(1))
    async with Link(ground.bus.url) as link:
        cut_off = await ground.agent("a", 4, url=link.url)
        await until_slots(ground.view, lambda view: len(ready(view)) == 1)
        (first,) = ground.running_children()
        link.freeze()
        await until_slots(ground.view, lambda view: not view.slots)
        link.thaw()
        await until_slots(ground.view, lambda view: len(ready(view)) == 1)
        assert ground.running_children() == [first]
        link.freeze()
        await until_slots(ground.view, lambda view: not view.slots)
        await ground.agent("b", 4)
        await until_slots(ground.view, lambda view: [slot.host for slot in ready(view)] == ["b"])
        link.thaw()
        await until_slots(ground.view, lambda view: first not in ground.running_children() and "a" in view.hosts)
        assert [slot.host for slot in ready(ground.view)] == ["b"]
        await cut_off.stop()


async def test_an_agent_that_stays_cut_off_drains(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "DOUBT_S", 3.0)
    await configure(ground.bus, MODEL, gpu_group(1))
    async with Link(ground.bus.url) as link:
        agent = await ground.agent("a", 4, url=link.url)
        await until_slots(ground.view, lambda view: len(ready(view)) == 1)
        link.freeze()
        await until_slots(ground.view, lambda view: not view.slots and not ground.running_children())
        link.thaw()
        await until_slots(ground.view, lambda view: len(ready(view)) == 1)
        await agent.stop()


async def test_a_generation_that_failed_may_come_again_once_another_was_configured(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.host.agent._FORGET_S", 0.5)
    bad = gpu_group(1, restarts=1)
    failed = FailedGeneration(reason="no luck", failures=3)
    await InstancesBucket(ground.bus).mark_failed(GROUP, bad.generation, failed)
    await configure(ground.bus, MODEL, bad)
    await ground.agent("a", 4)
    await until_slots(ground.view, lambda view: "a" in view.hosts)
    assert ground.view.slots == {}
    await configure(ground.bus, MODEL, gpu_group(1))
    await until_slots(ground.view, lambda view: len(ready(view)) == 1 and not view.failed)
    await configure(ground.bus, MODEL, bad)
    await until_slots(ground.view, lambda view: set(view.slots) == {SlotName(GROUP, bad.generation, 0)})
