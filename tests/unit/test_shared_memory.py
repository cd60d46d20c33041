"""Two workers on one GPU: whose is what of its free memory, and what becomes of it when one dies."""

import asyncio
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import EngineError, EngineStartError
from headrace.hardware.gpu import find_gpu
from headrace.worker import capacity as capacities
from headrace.worker import sharing
from headrace.worker.capacity import KvCapacity
from headrace.worker.engines.base import EngineFacts, KvMemory
from headrace.worker.held import HeldSet
from headrace.worker.ledger import Ledger
from headrace.worker.memory import Memory, shared_by
from headrace.worker.sharing import SharedMemory
from tests.fake_nvml import Card, FakeNvml

MIB = 1 << 20


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """A faked card with 1,000 MiB free, in place of this machine's GPUs."""
    card = Card("GPU-aa11", free_bytes=1000 * MIB)
    monkeypatch.setattr(capacities, "find_gpu", lambda device: find_gpu(device, nvml=FakeNvml([card]), environ={}))
    return card


@pytest.fixture(autouse=True)
def _a_new_table_is_used_at_once(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "new_table" not in request.keywords:
        monkeypatch.setattr(sharing, "_NEW_FOR_S", 0.0)


class OnGpu:
    """An engine that allocates 1 MiB a token on the card."""

    def __init__(self, device: str = "gpu", **told: Any) -> None:
        memory = KvMemory(bytes_per_token=MIB, device=device, **{"reserve_bytes": 100 * MIB, **told})
        self.facts = EngineFacts(name="fake", kv_memory=memory)


async def on_gpu(folder: Path, **told: Any) -> tuple[Ledger, KvCapacity]:
    ledger = Ledger(capacity_tokens=None, max_concurrency=8)
    capacity = KvCapacity(ledger, HeldSet(lambda: 0), told_tokens=None, shared_folder=folder)
    await capacity.adopt(OnGpu(**told))  # type: ignore[arg-type]
    return ledger, capacity


async def measure(ledger: Ledger, capacity: KvCapacity) -> None:
    assert capacity._probe is not None
    assert ledger.measured is not None
    await capacity._measure(capacity._probe, ledger.measured)


async def test_two_workers_on_one_gpu_never_reserve_more_than_its_free_memory(card: Card, tmp_path: Path) -> None:
    one, of_one = await on_gpu(tmp_path)
    other, of_other = await on_gpu(tmp_path)
    assert (one.capacity_tokens, other.capacity_tokens) == (900, 900), "each may have what nobody has"
    assert one.reserve("a", 600)
    assert other.room().fits(600), "it has not looked since"
    assert not other.reserve("b", 600)
    assert other.num_running == 0
    assert other.reserve("c", 300)
    await measure(other, of_other)
    assert (other.capacity_tokens, other.reserved_tokens) == (300, 300)
    await measure(one, of_one)
    assert (one.capacity_tokens, one.reserved_tokens) == (600, 600)
    one.release("a")
    assert not other.claim(1), "its engine may not have given it back yet"
    await measure(one, of_one)
    assert other.claim(600)
    of_one.close()
    of_other.close()


async def test_one_that_leaves_gives_all_back(card: Card, tmp_path: Path) -> None:
    one, of_one = await on_gpu(tmp_path)
    other, of_other = await on_gpu(tmp_path)
    assert one.reserve("a", 900)
    of_one.close()
    of_one.close()
    await measure(other, of_other)
    assert other.reserve("b", 900)
    of_other.close()
    assert [path.name for path in (tmp_path / "GPU-aa11").glob("*.alive")] == []


async def test_the_whole_of_a_gpu_is_there_for_one_that_works_alone(card: Card, tmp_path: Path) -> None:
    ledger, capacity = await on_gpu(tmp_path)
    idle = [await on_gpu(tmp_path) for _ in range(2)]
    assert ledger.reserve("a", 900)
    for _, each in (*idle, (ledger, capacity)):
        each.close()


@pytest.mark.parametrize(("free", "others"), [(100, 0), (50, 0)])
async def test_a_model_that_does_not_fit_is_refused_by_name(card: Card, tmp_path: Path, free: int, others: int) -> None:
    card.free_bytes = free * MIB
    with pytest.raises(EngineStartError, match=r"does not fit: GPU-aa11 has \d+ of \d+ bytes free, 104857600 are to"):
        await on_gpu(tmp_path)
    assert SharedMemory(tmp_path / "GPU-aa11", name="x")._table.read().parts == {}


async def test_one_that_fits_once_others_requests_ended_is_not_refused(card: Card, tmp_path: Path) -> None:
    one = SharedMemory(tmp_path / "GPU-aa11", name="one")
    one.open()
    assert one.publish(one.look(), free_bytes=100 * MIB, promised_bytes=800 * MIB, allocated_bytes=800 * MIB)
    card.free_bytes = 100 * MIB
    ledger, capacity = await on_gpu(tmp_path)
    assert (ledger.capacity_tokens, ledger.claim(1)) == (0, False)
    capacity.close()
    one.close()


def test_what_others_know_too_late_is_not_told(tmp_path: Path) -> None:
    """A reading of free memory from before somebody's request allocated would count that memory twice."""
    one, other = SharedMemory(tmp_path, name="one"), SharedMemory(tmp_path, name="other")
    one.open()
    other.open()
    assert one.publish(one.look(), free_bytes=100, promised_bytes=0, allocated_bytes=0)
    seen = one.look()
    assert other.claim(60, reserved_bytes=60, reserve_bytes=0)
    assert other.publish(other.look(), free_bytes=40, promised_bytes=60, allocated_bytes=60)
    assert not one.publish(seen, free_bytes=100, promised_bytes=0, allocated_bytes=0)
    assert not one.claim(41, reserved_bytes=41, reserve_bytes=0)
    assert one.claim(40, reserved_bytes=40, reserve_bytes=0)
    one.close()
    other.close()


def test_an_engine_that_keeps_what_it_allocated_uses_it_again(tmp_path: Path) -> None:
    keeping, other = SharedMemory(tmp_path, name="keeping", is_kept=True), SharedMemory(tmp_path, name="other")
    keeping.open()
    other.open()
    assert keeping.publish(keeping.look(), free_bytes=100, promised_bytes=0, allocated_bytes=0)
    assert keeping.claim(60, reserved_bytes=60, reserve_bytes=0)
    assert keeping.publish(keeping.look(), free_bytes=40, promised_bytes=60, allocated_bytes=60)
    assert keeping.publish(keeping.look(), free_bytes=40, promised_bytes=0, allocated_bytes=0)
    assert other.claim(40, reserved_bytes=40, reserve_bytes=0)
    assert keeping.claim(60, reserved_bytes=60, reserve_bytes=0), "its own"
    assert not keeping.claim(1, reserved_bytes=61, reserve_bytes=0)
    keeping.close()
    other.close()


def test_what_a_dead_worker_had_is_free_after_a_while(tmp_path: Path) -> None:
    now = [100.0]
    dead = SharedMemory(tmp_path, name="dead", clock=lambda: now[0])
    dead.open()
    assert dead.publish(dead.look(), free_bytes=100, promised_bytes=0, allocated_bytes=0)
    assert dead.claim(100, reserved_bytes=100, reserve_bytes=0)
    assert dead._table._lock is not None
    assert dead._table._alive is not None
    os.close(dead._table._lock)
    os.close(dead._table._alive)  # as the kernel does
    other = SharedMemory(tmp_path, name="other", clock=lambda: now[0])
    other.open()
    for now[0] in (101.0, 105.9):
        assert other.publish(other.look(), free_bytes=100, promised_bytes=0, allocated_bytes=0)
        assert not other.claim(1, reserved_bytes=1, reserve_bytes=0)
    now[0] = 106.0
    assert other.publish(other.look(), free_bytes=100, promised_bytes=0, allocated_bytes=0)
    assert other.claim(100, reserved_bytes=100, reserve_bytes=0)
    other.close()


def test_while_another_keeps_the_table_locked_nobody_promises(tmp_path: Path) -> None:
    one, stuck = SharedMemory(tmp_path, name="one"), SharedMemory(tmp_path, name="stuck")
    one.open()
    stuck.open()
    with stuck._table.locked(within_s=1), pytest.raises(EngineError, match=r"keeps .* locked"):
        one.claim(1, reserved_bytes=1, reserve_bytes=0)
    assert one.publish(one.look(), free_bytes=100, promised_bytes=0, allocated_bytes=0)
    assert one.claim(1, reserved_bytes=1, reserve_bytes=0)
    one.close()
    stuck.close()


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineStartError, match="file"):
        SharedMemory(tmp_path / "file", name="one").open()


