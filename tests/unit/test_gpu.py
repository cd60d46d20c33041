"""Whose memory a GPU's name means, with a library in NVML's place: no test here ran on a GPU."""

import asyncio
import sys
from typing import Any

import pynvml
import pytest

from headrace.errors import EngineError, EngineStartError
from headrace.hardware import gpu as gpus
from headrace.hardware.gpu import find_gpu, list_gpus, visible_gpus
from headrace.worker.memory import Memory
from tests.fake_nvml import GIB, Card, FakeNvml

LOST = pynvml.NVML_ERROR_GPU_IS_LOST
NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED


def a() -> Card:
    return Card("GPU-aa11", free_gib=10)


def b() -> Card:
    return Card("GPU-bb22", free_gib=20)


def other() -> Card:
    return Card("GPU-cc33", "Tesla T4", free_gib=5, total_gib=15, has_mig=False)


def split() -> Card:
    slices = (
        Card("MIG-5c89", free_gib=5, total_gib=10, place=(1, 0)),
        Card("MIG-77f0", free_gib=6, total_gib=20, place=(5, 0)),
    )
    return Card("GPU-dd44", free_gib=40, is_split=True, instances=slices)


def read(cards: list[Card], device: str, **environ: str) -> tuple[str | None, float]:
    memory = asyncio.run(find_gpu(device, nvml=FakeNvml(cards), environ=environ).read())
    assert memory.source == "gpu"
    return memory.gpu, memory.free_bytes / GIB


