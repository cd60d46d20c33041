"""Heartbeats against the real server: compare-and-set, expiry, tombstones, and a view that follows them."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from headrace.bus.connection import Bus, Refused, Stored
from headrace.bus.heartbeats import WorkersBucket, WorkersView
from headrace.bus.keyvalue import Bucket
from headrace.errors import BrokerUnavailableError
from headrace.schemas.events import Owner
from headrace.schemas.workers import Heartbeat, SeenBeat, is_owner_alive

WITHIN_S = 30.0


def beat(worker: str = "w", *, epoch: str = "e", state: str = "Ready") -> Heartbeat:
    return Heartbeat(worker=worker, epoch=epoch, state=state, model="m")  # type: ignore[arg-type]


async def put(bucket: WorkersBucket, what: Heartbeat, expected: int, *, ttl_s: float = 60) -> int:
    result = await bucket.put(what, expected_revision=expected, ttl_s=ttl_s)
    assert isinstance(result, Stored)
    return result.sequence


async def expired(bucket: WorkersBucket, worker: str = "w") -> SeenBeat:
    async with asyncio.timeout(WITHIN_S):
        while (seen := await bucket.get(worker)) is None or seen.beat is not None:
            await asyncio.sleep(0.02)
    return seen


async def test_each_beat_replaces_the_one_before_by_its_revision(bus: Bus) -> None:
    bucket = WorkersBucket(bus)
    assert await bucket.get("w") is None
    assert await bucket.list() == {}
    first = await put(bucket, beat(), 0)
    second = await put(bucket, beat(state="Busy"), first)
    assert await bucket.get("w") == SeenBeat(revision=second, beat=beat(state="Busy"))
    for expected in (0, first, second + 1):
        result = await bucket.put(beat(), expected_revision=expected, ttl_s=60)
        assert isinstance(result, Refused)
        assert result.is_lost_race


async def test_a_beat_expires_into_a_marker_that_refuses_the_worker(bus: Bus) -> None:
    bucket = WorkersBucket(bus)
    mine = await put(bucket, beat(), 0, ttl_s=1)
    marker = await expired(bucket)
    assert marker.revision > mine
    assert await bucket.list() == {"w": marker}
    assert isinstance(await bucket.put(beat(), expected_revision=mine, ttl_s=60), Refused)
    back = await put(bucket, beat(epoch="e2"), marker.revision)
    assert await bucket.get("w") == SeenBeat(revision=back, beat=beat(epoch="e2"))


async def test_every_beat_carries_its_time_to_live(bus: Bus) -> None:
    """A write without one would make the key permanent."""
    bucket = WorkersBucket(bus)
    revision = await put(bucket, beat(), 0, ttl_s=1)
    for _ in range(2):
        revision = await put(bucket, beat(), revision, ttl_s=0.2)  # never less than the broker's least
    await expired(bucket)


async def test_a_tombstone_keeps_the_list_and_stops_the_worker(bus: Bus) -> None:
    bucket = WorkersBucket(bus)
    mine = await put(bucket, beat(), 0, ttl_s=1)
    seen = await bucket.get("w")
    assert seen is not None
    assert seen.beat is not None
    dead = await put(bucket, msgspec.structs.replace(seen.beat, is_tombstone=True), seen.revision)
    assert isinstance(await bucket.put(beat(), expected_revision=mine, ttl_s=60), Refused)
    now = await bucket.get("w")
    assert now is not None
    assert now.beat is not None
    assert (now.revision, now.beat.is_tombstone, now.beat.epoch) == (dead, True, "e")
    assert not is_owner_alive(Owner(worker="w", epoch="e", beat=dead), now)


async def test_one_of_many_who_declare_a_worker_dead_wins(bus: Bus) -> None:
    bucket = WorkersBucket(bus)
    revision = await put(bucket, beat(), 0)
    tombstone = msgspec.structs.replace(beat(), is_tombstone=True)
    results = await asyncio.gather(
        bucket.put(beat(state="Busy"), expected_revision=revision, ttl_s=60),
        *(bucket.put(tombstone, expected_revision=revision, ttl_s=60) for _ in range(5)),
    )
    assert sum(isinstance(result, Stored) for result in results) == 1


async def test_a_worker_that_leaves_is_gone_at_once_and_leaves_nothing_for_ever(bus: Bus) -> None:
    bucket = WorkersBucket(bus)
    revision = await put(bucket, beat(), 0)
    assert isinstance(await bucket.remove("w", expected_revision=revision - 1), Refused)
    assert isinstance(await bucket.remove("w", expected_revision=revision), Stored)
    seen = await bucket.get("w")
    assert seen is not None
    assert seen.beat is None
    reply = await bus.request(f"$JS.API.DIRECT.GET.{bucket.stream}.$KV.{bus.names.workers_bucket}.w")
    assert int((reply.headers or {})["Nats-TTL"]) <= 60


async def test_what_marks_a_worker_that_left_ends_without_a_sign_that_it_expired(bus: Bus) -> None:
    keys = Bucket(bus, bus.names.workers_bucket)
    revision = await put(WorkersBucket(bus), beat(), 0)
    await keys.remove("w", expected_revision=revision, ttl_s=1)
    async with asyncio.timeout(WITHIN_S):
        while (seen := await WorkersBucket(bus).get("w")) is not None:
            assert seen.has_left
            await asyncio.sleep(0.02)


async def until(view: WorkersView, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await view.changed.wait()
            view.changed.clear()


async def test_the_view_sees_workers_come_change_and_expire(bus: Bus) -> None:
    bucket, view = WorkersBucket(bus), WorkersView(bus)
    there = await put(bucket, beat("there"), 0)
    async with view.running():
        assert view.is_fresh
        assert set(view.beats) == {"there"}
        await put(bucket, beat("brief"), 0, ttl_s=1)
        await until(view, lambda: set(view.beats) == {"there", "brief"})
        there = await put(bucket, beat("there", state="Busy"), there)
        await until(view, lambda: view.beats["there"].state == "Busy")
        await until(view, lambda: "brief" not in view.beats)
        assert view.workers["brief"].beat is None
        dead = msgspec.structs.replace(beat("there"), is_tombstone=True)
        await put(bucket, dead, there)
        await until(view, lambda: not view.beats)
        tombstone = view.workers["there"].beat
        assert tombstone is not None
        assert tombstone.is_tombstone


async def test_the_view_never_shows_a_refused_beat(bus: Bus) -> None:
    """What is published passes everyone before the broker has judged it."""
    bucket, view = WorkersBucket(bus), WorkersView(bus)
    await put(bucket, beat(), 0)
    async with view.running():
        assert isinstance(await bucket.put(beat(epoch="zombie"), expected_revision=99, ttl_s=60), Refused)
        await put(bucket, beat("marker"), 0)
        await until(view, lambda: "marker" in view.beats)
        assert view.beats["w"].epoch == "e"


async def test_the_view_catches_up_though_every_push_is_lost(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    async def deaf(self: WorkersView, message: object) -> None:
        pass

    monkeypatch.setattr(WorkersView, "_on_push", deaf)
    view = WorkersView(bus)
    async with view.running():
        await put(WorkersBucket(bus), beat(), 0)
        await until(view, lambda: "w" in view.beats)


async def test_the_view_says_when_it_cannot_look(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    view = WorkersView(bus)
    async with view.running():
        looked = asyncio.Event()

        async def fails(self: WorkersBucket) -> dict[str, SeenBeat]:
            looked.set()
            raise BrokerUnavailableError("away")

        with monkeypatch.context() as patch:
            patch.setattr(WorkersBucket, "list", fails)
            await asyncio.wait_for(looked.wait(), WITHIN_S)
            await asyncio.sleep(0)
            assert not view.is_fresh
        async with asyncio.timeout(WITHIN_S):
            while not view.is_fresh:
                await asyncio.sleep(0.02)


async def test_a_worker_that_comes_during_a_listing_stays(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    view = WorkersView(bus)
    real = WorkersBucket.list

    async def slow(self: WorkersBucket) -> dict[str, SeenBeat]:
        listed = await real(self)
        view._take("new", SeenBeat(revision=7, beat=beat("new")))  # a push, while the answer is on its way
        return listed

    monkeypatch.setattr(WorkersBucket, "list", slow)
    await view._relist()
    assert set(view.beats) == {"new"}
