"""What an agent makes of a worker: what it says, how it ends, when it is started again."""

import asyncio
from types import TracebackType
from typing import Self, cast

import pytest

from headrace.host.launching import Order
from headrace.host.lease import Lease
from headrace.host.planning import MAX_FAILURES, Claim
from headrace.host.replica import Replica
from headrace.schemas.instances import GroupName, SlotName
from headrace.schemas.replicas import ReplicaGroup
from headrace.schemas.workers import Heartbeat, WorkerHealth, WorkerState

GROUP = ReplicaGroup(engine="sim", memory_mib=1)
SLOT = SlotName(GroupName("m", "default"), GROUP.generation, 0)


class FakeLease:
    is_held = True


class Child:
    """Ends when told to, with the code that it is given."""

    def __init__(self, words: str) -> None:
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.is_stopped = False
        self._words = words

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.is_stopped = True

    async def wait(self) -> int:
        return await asyncio.shield(self.code)

    def tail(self) -> str:
        return self._words


class Scene:
    """A replica, the clock it reads, and the children it started."""

    def __init__(self) -> None:
        self.now = 100.0
        self.is_online = True
        self.error: Exception | None = None
        self.words = "line\nheadrace: no such file\n\n"
        self.children: list[Child] = []
        self.replica = Replica(
            Claim(SLOT, GROUP, "GPU-a", 1),
            cast(Lease, FakeLease()),
            host="h",
            epoch="e",
            launch=self._launch,
            changed=lambda: None,
            is_online=lambda: self.is_online,
            clock=lambda: self.now,
        )

    def _launch(self, order: Order) -> Child:
        if self.error is not None:
            raise self.error
        self.children.append(Child(self.words))
        return self.children[-1]

    async def start(self, group: asyncio.TaskGroup) -> Child:
        """Start a worker once its pause is over."""
        self.now += 60
        assert self.replica.as_holding().may_start
        before = len(self.children)
        self.replica.start(f"w{before}", group)
        while len(self.children) == before:
            await asyncio.sleep(0)
        return self.children[-1]

    def hear(self, state: WorkerState | None, reason: str = "") -> None:
        beat = Heartbeat(worker="w", epoch="e", state=state, model="m", reason=reason) if state is not None else None
        self.replica.look(beat, is_fresh=True)

    async def end(self, code: int) -> None:
        self.children[-1].code.set_result(code)
        await self.replica.ended.wait()


async def test_a_worker_that_does_not_come_up_is_counted_and_waited_for_longer_each_time() -> None:
    scene = Scene()
    pauses = []
    async with asyncio.TaskGroup() as group:
        for number in (1, 2, 3):
            await scene.start(group)
            await scene.end(1)
            slot = scene.replica.as_slot()
            assert (slot.state, slot.reason, slot.failures) == ("Failed", "no such file", number)
            since = scene.now
            while not scene.replica.as_holding().may_start:
                scene.now += 0.25
            pauses.append(scene.now - since)
    assert pauses == [0.5, 1.0, 2.0]


async def test_one_that_was_ready_for_long_fails_for_a_new_reason() -> None:
    scene = Scene()
    async with asyncio.TaskGroup() as group:
        await scene.start(group)
        await scene.end(-9)
        scene.words = ""
        await scene.start(group)
        scene.hear("Ready")
        assert scene.replica.failures == 1
        scene.now += 11
        scene.hear("Busy")
        assert (scene.replica.state, scene.replica.failures) == ("Ready", 0)
        await scene.end(-9)
    assert scene.replica.reason == "it ended with exit code -9"


async def test_one_that_somebody_told_to_drain_is_started_again_at_once() -> None:
    scene = Scene()
    async with asyncio.TaskGroup() as group:
        await scene.start(group)
        scene.hear("Ready")
        scene.hear("Draining")
        assert scene.replica.state == "Starting"
        await scene.end(0)
    assert (scene.replica.state, scene.replica.failures) == ("Claimed", 0)


async def test_an_end_without_a_reason_before_it_was_ready_is_a_failure() -> None:
    scene = Scene()
    async with asyncio.TaskGroup() as group:
        await scene.start(group)
        await scene.end(0)
    assert (scene.replica.state, scene.replica.failures) == ("Failed", 1)