@pytest.mark.parametrize(
    ("cards", "device", "environ", "expected"),
    [
        ([a()], "gpu", {}, ("GPU-aa11", 10)),
        ([a(), b()], "1", {}, ("GPU-bb22", 20)),
        ([a(), b()], "GPU-bb", {}, ("GPU-bb22", 20)),
        ([a(), b()], "gpu", {"CUDA_VISIBLE_DEVICES": "1"}, ("GPU-bb22", 20)),
        ([a(), b()], "gpu", {"CUDA_VISIBLE_DEVICES": "GPU-bb"}, ("GPU-bb22", 20)),
        ([a(), b()], "gpu", {"CUDA_VISIBLE_DEVICES": "1,-1,0"}, ("GPU-bb22", 20)),
        ([a(), b()], "cuda:0", {"CUDA_VISIBLE_DEVICES": "1,0"}, ("GPU-bb22", 20)),
        ([a(), b()], "cuda:1", {"CUDA_VISIBLE_DEVICES": "1,0"}, ("GPU-aa11", 10)),
        ([a(), b()], "cuda:1", {}, ("GPU-bb22", 20)),
        ([a(), other()], "gpu", {"CUDA_VISIBLE_DEVICES": "GPU-cc33"}, ("GPU-cc33", 5)),
        ([other(), a()], "cuda:0", {"CUDA_VISIBLE_DEVICES": "GPU-aa11,GPU-cc33"}, ("GPU-aa11", 10)),
        ([a(), other()], "gpu", {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ("GPU-cc33", 5)),
        ([a(), other()], "1", {}, ("GPU-cc33", 5)),
    ],
)
def test_the_card_that_is_meant(
    cards: list[Card], device: str, environ: dict[str, str], expected: tuple[str, int]
) -> None:
    """MEM-2, MEM-3."""
    assert read(cards, device, **environ) == expected


@pytest.mark.parametrize(
    ("cards", "environ", "expected"),
    [
        ([a(), b()], {}, ["GPU-aa11", "GPU-bb22"]),
        ([a(), b()], {"CUDA_VISIBLE_DEVICES": ""}, []),
        ([a(), b()], {"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ([a(), b()], {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, []),
        ([a(), b()], {"CUDA_VISIBLE_DEVICES": "1,7,0"}, ["GPU-bb22"]),
        ([a(), b()], {"CUDA_VISIBLE_DEVICES": " 1 , 0 "}, ["GPU-bb22", "GPU-aa11"]),
        ([a(), b()], {"CUDA_VISIBLE_DEVICES": "GPU-"}, []),
        ([split()], {"CUDA_VISIBLE_DEVICES": "MIG-77f0"}, ["MIG-77f0"]),
        ([split()], {"CUDA_VISIBLE_DEVICES": "MIG-GPU-dd44/5/0"}, ["MIG-77f0"]),
        ([split()], {"CUDA_VISIBLE_DEVICES": "MIG-none"}, []),
        ([], {}, []),
    ],
)
def test_every_form_of_what_is_visible(cards: list[Card], environ: dict[str, str], expected: list[str]) -> None:
    """MEM-2: what stands after one that is not there is not visible; of none there is no crash."""
    assert visible_gpus(nvml=FakeNvml(cards), environ=environ) == expected


@pytest.mark.parametrize(
    ("cards", "device", "environ", "reason"),
    [
        ([], "gpu", {}, "0 are visible"),
        ([a()], "gpu", {"CUDA_VISIBLE_DEVICES": ""}, "0 are visible"),
        ([a(), b()], "gpu", {}, "2 are visible"),
        ([a(), b()], "gpu", {"CUDA_VISIBLE_DEVICES": "1,0"}, "2 are visible"),
        ([a(), b()], "cuda:2", {}, "2 are visible"),
        ([a(), b()], "cuda:0", {"CUDA_VISIBLE_DEVICES": "0,0"}, "named twice"),
        ([a(), other()], "gpu", {"CUDA_VISIBLE_DEVICES": "0"}, "the cards are unlike"),
        ([a(), b()], "GPU-", {}, "2 of 2 GPUs"),
        ([a(), b()], "7", {}, "0 of 2 GPUs"),
        ([a()], "MIG-none", {}, "Not Found"),
        ([a()], "cuda:x", {}, "0 of 1 GPUs"),
    ],
)
def test_one_that_is_not_there_or_not_certain_stops_the_start(
    cards: list[Card], device: str, environ: dict[str, str], reason: str
) -> None:
    """MEM-2: no GPU is a named refusal, and no crash."""
    with pytest.raises(EngineStartError, match=reason):
        find_gpu(device, nvml=FakeNvml(cards), environ=environ)


def test_of_a_split_card_only_an_instance_counts() -> None:
    """MEM-2: the slice's memory, not its parent's."""
    cards = [split(), b()]
    assert read(cards, "MIG-5c89") == ("MIG-5c89", 5)
    assert read(cards, "gpu", CUDA_VISIBLE_DEVICES="MIG-5c89") == ("MIG-5c89", 5)
    assert read(cards, "MIG-GPU-dd44/5/0") == ("MIG-77f0", 6)
    assert read(cards, "1") == ("GPU-bb22", 20)
    with pytest.raises(EngineStartError, match="split into MIG instances"):
        find_gpu("0", nvml=FakeNvml(cards), environ={})


def test_a_gpu_without_memory_of_its_own_has_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """MEM-1: free 8 GiB, source `system`."""
    host = Memory(total_bytes=128 * GIB, free_bytes=8 * GIB, source="system")
    monkeypatch.setattr(gpus, "read_host_memory", lambda: host)
    card = Card("GPU-ee55", "NVIDIA GB10", failure=NOT_SUPPORTED, has_mig=False)
    memory = asyncio.run(find_gpu("gpu", nvml=FakeNvml([card]), environ={}).read())
    assert (memory.free_bytes, memory.source, memory.gpu) == (8 * GIB, "system", "GPU-ee55")
    (told,) = list_gpus(nvml=FakeNvml([card]))
    assert (told.is_unified, told.free_bytes, told.used_bytes) == (True, 8 * GIB, 120 * GIB)
    monkeypatch.setattr(gpus, "read_host_memory", lambda: None)
    with pytest.raises(EngineError, match="shares the machine's memory, which cannot be read"):
        asyncio.run(find_gpu("gpu", nvml=FakeNvml([card]), environ={}).read())


@pytest.mark.parametrize(
    ("failure", "reason"),
    [(NOT_SUPPORTED, "memory device is host"), (LOST, "GPU is lost"), (pynvml.NVML_ERROR_UNKNOWN, "Unknown")],
)
def test_a_lost_card_and_one_that_tells_nothing_are_errors(failure: int, reason: str) -> None:
    """MEM-1, MEM-9: the machine's memory never stands for it."""
    card = a()
    probe = find_gpu("0", nvml=FakeNvml([card]), environ={})
    card.failure = failure
    for _ in range(2):
        with pytest.raises(EngineError, match=reason):
            asyncio.run(probe.read())
    card.failure = pynvml.NVML_SUCCESS
    assert asyncio.run(probe.read()).free_bytes == 10 * GIB, "it is back"


def test_one_lost_card_of_two_hides_nothing_of_the_other() -> None:
    """MEM-9."""
    cards = [Card("GPU-aa11", failure=LOST), b()]
    assert read(cards, "1") == ("GPU-bb22", 20)
    assert read(cards, "gpu") == ("GPU-bb22", 20)
    assert read(cards, "GPU-bb") == ("GPU-bb22", 20)
    with pytest.raises(EngineStartError, match="GPU is lost"):
        find_gpu("0", nvml=FakeNvml(cards), environ={})
    lost, well = list_gpus(nvml=FakeNvml(cards))
    assert (lost.error, lost.free_bytes) == ("GPU is lost", None)
    assert (well.free_bytes, well.utilisation, well.error) == (20 * GIB, 0.37, "")


def test_all_that_the_driver_tells_of_cards_and_instances() -> None:
    told = list_gpus(nvml=FakeNvml([b(), split()]))
    assert [(each.number, each.uuid, each.parent) for each in told] == [
        (0, "GPU-bb22", None), (1, "GPU-dd44", None), (1, "MIG-5c89", "GPU-dd44"), (1, "MIG-77f0", "GPU-dd44"),
    ]  # fmt: skip
    assert [each.is_split for each in told] == [False, True, False, False]
    assert told[2].total_bytes == 10 * GIB
    assert told[2].utilisation is None


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "Shared Library Not Found"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded"),
    ],
)
def test_without_a_driver_each_question_is_refused_by_name(code: int, reason: str) -> None:
    nvml = FakeNvml([a()], failure=code)
    questions: list[Any] = [lambda: find_gpu("gpu", nvml=nvml), lambda: list_gpus(nvml=nvml)]
    for ask in [*questions, lambda: visible_gpus(nvml=nvml)]:
        with pytest.raises(EngineStartError, match=reason):
            ask()


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(EngineStartError, match=r"install headrace\[gpu\]"):
        find_gpu("gpu")
