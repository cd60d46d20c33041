"""The view of the instances bucket: what is there, and nothing else, however long it could not be read."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from headrace.bus.connection import Bus, Stored
from headrace.bus.instances import InstancesBucket, InstancesView
from headrace.schemas.instances import GroupName, HostBeat, Slot, SlotName
from tests.deployment import until

GROUP = GroupName("m", "default")
SLOTS = [SlotName(GROUP, "12345678", index) for index in range(3)]


def _async(holds: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return holds()

    return check


async def test_a_key_whose_end_nobody_can_tell_any_more_goes_too(bus: Bus) -> None:
    bucket = InstancesBucket(bus)
    for name in SLOTS[:2]:
        assert isinstance(await bucket.put_slot(name, Slot(host="a", epoch="1"), expected_revision=0, ttl_s=60), Stored)
    now = 0.0
    view = InstancesView(bus, clock=lambda: now)
    async with view.running(), asyncio.timeout(30):
        assert set(view.slots) == set(SLOTS[:2])
        # As after a minute without the broker: the key and what marked it as gone have both expired.
        subject = f"$KV.{bus.names.instances_bucket}.{SLOTS[0].key}"
        await bus.api(f"STREAM.PURGE.KV_{bus.names.instances_bucket}", {"filter": subject})
        await bucket.put_host(HostBeat(host="b", epoch="1"), expected_revision=0, ttl_s=60)
        await until(_async(lambda: "b" in view.hosts))
        now = 30.0
        await until(_async(lambda: set(view.slots) == {SLOTS[1]}))
        assert set(view.hosts) == {"b"}


async def test_a_bucket_that_was_made_anew_brings_nothing_of_the_old(bus: Bus) -> None:
    bucket = InstancesBucket(bus)
    for name in SLOTS:
        await bucket.put_slot(name, Slot(host="a", epoch="1"), expected_revision=0, ttl_s=60)
    view = InstancesView(bus)
    async with view.running(), asyncio.timeout(30):
        assert len(view.slots) == 3
        await bus.api(f"STREAM.PURGE.KV_{bus.names.instances_bucket}")
        config = msgspec.json.decode(await bus.api(f"STREAM.INFO.KV_{bus.names.instances_bucket}"))["config"]
        await bus.api(f"STREAM.DELETE.KV_{bus.names.instances_bucket}")
        await until(_async(lambda: not view.is_fresh))
        await bus.api(f"STREAM.CREATE.KV_{bus.names.instances_bucket}", config)
        await bucket.put_slot(SLOTS[2], Slot(host="b", epoch="1"), expected_revision=0, ttl_s=60)
        await until(_async(lambda: view.is_fresh and {slot.host for slot in view.slots.values()} == {"b"}))
        assert set(view.slots) == {SLOTS[2]}
