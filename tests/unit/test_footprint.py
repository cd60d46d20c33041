"""What an engine's processes have of memory, by /proc and the driver, and a leak on a GPU."""

import subprocess
import sys

import pynvml
import pytest

from headrace.errors import EngineError
from headrace.hardware.gpu import process_memory
from headrace.worker.engines.base import MemoryUse
from headrace.worker.engines.sim import SimEngine
from headrace.worker.engines.sim_script import SimOptions
from headrace.worker.footprint import anonymous_bytes, memory_of
from headrace.worker.held import HeldSet
from headrace.worker.memorywatch import MemoryWatch
from headrace.worker.wellbeing import Wellbeing
from tests.fake_nvml import GIB, Card, FakeNvml

MIB = 1 << 20
NO_DRIVER = FakeNvml(failure=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
HOLDING = """
import subprocess, sys
code = "held = bytearray(b'x' * (64 << 20)); print('held', flush=True); input()"
child = subprocess.Popen([sys.executable, "-c", code])
child.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_tree_of_processes_is_counted_whole() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert anonymous_bytes(process.pid) < 64 * MIB  # it is its child that has them
        uses = memory_of(process.pid, nvml=NO_DRIVER)
        process.communicate("\n", timeout=20)
    assert [use.kind for use in uses] == ["memory"]
    assert uses[0].used_bytes > 64 * MIB
    assert uses[0].free_ratio is not None
    assert 0 < uses[0].free_ratio < 1
    assert anonymous_bytes(process.pid) == 0  # it is gone
    assert memory_of(process.pid, nvml=NO_DRIVER) == ()


def test_processes_are_found_on_cards_and_instances() -> None:
    instance = Card("MIG-1", total_gib=10, free_gib=1, processes={7: 4.0})
    split = Card("GPU-a", is_split=True, instances=(instance,), processes={7: 4.0})
    card = Card("GPU-b", total_gib=80, free_gib=40, processes={7: 20.0, 8: 2.0, 9: 16.0})
    lost = Card("GPU-c", failure=pynvml.NVML_ERROR_GPU_IS_LOST)
    assert process_memory([7, 8], nvml=FakeNvml([split, card, lost])) == (26 * GIB, 0.1)
    assert process_memory([8], nvml=FakeNvml([split, card])) == (2 * GIB, 0.5)
    assert process_memory([10], nvml=FakeNvml([split, card])) is None
    untold = Card("GPU-d", processes={7: None})
    assert process_memory([7], nvml=FakeNvml([untold])) is None
    assert process_memory([7], nvml=NO_DRIVER) is None


class OnGpu(SimEngine):
    """An engine whose process is known to the driver."""

    def __init__(self, card: Card) -> None:
        super().__init__("m", SimOptions())
        self.nvml = FakeNvml([card])

    async def memory_use(self) -> tuple[MemoryUse, ...]:
        found = process_memory([7], nvml=self.nvml)
        if found is None:
            raise EngineError("the driver tells nothing")
        return (MemoryUse(kind="GPU memory", used_bytes=found[0], free_ratio=found[1]),)


async def test_a_leak_on_a_gpu_is_seen_and_what_ends_with_the_engine_is_forgotten() -> None:
    card = Card("GPU-a", total_gib=80, free_gib=40, processes={7: 20.0})
    engine, wellbeing, now = OnGpu(card), Wellbeing(), 0.0
    watch = MemoryWatch(engine, held=HeldSet(lambda: 0), wellbeing=wellbeing, clock=lambda: now)

    async def grow(gib: float) -> str:
        nonlocal now
        now += 30
        used = card.processes[7]
        assert used is not None
        card.processes[7] = used + gib
        return await watch.look()

    assert [await grow(1) for _ in range(8)] == [""] * 7 + ["GPU memory grows: 21.00 → 28.00 GiB in 4 min while idle"]
    wellbeing.start_anew(1)
    card.processes[7] = 20.0
    assert [await grow(1) for _ in range(7)] == [""] * 7
    card.failure = pynvml.NVML_ERROR_GPU_IS_LOST
    assert await grow(1) == ""  # nothing is known, so nothing is said
    card.failure = pynvml.NVML_SUCCESS
    assert await grow(0) == "GPU memory grows: 21.00 → 28.00 GiB in 4 min while idle"
