"""Which beats a claim waits for: those that may not list its message yet, and no others."""

import asyncio

from headrace.bus.connection import Refused, Stored, StoreResult, Unknown
from headrace.schemas.workers import Heartbeat, SeenBeat
from headrace.worker.heart import Heart

BEAT = Heartbeat(worker="w", epoch="e", state="Ready", model="m")


class Bucket:
    """Takes beats and answers when told to."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[StoreResult] = asyncio.Queue()
        self.put_began = asyncio.Event()
        self.seen: SeenBeat | None = None
        self.removed: list[int] = []

    async def get(self, worker: str) -> SeenBeat | None:
        return self.seen

    async def remove(self, worker: str, *, expected_revision: int) -> StoreResult:
        self.removed.append(expected_revision)
        is_it = self.seen is None or self.seen.revision == expected_revision
        return Stored(expected_revision + 1) if is_it else Refused(10071, "wrong last sequence")

    async def put(self, beat: Heartbeat, **_: object) -> StoreResult:
        self.put_began.set()
        return await self.answers.get()


class Numbered:
    """Composes beats under rising numbers, as the worker does whenever something changed."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> tuple[int, Heartbeat]:
        return self.number, BEAT


def heart_on(bucket: Bucket, compose: Numbered) -> Heart:
    async def lost() -> None:
        raise AssertionError

    return Heart(
        bucket,  # type: ignore[arg-type]
        "w",
        interval_s=60,
        ttl_s=60,
        compose=compose,
        new_epoch=lambda: "e",
        on_lost=lost,
    )


async def test_a_claim_waits_for_a_beat_composed_before_its_message_was_listed() -> None:
    bucket, compose = Bucket(), Numbered()
    heart = heart_on(bucket, compose)
    async with asyncio.timeout(5):
        beating = asyncio.create_task(heart.register())
        await bucket.put_began.wait()
        waiting = asyncio.create_task(heart.settled(1))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        bucket.answers.put_nowait(Stored(7))
        await asyncio.gather(beating, waiting)
    assert heart.revision == 7


async def test_a_claim_does_not_wait_for_a_beat_that_lists_its_message() -> None:
    bucket, compose = Bucket(), Numbered()
    heart = heart_on(bucket, compose)
    async with asyncio.timeout(5):
        compose.number = 3
        beating = asyncio.create_task(heart.register())
        await bucket.put_began.wait()
        assert heart.is_settled(3)
        await heart.settled(3)
        assert not heart.is_settled(4)
        bucket.answers.put_nowait(Stored(1))
        await beating
    assert heart.is_settled(4)


async def test_a_beat_without_an_answer_stays_open_until_a_later_one_is_stored() -> None:
    bucket, compose = Bucket(), Numbered()
    heart = heart_on(bucket, compose)
    async with asyncio.timeout(5):
        bucket.answers.put_nowait(Stored(1))
        await heart.register()
        running = asyncio.create_task(heart.run())
        bucket.put_began.clear()
        compose.number = 5
        heart.changed()
        await bucket.put_began.wait()
        bucket.answers.put_nowait(Unknown("no answer"))
        bucket.put_began.clear()
        compose.number = 6
        heart.changed()
        await bucket.put_began.wait()
        assert not heart.is_settled(6), "the fifth may be stored yet"
        bucket.answers.put_nowait(Stored(2))
        await heart.settled(6)
        running.cancel()


async def test_a_worker_that_leaves_takes_a_beat_along_whose_answer_it_did_not_wait_for() -> None:
    bucket = Bucket()
    heart = heart_on(bucket, Numbered())
    bucket.answers.put_nowait(Stored(1))
    await heart.register()
    bucket.seen = SeenBeat(revision=2, beat=BEAT)
    await heart.leave()
    assert bucket.removed == [1, 2]


async def test_a_worker_that_leaves_leaves_anothers_key_alone() -> None:
    bucket = Bucket()
    heart = heart_on(bucket, Numbered())
    bucket.answers.put_nowait(Stored(1))
    await heart.register()
    bucket.seen = SeenBeat(revision=2, beat=Heartbeat(worker="w", epoch="another", state="Ready", model="m"))
    await heart.leave()
    assert bucket.removed == [1]
