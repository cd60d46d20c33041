"""Whose word a worker's capacity is, and what a measured one does when memory cannot be read."""

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from headrace.discipline.capacity import MeasuredCapacity, bytes_per_token, capacity_tokens
from headrace.discipline.placement import Placement, place, view_of
from headrace.discipline.room import Room
from headrace.schemas.workers import Heartbeat
from headrace.worker.capacity import KvCapacity, make_probe
from headrace.worker.engines.base import EngineFacts, EngineUsage, KvMemory
from headrace.worker.held import HeldSet
from headrace.worker.ledger import Ledger
from headrace.worker.memory import HostProbe

MIB = 1 << 20


class Told:
    """An engine that only tells."""

    def __init__(self, **facts: Any) -> None:
        self.facts = EngineFacts(name="told", **facts)
        self.free_bytes: int | None = 100 * MIB

    async def usage(self) -> EngineUsage:
        return EngineUsage(memory_free_bytes=self.free_bytes, memory_total_bytes=200 * MIB)


def capacity_of(ledger: Ledger, *, told_tokens: int | None = None) -> KvCapacity:
    return KvCapacity(ledger, HeldSet(lambda: 0), told_tokens=told_tokens)


@pytest.mark.parametrize(
    ("factors", "expected"), [((30, 3, 64, 2), 23_040), ((32, 8, 128, 2), 131_072), ((80, 8, 128, 1), 163_840)]
)
def test_bytes_of_a_token(factors: tuple[int, int, int, int], expected: int) -> None:
    """SmolLM2-135M, Llama-3-8B, and Llama-3-70B with an eight-bit cache."""
    layers, kv_heads, head_dim, dtype_bytes = factors
    assert expected == bytes_per_token(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype_bytes=dtype_bytes)


@pytest.mark.parametrize(
    ("free", "reserve", "allocated", "block", "expected"),
    [
        (1000, 0, 0, 1, 100),
        (1000, 95, 0, 1, 90),
        (1000, 0, 7, 16, 96),
        (50, 100, 0, 1, 0),
        (50, 100, 33, 1, 28),
        (50, 100, 33, 16, 16),
        (9, 0, 0, 1, 0),
    ],
)
def test_what_free_memory_carries(free: int, reserve: int, allocated: int, block: int, expected: int) -> None:
    assert expected == capacity_tokens(
        free_bytes=free, reserve_bytes=reserve, bytes_per_token=10, allocated_tokens=allocated, block_size=block
    )


def test_two_of_three_run_and_the_third_once_memory_is_seen_free() -> None:
    """MEM-4, by free memory: 1,000 tokens, three requests of 400."""
    ledger = Ledger(capacity_tokens=None, max_concurrency=8)
    measured = ledger.measured = MeasuredCapacity(bytes_per_token=10, reserve_bytes=0)
    measured.note(10_000, num_running=0, allocated_tokens=0, now_s=0.0)
    ledger.reserve("a", 400)
    ledger.reserve("b", 400)
    assert not ledger.room().fits(400)
    measured.note(4_000, num_running=2, allocated_tokens=600, now_s=0.5)
    ledger.release("a")
    assert not ledger.room().fits(400), "it may not have given it back yet"
    measured.note(7_000, num_running=1, allocated_tokens=300, now_s=0.6)
    assert ledger.room().fits(400)
    assert not ledger.room().fits(601)


def test_a_ledger_whose_memory_others_took_lets_nobody_in_and_keeps_what_runs() -> None:
    ledger = Ledger(capacity_tokens=None, max_concurrency=8)
    measured = ledger.measured = MeasuredCapacity(bytes_per_token=10, reserve_bytes=0)
    measured.note(10_000, num_running=0, allocated_tokens=0, now_s=0.0)
    ledger.reserve("a", 800)
    measured.note(1_000, num_running=1, allocated_tokens=100, now_s=0.5)
    assert (ledger.capacity_tokens, ledger.reserved_tokens, ledger.num_running) == (200, 800, 1)
    assert not ledger.room().fits(1)
    assert not ledger.room().could_ever_fit(300)
    assert ledger.room().may_yet_fit(1000)
    assert not ledger.room().may_yet_fit(1001)