async def test_an_engine_that_fails_before_it_was_ready_ends_the_try_with_its_words() -> None:
    scene = Scene()
    async with asyncio.TaskGroup() as group:
        child = await scene.start(group)
        scene.hear("Failed", "the probe got no token")
        await scene.replica.ended.wait()
    assert child.is_stopped
    assert (scene.replica.reason, scene.replica.failures) == ("the probe got no token", 1)


async def test_an_engine_that_fails_later_has_half_a_minute_to_come_back() -> None:
    scene = Scene()
    async with asyncio.TaskGroup() as group:
        await scene.start(group)
        scene.hear("Ready")
        scene.hear("Failed", "lost")
        scene.now += 29
        scene.hear("Failed", "lost")
        assert (scene.replica.state, scene.replica.failures) == ("Failed", 0)
        scene.hear("Ready")
        assert scene.replica.state == "Ready"
        scene.hear(None)
        scene.now += 31
        assert scene.replica.state == "Ready", "a heartbeat that is late takes nothing"
        scene.hear(None)
        await scene.replica.ended.wait()
    assert (scene.replica.state, scene.replica.reason) == ("Failed", "its heartbeat is gone")


async def test_while_the_broker_is_away_no_failure_is_counted() -> None:
    scene = Scene()
    scene.is_online = False
    async with asyncio.TaskGroup() as group:
        await scene.start(group)
        await scene.end(1)
    assert (scene.replica.state, scene.replica.failures) == ("Failed", 0)


async def test_what_drains_is_not_started_again_and_says_nothing_else() -> None:
    scene = Scene()
    async with asyncio.TaskGroup() as group:
        await scene.start(group)
        scene.hear("Ready")
        scene.replica.drain()
        scene.hear("Failed", "lost")
        await scene.replica.ended.wait()
    holding = scene.replica.as_holding()
    assert (holding.state, holding.has_child, holding.failures) == ("Draining", False, 0)


@pytest.mark.parametrize("error", [OSError("Argument list too long"), ValueError("embedded null byte")])
async def test_what_cannot_be_started_fails_like_what_does_not_come_up(error: Exception) -> None:
    scene = Scene()
    scene.error = error
    async with asyncio.TaskGroup() as group:
        scene.replica.start("w", group)
        await scene.replica.ended.wait()
    assert (scene.replica.reason, scene.replica.failures) == (f"it cannot be started: {error}", 1)


async def test_one_that_is_coming_up_and_says_nothing_is_started_anew() -> None:
    scene = Scene()
    async with asyncio.TaskGroup() as group:
        child = await scene.start(group)
        scene.now += 50
        scene.hear("Starting")
        for _ in range(3):
            scene.now += 50
            scene.replica.look(None, is_fresh=False)
        scene.now += 59
        scene.hear(None)
        assert scene.replica.state == "Starting"
        scene.now += 2
        scene.hear(None)
        await scene.replica.ended.wait()
    assert child.is_stopped
    assert (scene.replica.state, scene.replica.failures) == ("Failed", 1)
    assert scene.replica.reason == "it said nothing for 60 s"


async def test_an_engine_that_loads_for_minutes_has_as_long_to_come_back() -> None:
    scene = Scene()
    async with asyncio.TaskGroup() as group:
        await scene.start(group)
        for _ in range(4):
            scene.now += 50
            scene.hear("Starting")
        scene.hear("Ready")
        scene.hear("Failed", "lost")
        scene.now += 225
        scene.hear("Failed", "lost")
        assert scene.replica.failures == 0
        scene.now += 6
        scene.hear("Failed", "lost")
        await scene.replica.ended.wait()
    assert (scene.replica.reason, scene.replica.failures) == ("lost", 1)


async def test_a_worker_that_was_left_out_is_left_to_other_hosts() -> None:
    scene = Scene()
    async with asyncio.TaskGroup() as group:
        child = await scene.start(group)
        scene.hear("Ready")
        left_out = Heartbeat(
            worker="w", epoch="e", state="Failed", model="m", reason="errs", health=WorkerHealth(is_left_out=True)
        )
        scene.replica.look(left_out, is_fresh=True)
        await scene.replica.ended.wait()
    assert child.is_stopped
    assert (scene.replica.reason, scene.replica.failures) == ("errs", MAX_FAILURES)
