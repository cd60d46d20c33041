"""Several workers on one GPU, in any interleaving: together they never promise more than is free.

Also where somebody removes or tears the files by which they know of one another.
"""

import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.discipline.capacity import MeasuredCapacity
from headrace.worker.capacity import KvCapacity, Looked
from headrace.worker.ledger import Ledger
from headrace.worker.memory import Memory, shared_by
from headrace.worker.sharing import SharedMemory

FREE_BYTES = 100
WORKERS = st.integers(0, 1)
TORN = st.sampled_from([None, b"", b"{", b'{"version":7,"unpromised_bytes":100,"parts":{"w-'])
"""What is left of a table.json."""


class Request:
    """One in an engine. `real` bytes are allocated; `execution` is what its worker was told so far."""

    def __init__(self, need: int) -> None:
        self.need = need
        self.real = 0
        self.is_alive = True
        claimed = SimpleNamespace(request=SimpleNamespace(n=1), num_prompt_tokens=0)
        self.execution = SimpleNamespace(claimed=claimed, num_tokens=0, has_read_prompt=False)


class Worker:
    """The real ledger, capacity and table of one worker; a made-up engine, which may keep what requests allocated."""

    def __init__(self, folder: Path, *, is_kept: bool, clock: Any) -> None:
        self.held: list[Any] = []
        self.requests: list[Request] = []
        self.kept = 0
        self.is_kept = is_kept
        self.ledger = Ledger(capacity_tokens=None, max_concurrency=8)
        self.measured = MeasuredCapacity(bytes_per_token=1, reserve_bytes=0, is_kept=is_kept)
        held: Any = self.held
        self.capacity = KvCapacity(self.ledger, held, told_tokens=None, clock=clock)
        memory = Memory(total_bytes=FREE_BYTES, free_bytes=FREE_BYTES, source="gpu", gpu="GPU-aa11")
        self.shared = SharedMemory(shared_by(folder, memory), name="w", is_kept=is_kept, clock=clock)
        self.shared.open()
        self.capacity._shared = self.shared
        self.ledger.measured, self.ledger.claim = self.measured, self.capacity._claim
        self.died_at = 0.0
        self.looked: Looked | None = None
        self.memory: Memory | None = None

    @property
    def real(self) -> int:
        """Bytes its engine has."""
        in_use = sum(request.real for request in self.requests)
        self.kept = max(self.kept, in_use) if self.is_kept else 0
        return max(in_use, self.kept)

    @property
    def outstanding(self) -> int:
        """Bytes its engine may still take for what runs."""
        alive = [request for request in self.requests if request.is_alive]
        if self.is_kept:
            return max(0, sum(request.need for request in alive) - self.real)
        return sum(request.need - request.real for request in alive)


