"""A lease against a bucket that may not answer, forget, or give it to another."""

from typing import cast

import pytest

from headrace.bus.connection import Refused, Stored, StoreResult, Unknown
from headrace.bus.instances import InstancesBucket
from headrace.errors import BrokerUnavailableError
from headrace.host.lease import DOUBT_S, Lease
from headrace.schemas.instances import GroupName, Slot, SlotName

NAME = SlotName(GroupName("m", "default"), "0" * 8, 0)
OURS = Slot(host="h", epoch="e")
READY = Slot(host="h", epoch="e", state="Ready")
THEIRS = Slot(host="z", epoch="f")
LOST_RACE = 10071


class FakeBucket:
    """One key by compare-and-set. `is_mute`: it does what is asked, and says nothing; `is_away`: neither."""

    def __init__(self) -> None:
        self.revision = 0
        self.value: Slot | None = None
        self.is_mute = self.is_away = False
        self.num_writes = 0

    def write(self, value: Slot | None) -> None:
        self.revision += 1
        self.value = value

    async def slot(self, name: SlotName) -> tuple[int, Slot | None]:
        if self.is_away:
            raise BrokerUnavailableError("away")
        return self.revision, self.value

    async def put_slot(
        self, name: SlotName, slot: Slot, *, expected_revision: int, ttl_s: float, timeout_s: float | None = None
    ) -> StoreResult:
        return self._store(slot, expected_revision)

    async def remove_slot(self, name: SlotName, *, expected_revision: int) -> StoreResult:
        return self._store(None, expected_revision)

    def _store(self, value: Slot | None, expected_revision: int) -> StoreResult:
        if self.is_away:
            return Unknown("away")
        if expected_revision != self.revision:
            return Refused(LOST_RACE, "wrong last sequence")
        self.num_writes += 1
        self.write(value)
        return Unknown("mute") if self.is_mute else Stored(self.revision)


class Scene:
    """A lease of four seconds, its bucket and its clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.bucket = FakeBucket()
        bucket = cast(InstancesBucket, self.bucket)
        self.lease = Lease(bucket, NAME, ttl_s=4, timeout_s=1, clock=lambda: self.now)

    async def renew(self, slot: Slot = OURS) -> None:
        self.now += 1
        await self.lease.renew(slot, every_s=0.9)


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_only_a_free_slot_is_taken(scene: Scene) -> None:
    scene.bucket.write(THEIRS)
    assert not await scene.lease.claim(OURS)
    assert scene.bucket.value == THEIRS
    scene.bucket.write(None)
    assert await scene.lease.claim(OURS)
    assert scene.lease.is_held


async def test_what_changed_is_written_at_once_and_what_did_not_when_it_is_time(scene: Scene) -> None:
    await scene.lease.claim(OURS)
    await scene.lease.renew(OURS, every_s=0.9)
    assert scene.bucket.num_writes == 1
    await scene.lease.renew(READY, every_s=0.9)
    assert (scene.bucket.num_writes, scene.bucket.value) == (2, READY)
    await scene.renew(READY)
    assert scene.bucket.num_writes == 3


async def test_a_renewal_whose_answer_was_lost_is_found_by_the_next(scene: Scene) -> None:
    await scene.lease.claim(OURS)
    scene.bucket.is_mute = True
    await scene.renew()
    scene.bucket.is_mute = False
    await scene.renew(READY)
    assert scene.lease.is_held
    assert scene.bucket.value == READY


async def test_one_that_expired_while_the_broker_was_away_is_taken_again(scene: Scene) -> None:
    await scene.lease.claim(OURS)
    scene.bucket.is_away = True
    for _ in range(10):
        await scene.renew()
    assert scene.lease.is_held
    scene.bucket.is_away = False
    scene.bucket.write(None)
    await scene.renew()
    assert scene.lease.is_held
    assert scene.bucket.value == OURS


async def test_one_that_another_has_is_lost_for_good(scene: Scene) -> None:
    await scene.lease.claim(OURS)
    scene.bucket.write(THEIRS)
    await scene.renew()
    assert not scene.lease.is_held
    scene.bucket.write(None)
    await scene.renew()
    await scene.lease.release()
    assert scene.bucket.value is None
    assert not scene.lease.is_held


async def test_one_that_could_not_be_renewed_for_a_minute_is_lost_for_good(scene: Scene) -> None:
    await scene.lease.claim(OURS)
    scene.bucket.is_away = True
    while scene.now < 100 + DOUBT_S:
        assert scene.lease.is_held
        await scene.renew()
    assert not scene.lease.is_held
    scene.bucket.is_away = False
    await scene.renew()
    assert not scene.lease.is_held


async def test_release_takes_away_what_is_ours_alone(scene: Scene) -> None:
    await scene.lease.claim(OURS)
    await scene.lease.release()
    assert scene.bucket.value is None
    assert await scene.lease.claim(OURS)
    scene.bucket.write(THEIRS)
    await scene.lease.release()
    assert scene.bucket.value == THEIRS
