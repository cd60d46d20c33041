"""`headrace models` against a real broker: what is declared, what follows, waiting, and names that lead there."""

import asyncio
import json
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from headrace.bus.configuration import read_config, read_entries
from headrace.bus.connection import Bus, Stored
from headrace.bus.instancelist import Snapshot, read_instances
from headrace.bus.keyvalue import Bucket
from headrace.bus.overview import list_models
from headrace.bus.provision import ensure_jobs_stream
from headrace.cli import rollout
from headrace.cli.entries import write_entry
from headrace.schemas.config import ModelConfig
from headrace.schemas.config_text import key_of
from headrace.schemas.instances import (
    FailedGeneration,
    GroupName,
    HostBeat,
    Scale,
    Slot,
    SlotName,
    failed_key,
    host_key,
)
from headrace.schemas.replicas import Autoscale, ReplicaGroup
from tests.commands import Headrace
from tests.deployment import MODEL, deployment, until

NAME = GroupName("n", "default")
WITHIN_S = 30.0


@pytest.fixture
def headrace(broker_url: str, prefix: str) -> Headrace:
    return Headrace(broker_url, prefix)


async def group_of(bus: Bus, model: str = "n", pool: str = "default") -> ReplicaGroup:
    (found,) = (group for group in (await read_config(bus)).model(model).instances if group.pool == pool)
    return found


class Instances:
    """Writes the instances bucket, as hosts and the autoscaler would."""

    def __init__(self, bus: Bus) -> None:
        self._bucket = Bucket(bus, bus.names.instances_bucket)

    async def put(self, key: str, value: msgspec.Struct) -> None:
        known = await self._bucket.get(key)
        revision = known.revision if known is not None else 0
        result = await self._bucket.put(key, msgspec.json.encode(value), expected_revision=revision)
        assert isinstance(result, Stored)

    async def remove(self, key: str) -> None:
        known = await self._bucket.get(key)
        assert known is not None
        assert isinstance(await self._bucket.remove(key, expected_revision=known.revision, ttl_s=60), Stored)

    async def host(self) -> None:
        await self.put(host_key("h"), HostBeat(host="h", epoch="e"))

    async def ready(self, group: ReplicaGroup, number: int) -> None:
        for index in range(number):
            slot = SlotName(NAME, group.generation, index)
            await self.put(slot.key, Slot(host="h", epoch="e", worker=f"w{index}", state="Ready"))

    async def fail(self, group: ReplicaGroup) -> None:
        failed = FailedGeneration(reason="no such file", failures=3, host="h")
        await self.put(failed_key(NAME, group.generation), failed)


@pytest_asyncio.fixture
async def instances(bus: Bus) -> AsyncIterator[Instances]:
    yield Instances(bus)


async def test_all_kinds_of_keys_are_read_and_what_is_gone_or_nonsense_is_not(bus: Bus, instances: Instances) -> None:
    assert await read_instances(bus) == Snapshot()
    group = ReplicaGroup(engine="sim")
    slot, other = SlotName(NAME, group.generation, 0), SlotName(GroupName("org/n-1.0", "p"), "00000000", 12)
    for name in (slot, other):
        await instances.put(name.key, Slot(host="h", epoch="e"))
    await instances.put(NAME.scale_key, Scale(replicas=4))
    await instances.host()
    await instances.fail(group)
    for key in ("slots.n.default.x", "unknown.n", "hosts.odd", "failed.n.default", "slots.n.default.g.-1"):
        await instances.put(key, AnyText())
    await instances.remove(other.key)
    found = await read_instances(bus)
    assert found.slots == {slot: Slot(host="h", epoch="e")}
    assert found.scales == {NAME: Scale(replicas=4)}
    assert found.hosts == {"h": HostBeat(host="h", epoch="e")}
    assert list(found.failed) == [(NAME, group.generation)]
    assert found.revisions[slot.key] == 1
    assert other.key not in found.revisions


class AnyText(msgspec.Struct):
    """No value of any of them."""

    nonsense: int = 1


async def test_who_interrupts_a_wait_is_told_that_the_declaration_stays(
    bus: Bus, headrace: Headrace, capsys: pytest.CaptureFixture[str]
) -> None:
    await headrace.run("models", "add", "n", "--engine", "sim")
    capsys.readouterr()
    waiting = asyncio.create_task(rollout.follow(bus, "n", [await group_of(bus)], timeout_s=WITHIN_S))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert "n stays as it is declared; `headrace models list`" in capsys.readouterr().err
    assert await group_of(bus) == ReplicaGroup(engine="sim")