class Two:
    """Workers of one folder, of 100 bytes of which each has promised 30 and neither has allocated any."""

    def __init__(self, folder: Path) -> None:
        self.now = 100.0
        self.folder = folder
        self.one, self.other = self.worker("one"), self.worker("other")
        for each in (self.one, self.other):
            each.open()
        self.now += 1
        self.publish(self.one, 0)
        for each in (self.one, self.other):
            assert each.claim(30, reserved_bytes=30, reserve_bytes=0)

    def worker(self, name: str) -> SharedMemory:
        return SharedMemory(self.folder, name=name, clock=lambda: self.now)

    def publish(self, worker: SharedMemory, promised_bytes: int = 30) -> None:
        assert worker.publish(worker.look(), free_bytes=100, promised_bytes=promised_bytes, allocated_bytes=0)

    def claim(self, worker: SharedMemory, need_bytes: int = 1) -> bool:
        return worker.claim(need_bytes, reserved_bytes=30 + need_bytes, reserve_bytes=0)

    def close(self) -> None:
        self.one.close()
        self.other.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    workers = Two(tmp_path / "GPU-aa11")
    yield workers
    workers.close()


@pytest.mark.new_table
def test_a_new_table_promises_nothing_for_a_moment(tmp_path: Path) -> None:
    now = [100.0]
    one = SharedMemory(tmp_path, name="one", clock=lambda: now[0])
    one.open()
    for now[0], is_ours in ((100.0, False), (100.9, False), (101.0, True), (50.0, True)):
        assert one.publish(one.look(), free_bytes=100, promised_bytes=0, allocated_bytes=0)
        assert one.claim(1, reserved_bytes=1, reserve_bytes=0) == is_ours
    one.close()