def test_more_memory_counts_once_it_has_been_there_for_a_while() -> None:
    measured = MeasuredCapacity(bytes_per_token=10, reserve_bytes=0)
    seen = []
    for now_s, tokens in ((0.0, 600), (0.5, 1000), (1.0, 1000), (1.5, 700), (2.0, 1000), (2.6, 1000), (4.0, 1000)):
        measured.note(tokens * 10, num_running=0, allocated_tokens=0, now_s=now_s)
        seen.append(measured.tokens)
    assert seen == [600, 600, 600, 600, 600, 700, 1000]
    assert measured.peak_tokens == 1000


def test_what_an_engine_keeps_of_requests_that_no_measurement_saw_is_its_own() -> None:
    measured = MeasuredCapacity(bytes_per_token=10, reserve_bytes=0, is_kept=True)
    measured.note(10_000, num_running=0, allocated_tokens=0, now_s=0.0)
    for number in range(1, 5):
        measured.release(300)
        measured.note(10_000 - 2_500, num_running=0, allocated_tokens=0, now_s=float(number))
        assert measured.tokens == 1000
    measured.note(10_000 - 2_500 - 4_000, num_running=0, allocated_tokens=0, now_s=5.0)
    assert measured.tokens == 600, "this somebody else took"


def test_an_engine_told_to_keep_what_it_gives_back_is_not_counted_twice() -> None:
    measured = MeasuredCapacity(bytes_per_token=10, reserve_bytes=0, is_kept=True)
    measured.note(10_000, num_running=0, allocated_tokens=0, now_s=0.0)
    measured.note(3_000, num_running=1, allocated_tokens=700, now_s=1.0)
    measured.release(700)
    for now_s in (2.0, 5.0, 8.0):
        measured.note(10_000, num_running=0, allocated_tokens=0, now_s=now_s)
        assert measured.tokens == 1000


@pytest.mark.parametrize(
    ("told", "facts", "source", "tokens"),
    [
        (None, {}, None, None),
        (None, {"kv_capacity_tokens": 500}, "engine", 500),
        (300, {"kv_capacity_tokens": 500}, "told", 300),
        (None, {"kv_capacity_tokens": 300, "is_capacity_told": True}, "told", 300),
        (None, {"kv_memory": KvMemory(bytes_per_token=MIB, device="engine")}, "memory", 80),
        (None, {"kv_memory": KvMemory(bytes_per_token=MIB, device="engine", reserve_bytes=0)}, "memory", 100),
        (None, {"kv_memory": KvMemory(bytes_per_token=MIB, device="engine"), "block_size": 64}, "memory", 64),
        (None, {"kv_memory": KvMemory(bytes_per_token=MIB, device="engine"), "kv_capacity_tokens": 9}, "engine", 9),
        (7, {"kv_memory": KvMemory(bytes_per_token=MIB, device="engine")}, "told", 7),
    ],
)
async def test_whose_word_it_is(
    told: int | None, facts: dict[str, Any], source: str | None, tokens: int | None
) -> None:
    ledger = Ledger(capacity_tokens=told, max_concurrency=1)
    capacity = capacity_of(ledger, told_tokens=told)
    await capacity.adopt(Told(**facts))  # type: ignore[arg-type]
    beat = capacity.as_beat()
    assert (beat["kv_capacity_source"], ledger.capacity_tokens, beat["kv_capacity_tokens"]) == (
        source, tokens, tokens or 0,
    )  # fmt: skip
    assert (beat["memory_source"] == "told") == (source == "memory")
    assert (beat["kv_capacity_peak_tokens"] is None) == (source != "memory")