async def test_a_model_is_declared_changed_and_removed(bus: Bus, headrace: Headrace) -> None:
    declared = await headrace.run(
        "models", "add", "n", "--engine", "sim", "--replicas", "2", "--args", "--max-concurrency 4",
        "--args", "-o 'tokens_per_second=5'", "--memory", "20GiB", "--uses", "host",
    )  # fmt: skip
    assert "2 workers are started" in declared.output
    assert "no host agent runs" in declared.output
    group = await group_of(bus)
    assert group == ReplicaGroup(
        engine="sim", replicas=2, args=("--max-concurrency", "4", "-o", "tokens_per_second=5"), memory_mib=20480,
        uses="host",
    )  # fmt: skip
    assert "n" in await list_models(bus)

    again = await headrace.run("models", "add", "n", "--engine", "sim", code=1)
    assert "headrace models set" in again.output
    number = await headrace.run("models", "set", "n", "--replicas", "5")
    assert "number only, 2 → 5" in number.output
    same = await headrace.run("models", "set", "n", "--replicas", "5")
    assert "nothing changed" in same.output
    (change,) = await headrace.json("models", "set", "n", "--args", "", "--memory", "whole")
    assert (change["before"]["replicas"], change["generation"]) == (5, (await group_of(bus)).generation)
    assert change["generation_before"] == msgspec.structs.replace(group, replicas=5).generation
    assert await group_of(bus) == ReplicaGroup(engine="sim", replicas=5, uses="host")

    await headrace.run("models", "set", "n", "--min-replicas", "0", "--max-replicas", "3", "--target-wait", "2")
    await headrace.run("models", "set", "n", "--idle", "60")
    assert (await group_of(bus)).autoscale == Autoscale(min_replicas=0, max_replicas=3, target_wait_s=2, idle_s=60)
    bad = await headrace.run("models", "set", "n", "--min-replicas", "4", code=2)
    assert "at most max_replicas (3)" in bad.output
    bad = await headrace.run("models", "set", "n", "--args", "--max-concurrency 0", code=2)
    assert "--args" in bad.output
    await headrace.run("models", "set", "n", "--no-autoscale")
    assert (await group_of(bus)).autoscale is None
    fixed = await headrace.run("models", "set", "n", "--up-cooldown", "3", code=2)
    assert "--up-cooldown" in fixed.output

    before = await group_of(bus)
    restarted = await headrace.run("models", "restart", "n")
    assert (await group_of(bus)).restarts == before.restarts + 1
    assert f"{before.generation} → {(await group_of(bus)).generation}" in restarted.output

    assert "--yes" in (await headrace.run("models", "remove", "n", code=2)).output
    await headrace.run("models", "remove", "n", "--yes")
    entries = await read_entries(bus)
    assert entries["models.n"].entry == ModelConfig()
    await headrace.run("models", "remove", "n", "--all", "--yes")
    assert (await read_entries(bus))["models.n"].entry is None
    assert "n" in await list_models(bus), "its queue stays"


async def test_each_pool_has_workers_of_its_own(bus: Bus, headrace: Headrace) -> None:
    await headrace.run("models", "add", "n", "--engine", "sim")
    new = await headrace.run("models", "add", "n", "--engine", "llama", "--pool", "long", "--replicas", "3")
    assert "the pool long is new" in new.output
    await headrace.run("models", "set", "n", "--pool", "long", "--replicas", "4")
    assert ((await group_of(bus)).replicas, (await group_of(bus, pool="long")).replicas) == (1, 4)
    wrong = await headrace.run("models", "set", "n", "--pool", "lon", "--replicas", "4", code=1)
    assert "default, long" in wrong.output
    assert [each["pool"] for each in await headrace.json("models", "restart", "n")] == ["default", "long"]
    await headrace.run("models", "remove", "n", "--pool", "default", "--yes")
    assert [group.pool for group in (await read_config(bus)).model("n").instances] == ["long"]
    listed = {each["pool"]: each["wanted"] for each in await headrace.json("models", "list") if each["model"] == "n"}
    assert listed == {"long": 4}


async def test_waiting_ends_when_the_workers_are_there(
    bus: Bus, headrace: Headrace, instances: Instances, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "_LOOK_S", 0.02)
    await headrace.run("models", "add", "n", "--engine", "sim", "--replicas", "2")
    await instances.host()
    old = await group_of(bus)
    await instances.ready(old, 2)
    await headrace.run("models", "set", "n", "--replicas", "2", "--wait")

    waiting = asyncio.create_task(headrace.run("models", "restart", "n", "--wait", "--timeout", str(WITHIN_S)))
    await until(lambda: is_restarted(bus, 1))
    new = await group_of(bus)
    await instances.ready(new, 2)
    await instances.remove(SlotName(NAME, old.generation, 0).key)
    assert not waiting.done()
    await instances.remove(SlotName(NAME, old.generation, 1).key)
    result = await waiting
    assert "as declared" in result.stdout
    assert "of 2 ready" in result.stderr

    late = await headrace.run("models", "restart", "n", "--wait", "--timeout", "0.2", code=1)
    assert "0 of 2 ready" in late.stderr
    assert "2 to go" in late.stderr