@pytest.mark.new_table
@pytest.mark.parametrize("left", [None, b"", b"{", b'{"version":1,"unpromised_bytes":100,"parts":{"on'])
def test_a_table_that_is_lost_or_torn_promises_nothing_until_all_are_in_it_again(
    two: Two, left: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    (two.folder / "table.json").unlink()
    if left is not None:
        (two.folder / "table.json").write_bytes(left)
    assert not two.claim(two.one)
    assert len(caplog.records) == (left is not None), "said once"
    two.now += 60
    two.publish(two.one)
    assert not two.claim(two.one), "the other lives, and nobody knows what it promised"
    two.publish(two.other)
    assert not two.claim(two.one, 41)
    assert two.claim(two.one, 40)
    assert not two.claim(two.other)


@pytest.mark.new_table
def test_what_a_dead_worker_had_is_not_promised_where_the_table_is_lost(two: Two) -> None:
    (two.folder / "table.json").unlink()
    for descriptor in (two.other._table._lock, two.other._table._alive):
        assert descriptor is not None
        os.close(descriptor)  # as the kernel does
    two.other._table._lock = two.other._table._alive = None
    for seconds, is_ours in ((2.0, False), (4.9, False), (0.1, True)):
        two.now += seconds
        two.publish(two.one)
        assert two.claim(two.one) == is_ours


@pytest.mark.new_table
def test_workers_whose_folder_is_removed_put_it_back_before_anybody_is_promised_anything(
    two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(two.folder)
    third = two.worker("third")
    third.open()
    two.publish(third, 0)
    assert not two.claim(third), "who was there before may not have noticed yet"
    two.now += 0.9
    assert not two.claim(two.other)
    assert "removed under running workers" in caplog.text
    two.publish(two.one)
    two.now += 5
    two.publish(third, 0)
    assert not two.claim(third), "one of them has not told its part"
    two.publish(two.other)
    two.publish(third, 0)
    assert not two.claim(third, 41)
    assert two.claim(third, 40)
    assert sorted(path.suffix for path in two.folder.glob("*.alive")) == [".alive"] * 3
    third.close()


def test_a_lock_that_is_removed_locks_nobody_out_and_nobody_in(two: Two) -> None:
    (two.folder / "lock").unlink()
    with two.one._table.locked(within_s=1):
        with pytest.raises(EngineError, match=r"keeps .* locked"):
            two.claim(two.other)
        third = two.worker("third")
        third._table.open()
        with pytest.raises(EngineError, match=r"keeps .* locked"), third._table.locked(within_s=0.01):
            pass
        third._table.leave()
    assert two.claim(two.other)


def test_who_cannot_put_its_file_back_keeps_nobody_locked_out(two: Two) -> None:
    own = two.one._table._file_of(two.one._table.member)
    own.unlink()
    own.mkdir()
    with pytest.raises(EngineError, match="cannot be used"):
        two.claim(two.one)
    with two.other._table.locked(within_s=0):
        pass
    own.rmdir()


def test_a_worker_without_its_file_puts_it_back_and_is_not_taken_for_dead(two: Two) -> None:
    for path in two.folder.glob("one-*.alive"):
        path.unlink()
    two.publish(two.other)
    two.now += 4.9
    two.publish(two.one)
    two.now += 4.9
    two.publish(two.other)
    assert not two.claim(two.other, 41)
    assert two.claim(two.other, 40)


@pytest.mark.parametrize(
    "text", ['{"a":' + "[" * 100_000, '{"parts":{"a\\u0000b":{}}}', '{"parts":{"../x":{}}}', " " * (2 << 20)]
)
def test_a_table_of_somebody_elses_is_refused_with_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / "table.json").write_text(text)
    with pytest.raises(EngineStartError, match=r"table\.json cannot be read: .*remove it"):
        SharedMemory(tmp_path, name="one").open()


def test_a_table_that_is_no_file_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "table.json")
    with pytest.raises(EngineStartError, match="it is no file of ours"):
        SharedMemory(tmp_path, name="one").open()