class SharedGpu(RuleBasedStateMachine):
    """A card of 100 bytes, two workers."""

    @initialize(kept=st.lists(st.booleans(), min_size=2, max_size=2))
    def start(self, kept: list[bool]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.now = 0.0
        self.workers = [self.new_worker(is_kept=is_kept) for is_kept in kept]
        self.dead: list[Worker] = []
        self.is_somebody_unknown = False
        self.now = 1.0  # a new table promises nothing before
        self.all_measure()

    def new_worker(self, *, is_kept: bool) -> Worker:
        return Worker(Path(self.folder.name), is_kept=is_kept, clock=lambda: self.now)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            for worker in self.workers:
                worker.shared.close()
            self.folder.cleanup()

    @property
    def free(self) -> int:
        return FREE_BYTES - sum(worker.real for worker in (*self.workers, *self.dead))

    def one(self, worker: Worker, index: int) -> Request | None:
        return worker.requests[index % len(worker.requests)] if worker.requests else None

    @rule(number=WORKERS, need=st.integers(1, 70))
    def admit(self, number: int, need: int) -> None:
        """By the table alone: what the worker itself believes of its room, which is right mostly, is not asked."""
        worker = self.workers[number]
        if need > 0 and worker.capacity._claim(need):
            request = Request(need)
            worker.ledger._needs[request] = need
            worker.requests.append(request)
            worker.held.append(request)

    @rule(number=WORKERS)
    def admit_all_that_is_unpromised(self, number: int) -> None:
        table = self.workers[number].shared._table
        with table.locked(within_s=1):
            unpromised_bytes = table.read().unpromised_bytes
        self.admit(number, unpromised_bytes or 0)

    @rule(number=WORKERS, need=st.integers(20, 70))
    def run_to_the_last_token(self, number: int, need: int) -> None:
        """Admitted, all of it allocated, all of it told, and the table knows."""
        self.admit(number, need)
        self.allocate(number, -1, need)
        self.hear(number, -1, 0)
        self.measure(number)

    @rule(number=WORKERS)
    def all_go_to_their_last_token(self, number: int) -> None:
        for index in range(len(self.workers[number].requests)):
            self.allocate(number, index, FREE_BYTES)
            self.hear(number, index, 0)
        self.measure(number)

    @rule(number=WORKERS)
    def look_and_read(self, number: int) -> None:
        """A measurement begins; whatever comes before its end was not seen by it."""
        self.look(number)
        self.read(number)

    @rule(number=WORKERS, index=st.integers(0, 7), more=st.integers(1, 70))
    def allocate(self, number: int, index: int, more: int) -> None:
        request = self.one(self.workers[number], index)
        if request is not None and request.is_alive:
            request.real = min(request.need, request.real + more)

    @rule(number=WORKERS, index=st.integers(0, 7), lag=st.integers(0, 5))
    def hear(self, number: int, index: int, lag: int) -> None:
        request = self.one(self.workers[number], index)
        if request is not None and request.is_alive and request.real > lag:
            told = request.execution
            told.has_read_prompt = True
            told.num_tokens = max(told.num_tokens, request.real - lag)

    @rule(number=WORKERS, index=st.integers(0, 7), frees=st.booleans())
    def end_in_engine(self, number: int, index: int, frees: bool) -> None:
        """An engine that keeps memory has it for others at once; any other may give it back late."""
        worker = self.workers[number]
        request = self.one(worker, index)
        assert worker.real >= 0
        if request is not None:
            request.is_alive = False
            request.real = 0 if frees or worker.is_kept else request.real

    @rule(number=WORKERS, index=st.integers(0, 7))
    def notice_end(self, number: int, index: int) -> None:
        worker = self.workers[number]
        request = self.one(worker, index)
        if request is not None and not request.is_alive and request in worker.held:
            worker.held.remove(request)
            worker.ledger.release(request)

    @rule(number=WORKERS, index=st.integers(0, 7))
    def free_late(self, number: int, index: int) -> None:
        worker = self.workers[number]
        request = self.one(worker, index)
        assert worker.real >= 0
        if request is not None and not request.is_alive:
            request.real = 0
            if request not in worker.held:
                worker.requests.remove(request)

    @rule(number=WORKERS)
    def look(self, number: int) -> None:
        worker = self.workers[number]
        worker.looked, worker.memory = worker.capacity.look(worker.measured), None

    @rule(number=WORKERS)
    def read(self, number: int) -> None:
        worker = self.workers[number]
        if worker.looked is not None:
            worker.memory = Memory(total_bytes=FREE_BYTES, free_bytes=self.free, source="gpu", gpu="GPU-aa11")

    @rule(number=WORKERS)
    def note(self, number: int) -> None:
        worker = self.workers[number]
        if worker.looked is not None and worker.memory is not None:
            worker.capacity.note(worker.measured, worker.looked, worker.memory)
            worker.looked = worker.memory = None

    @rule(number=WORKERS)
    def measure(self, number: int) -> None:
        self.look(number)
        self.read(number)
        self.note(number)

    @rule()
    def all_measure(self) -> None:
        for number in range(len(self.workers)):
            self.measure(number)
        self.is_somebody_unknown = False

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.5, 5.0]))
    def wait(self, seconds: float) -> None:
        """An engine notices within five seconds that its worker is dead. Workers look twice a second, which matters
        only to one whose own file is gone.
        """
        if self.is_somebody_unknown:
            self.all_measure()
        self.now += seconds
        self.dead = [worker for worker in self.dead if self.now - worker.died_at < 5.0]

    @rule(number=WORKERS, is_kept=st.booleans())
    def crash(self, number: int, is_kept: bool) -> None:
        """The kernel closes what the process had open. Its engine goes on until it notices."""
        if self.is_somebody_unknown:
            self.all_measure()
        worker = self.workers[number]
        assert worker.shared._table._lock is not None
        assert worker.shared._table._alive is not None
        os.close(worker.shared._table._lock)
        os.close(worker.shared._table._alive)
        worker.died_at = self.now
        self.dead.append(worker)
        self.workers[number] = self.new_worker(is_kept=is_kept)

    @rule(number=WORKERS)
    def leave(self, number: int) -> None:
        worker = self.workers[number]
        worker.shared.close()
        self.workers[number] = self.new_worker(is_kept=worker.is_kept)

    @rule(left=TORN)
    def lose_the_table(self, left: bytes | None) -> None:
        table = self.shared_folder / "table.json"
        table.unlink(missing_ok=True)
        if left is not None and self.shared_folder.exists():
            table.write_bytes(left)

    @rule(number=WORKERS, left=TORN)
    def lose_the_table_while_the_other_stands_still(self, number: int, left: bytes | None) -> None:
        """A process that is stopped tells nothing for seconds, and its engine goes on."""
        self.all_measure()
        self.lose_the_table(left)
        self.measure(number)
        self.wait(1.0)
        self.measure(number)
        self.admit_all_that_is_unpromised(number)

    @rule()
    def lose_the_lock(self) -> None:
        (self.shared_folder / "lock").unlink(missing_ok=True)

    @rule(number=WORKERS)
    def lose_a_workers_file(self, number: int) -> None:
        shared = self.workers[number].shared
        shared._table._file_of(shared._table.member).unlink(missing_ok=True)
        self.is_somebody_unknown = True

    @precondition(lambda self: not self.dead)
    @rule()
    def lose_everything(self) -> None:
        """What a worker had that died less than five seconds ago would be forgotten too soon."""
        shutil.rmtree(self.shared_folder, ignore_errors=True)
        self.is_somebody_unknown = True

    @precondition(lambda self: not self.dead)
    @rule(number=WORKERS)
    def lose_everything_and_be_first(self, number: int) -> None:
        self.lose_everything()
        self.measure(number)
        self.admit_all_that_is_unpromised(number)

    @property
    def shared_folder(self) -> Path:
        return Path(self.folder.name) / "GPU-aa11"

    @invariant()
    def never_more_is_promised_than_is_free(self) -> None:
        if hasattr(self, "workers"):
            outstanding = sum(worker.outstanding for worker in (*self.workers, *self.dead))
            assert outstanding <= self.free
            assert self.free >= 0


TestSharedGpu = SharedGpu.TestCase
TestSharedGpu.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