async def test_while_memory_cannot_be_read_nobody_starts(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(capacity_tokens=None, max_concurrency=2)
    capacity = capacity_of(ledger)
    engine = Told(kv_memory=KvMemory(bytes_per_token=MIB, device="engine", reserve_bytes=0))
    await capacity.adopt(engine)  # type: ignore[arg-type]
    changed = asyncio.Event()
    engine.free_bytes = None
    following = asyncio.create_task(capacity.follow(is_up=lambda: True, changed=changed.set))
    try:
        async with asyncio.timeout(10):
            await changed.wait()
        assert (ledger.capacity_tokens, capacity.as_beat()["kv_capacity_peak_tokens"]) == (0, 100)
        assert ["does not tell its free memory" in message for message in caplog.messages].count(True) == 1
        changed.clear()
        engine.free_bytes = 100 * MIB
        async with asyncio.timeout(10):
            await changed.wait()
        assert ledger.capacity_tokens == 100
    finally:
        following.cancel()


async def test_memory_that_does_not_come_back_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(capacity_tokens=None, max_concurrency=2)
    capacity = capacity_of(ledger)
    engine = Told(kv_memory=KvMemory(bytes_per_token=MIB, device="engine", reserve_bytes=0))
    await capacity.adopt(engine)  # type: ignore[arg-type]
    engine.free_bytes = 10 * MIB
    is_told = asyncio.Event()

    class Telling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "keeps_memory" in record.getMessage():
                is_told.set()

    caplog.set_level(logging.WARNING, logger="headrace.worker.capacity")  # others may have configured it away
    logger, handler = logging.getLogger("headrace.worker.capacity"), Telling()
    logger.addHandler(handler)
    following = asyncio.create_task(capacity.follow(is_up=lambda: True, changed=lambda: None))
    try:
        async with asyncio.timeout(10):
            await is_told.wait()
    finally:
        following.cancel()
        logger.removeHandler(handler)


def test_the_machine_is_a_device_too() -> None:
    probe = make_probe("host", Told())  # type: ignore[arg-type]
    assert isinstance(probe, HostProbe)
    memory = asyncio.run(probe.read())
    assert memory.source == "system"
    assert 0 < memory.free_bytes <= memory.total_bytes


def beat(**figures: Any) -> Heartbeat:
    return Heartbeat(worker="w", epoch="e", state="Ready", model="m", **figures)


@pytest.mark.parametrize(
    ("figures", "capacity", "peak"),
    [
        ({}, None, None),
        ({"kv_capacity_tokens": 100}, 100, 100),
        ({"kv_capacity_tokens": 0, "kv_capacity_source": "memory", "kv_capacity_peak_tokens": 900}, 0, 900),
        ({"kv_capacity_tokens": 0, "kv_capacity_source": "memory", "kv_capacity_peak_tokens": 0}, 0, 0),
    ],
)
def test_a_capacity_of_nothing_is_told_from_one_that_is_not_known(
    figures: dict[str, Any], capacity: int | None, peak: int | None
) -> None:
    read = msgspec.json.decode(msgspec.json.encode(beat(**figures)), type=Heartbeat)
    assert (read.capacity_tokens, read.peak_tokens) == (capacity, peak)


@pytest.mark.parametrize(
    ("own_peak", "other_peak", "where"),
    [(900, 0, Placement.HOLD), (100, 900, Placement.HOLD), (100, 100, Placement.NEVER)],
)
def test_what_fitted_once_is_kept_and_not_refused(own_peak: int, other_peak: int, where: Placement) -> None:
    own = Room(capacity_tokens=100, peak_tokens=own_peak)
    other = view_of(beat(kv_capacity_tokens=0, kv_capacity_source="memory", kv_capacity_peak_tokens=other_peak))
    assert place(500, own, [other], num_delivered=1, held_s=60.0) == (where, None)


def test_a_request_is_handed_to_a_worker_whose_memory_is_free_now() -> None:
    own = Room(capacity_tokens=100, peak_tokens=900)
    other = view_of(beat(kv_capacity_tokens=800, kv_capacity_source="memory", kv_capacity_peak_tokens=900))
    assert place(500, own, [other], num_delivered=1) == (Placement.HAND_BACK, "w")
