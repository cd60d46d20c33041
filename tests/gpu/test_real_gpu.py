"""What `headrace.hardware.gpu` says against a real card, and against memory taken for the purpose: `make check-gpu`."""

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import EngineStartError
from headrace.hardware.gpu import Gpu, find_gpu, list_gpus, visible_gpus

MIB = 1 << 20
STEP_BYTES = 512 * MIB
SLACK_BYTES = 64 * MIB
"""How far two readings a moment apart may differ while nobody else uses the card."""

pytestmark = pytest.mark.gpu


def cards() -> list[Gpu]:
    try:
        return [each for each in list_gpus() if not each.error]
    except EngineStartError as error:
        pytest.skip(f"no GPU to compare with: {error}")


@pytest.fixture
def card() -> Gpu:
    """The first card that CUDA shows and that is not split."""
    there = {each.uuid: each for each in cards()}
    visible = [uuid for uuid in visible_gpus() if not there[uuid].is_split]
    if not visible:
        pytest.skip("no GPU to compare with: none is visible to CUDA")
    return there[visible[0]]


class Taker:
    """A child that takes memory, and what CUDA tells it."""

    def __init__(self, child: "subprocess.Popen[str]") -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        self._in, self._out = child.stdin, child.stdout
        self.uuid = self._out.readline().strip()
        self.free_bytes, self.total_bytes = map(int, self._out.readline().split())

    def take(self) -> None:
        print(file=self._in, flush=True)
        self.free_bytes, self.total_bytes = map(int, self._out.readline().split())


@pytest.fixture
def taker(card: Gpu) -> Iterator[Taker]:
    program = Path(__file__).with_name("allocate.py")
    argv = [sys.executable, str(program), "0", str(STEP_BYTES)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield Taker(child)
        finally:
            child.kill()


def free_bytes(device: str) -> int:
    return asyncio.run(find_gpu(device).read()).free_bytes


def test_the_first_that_cuda_shows_is_the_one_cuda_computes_on(card: Gpu, taker: Taker) -> None:
    """MEM-3, on a real card."""
    assert card.uuid.removeprefix("GPU-").removeprefix("MIG-") == taker.uuid
    assert asyncio.run(find_gpu("cuda:0").read()).gpu in (card.uuid, None)


def test_memory_that_is_taken_is_missing_and_comes_back(card: Gpu, taker: Taker) -> None:
    before = free_bytes(card.uuid)
    for number in range(1, 4):
        taker.take()
        now = free_bytes(card.uuid)
        assert abs(before - now - number * STEP_BYTES) <= SLACK_BYTES
        assert abs(now - taker.free_bytes) <= SLACK_BYTES, "CUDA's own word"


def test_what_is_told_is_what_the_drivers_own_tool_tells(card: Gpu) -> None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        pytest.skip("no nvidia-smi to compare with")
    query = "--query-gpu=uuid,name,memory.total,memory.free"
    lines = subprocess.run(
        [tool, query, "--format=csv,noheader,nounits"], check=True, capture_output=True, text=True, timeout=30
    ).stdout.splitlines()
    told = {line.split(", ")[0]: line.split(", ")[1:] for line in lines}
    for each in cards():
        if each.parent is None and not each.is_unified:
            name, total, free = told[each.uuid]
            assert each.name == name
            assert each.total_bytes is not None
            assert each.free_bytes is not None
            assert abs(each.total_bytes - int(total) * MIB) <= MIB
            assert abs(each.free_bytes - int(free) * MIB) <= SLACK_BYTES