def test_a_gpu_that_has_the_machines_memory_shares_it_with_the_machine(tmp_path: Path) -> None:
    of_card = Memory(total_bytes=1, free_bytes=1, source="gpu", gpu="GPU-aa11")
    unified = Memory(total_bytes=1, free_bytes=1, source="system", gpu="GPU-ee55")
    host = Memory(total_bytes=1, free_bytes=1, source="system")
    assert shared_by(tmp_path, of_card) == tmp_path / "GPU-aa11"
    assert shared_by(tmp_path, unified) == shared_by(tmp_path, host) != tmp_path / "GPU-aa11"


def claim_all(folder: Path, number: int, results: Any) -> None:
    shared = SharedMemory(folder, name=f"w{number}")
    shared.open()
    won = 0
    for _ in range(100):
        while True:
            try:
                won += shared.claim(7, reserved_bytes=0, reserve_bytes=0)
                break
            except EngineError:  # somebody had the lock all the while
                continue
    results.put(won)
    results.close()
    results.join_thread()
    shared.close()


def test_processes_that_race_are_given_each_byte_once(tmp_path: Path) -> None:
    first = SharedMemory(tmp_path, name="first")
    first.open()
    assert first.publish(first.look(), free_bytes=7 * 150 + 3, promised_bytes=0, allocated_bytes=0)
    spawned = multiprocessing.get_context("spawn")
    results = spawned.Queue()
    racers = [spawned.Process(target=claim_all, args=(tmp_path, number, results)) for number in range(2)]
    for racer in racers:
        racer.start()
    won = [results.get(timeout=40) for _ in racers]
    for racer in racers:
        racer.join(20)
    results.close()
    assert sum(won) == 150
    assert first._table.read().unpromised_bytes == 3
    first.close()


async def test_a_lost_gpu_lets_nobody_start_while_the_other_serves(card: Card, tmp_path: Path) -> None:
    """MEM-9: its credit is 0, and that is told once."""
    ledger, capacity = await on_gpu(tmp_path)
    card.failure = 15  # NVML_ERROR_GPU_IS_LOST
    changed = asyncio.Event()
    following = asyncio.create_task(capacity.follow(is_up=lambda: True, changed=changed.set))
    async with asyncio.timeout(10):
        await changed.wait()
    assert (ledger.capacity_tokens, capacity.as_beat()["kv_capacity_tokens"]) == (0, 0)
    following.cancel()
    capacity.close()