async def test_waiting_ends_with_the_reason_where_a_generation_fails_until_it_is_tried_again(
    bus: Bus, headrace: Headrace, instances: Instances, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "_LOOK_S", 0.02)
    await headrace.run("models", "add", "n", "--engine", "sim")
    nothing = await headrace.run("models", "retry", "n", code=1)
    assert "no workers of n were given up" in nothing.output
    waiting = asyncio.create_task(headrace.run("models", "restart", "n", "--wait", code=1))
    await until(lambda: is_restarted(bus, 1))
    await instances.fail(await group_of(bus))
    result = await waiting
    assert "no such file" in result.stderr
    assert "headrace models retry" in result.stderr
    assert "host h" in result.stderr
    (listed,) = [each for each in await headrace.json("models", "list") if each["model"] == "n"]
    assert listed["failed"] == {
        "generation": (await group_of(bus)).generation, "reason": "no such file", "failures": 3, "host": "h",
    }  # fmt: skip
    assert "no such file" in (await headrace.run("models", "list")).output
    await headrace.run("models", "retry", "n")
    assert (await read_instances(bus)).failed == {}


async def test_waiting_for_what_somebody_else_changed_ends(
    bus: Bus, headrace: Headrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "_LOOK_S", 0.02)
    waiting = asyncio.create_task(headrace.run("models", "add", "n", "--engine", "sim", "--wait", code=1))

    async def is_declared() -> bool:
        return bool((await read_config(bus)).model("n").instances)

    await until(is_declared)
    group = msgspec.structs.replace(await group_of(bus), restarts=1)
    key = key_of("models", "n")
    revision = (await read_entries(bus))[key].revision
    await write_entry(bus, key, ModelConfig(instances=(group,)), expected_revision=revision)
    assert "somebody else changed" in (await waiting).stderr


async def is_restarted(bus: Bus, times: int) -> bool:
    return (await group_of(bus)).restarts == times


async def test_aliases_switch_between_versions_by_weight(bus: Bus, headrace: Headrace) -> None:
    for model in ("m@1", "m@2"):
        await ensure_jobs_stream(bus, model)
    made = await headrace.json("models", "alias", "chat", "m@1=9", "m@2=1")
    assert made == {"alias": "chat", "before": None, "after": {"m@1": 0.9, "m@2": 0.1}}
    switched = await headrace.run("models", "alias", "chat", "m@2")
    assert "m@2  100 % (was 10 %)" in switched.output
    assert "m@1  0 % (was 90 %)" in switched.output
    assert (await headrace.json("models", "alias", "chat"))["after"] == {"m@2": 1.0}
    pools = {each["model"]: each["aliases"] for each in await headrace.json("models", "list")}
    assert pools == {"m": [], "m@1": [], "m@2": [{"alias": "chat", "share": 1.0}]}
    unknown = await headrace.run("models", "alias", "chat", "m@3", code=1)
    assert "no model m@3 is known; did you mean" in unknown.output
    chain = await headrace.run("models", "alias", "talk", "chat", code=1)
    assert "an alias itself" in chain.output
    shadow = await headrace.run("models", "alias", "m", "m@1")
    assert "m is a model too" in shadow.stderr
    await headrace.run("models", "alias", "chat", "--remove")
    gone = await headrace.run("models", "alias", "chat", code=1)
    assert "there is no alias chat" in gone.output
    taken = await headrace.run("models", "add", "m", "--engine", "sim", code=1)
    assert "m is an alias" in taken.output


async def test_pausing_is_said_everywhere(broker_url: str, prefix: str, headrace: Headrace) -> None:
    async with deployment(broker_url, prefix, heartbeat_s=0.2) as running:
        await running.worker(worker="w", max_concurrency=4)
        misspelt = await headrace.run("models", "pause", "sim-mode", code=1)
        assert f"did you mean {MODEL}" in misspelt.output
        assert "is paused" in (await headrace.run("models", "pause", MODEL)).output
        assert "already" in (await headrace.run("models", "pause", MODEL)).output
        async with running.client.stream(model=MODEL, prompt="x", max_tokens=1) as stream:
            events = aiter(stream)
            await anext(events)
            (listed,) = await headrace.json("models", "list")
            assert (listed["paused"], listed["ready"], listed["undeclared"]) == (True, 1, 1)
            assert (listed["queued"], listed["running"]) == (1, 0)
            status = await headrace.json("status")
            assert [(each["paused"], each["eta_s"], each["queued"]) for each in status["queues"]] == [(True, None, 1)]
            assert "paused" in (await headrace.run("status")).output
            assert "paused" in (await headrace.run("models", "list")).output
            await until(lambda: is_known_to_be_paused(headrace, stream.job))
            assert "the model is paused" in (await headrace.run("jobs", "show", stream.job)).output
            assert "is resumed" in (await headrace.run("models", "resume", MODEL)).output
            assert "not paused" in (await headrace.run("models", "resume", MODEL)).output
            async for _ in events:
                pass


async def is_known_to_be_paused(headrace: Headrace, job: str) -> bool:
    """Whether the router has heard of it."""
    shown = json.loads((await headrace.run("jobs", "show", job, "--json")).stdout)
    return bool(shown["paused"])
