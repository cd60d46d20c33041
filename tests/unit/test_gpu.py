"""Whose memory a GPU's name means, with a library in NVML's place: no test here ran on a GPU."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import EngineError, EngineStartError
from headrace.worker.gpu import find_gpu

GIB = 1 << 30


class Error(Exception):
    """NVML's root of errors."""


class NotSupportedError(Error):
    """What the device does not have."""


class FakeNvml:
    """Cards as (UUID, name, free GiB); `split` is the UUID of one in MIG mode, `instances` are those of it."""

    NVMLError = Error
    NVMLError_NotSupported = NotSupportedError

    def __init__(self, *cards: tuple[str, str, int], split: str = "", instances: tuple[str, ...] = ()) -> None:
        self.cards = cards
        self.split = split
        self.instances = instances
        self.failure: Exception | None = None

    def nvmlInit(self) -> None:  # noqa: N802  # NVML's name, as those below
        if self.failure is not None:
            raise self.failure

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:  # noqa: N802
        if uuid not in self.instances:
            raise Error("Not Found")
        return (uuid, "instance", 5)

    def nvmlDeviceGetUUID(self, card: Any) -> str:  # noqa: N802
        return str(card[0])

    def nvmlDeviceGetName(self, card: Any) -> str:  # noqa: N802
        return str(card[1])

    def nvmlDeviceGetMigMode(self, card: Any) -> list[int]:  # noqa: N802
        if not self.split:
            raise NotSupportedError("Not Supported")
        return [int(card[0] == self.split), 0]

    def nvmlDeviceGetMemoryInfo(self, card: Any) -> Any:  # noqa: N802
        if self.failure is not None:
            raise self.failure
        return SimpleNamespace(total=80 * GIB, free=card[2] * GIB)


A, B = ("GPU-aa11", "H100", 10), ("GPU-bb22", "H100", 20)
OTHER = ("GPU-cc33", "T4", 30)


def read(nvml: FakeNvml, device: str, **environ: str) -> tuple[str | None, int]:
    memory = asyncio.run(find_gpu(device, nvml=nvml, environ=environ).read())
    assert memory.source == "gpu"
    return memory.gpu, memory.free_bytes // GIB


@pytest.mark.parametrize(
    ("cards", "device", "environ", "expected"),
    [
        ((A,), "gpu", {}, ("GPU-aa11", 10)),
        ((A, B), "1", {}, ("GPU-bb22", 20)),
        ((A, B), "GPU-bb", {}, ("GPU-bb22", 20)),
        ((A, B), "gpu", {"CUDA_VISIBLE_DEVICES": "1"}, ("GPU-bb22", 20)),
        ((A, OTHER), "gpu", {"CUDA_VISIBLE_DEVICES": "GPU-cc33"}, ("GPU-cc33", 30)),
        ((A, OTHER), "gpu", {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ("GPU-cc33", 30)),
        ((A, OTHER), "1", {}, ("GPU-cc33", 30)),
    ],
)
def test_the_card_that_is_meant(
    cards: tuple[Any, ...], device: str, environ: dict[str, str], expected: tuple[str, int]
) -> None:
    """MEM-2, MEM-3."""
    assert read(FakeNvml(*cards), device, **environ) == expected


@pytest.mark.parametrize(
    ("cards", "device", "environ", "reason"),
    [
        ((), "gpu", {}, "0 are visible"),
        ((A,), "gpu", {"CUDA_VISIBLE_DEVICES": ""}, "0 are visible"),
        ((A, B), "gpu", {}, "2 are visible"),
        ((A, B), "gpu", {"CUDA_VISIBLE_DEVICES": "1,0"}, "2 are visible"),
        ((A, OTHER), "gpu", {"CUDA_VISIBLE_DEVICES": "0"}, "the cards are unlike"),
        ((A, B), "GPU-", {}, "2 of 2 GPUs"),
        ((A, B), "7", {}, "0 of 2 GPUs"),
        ((A,), "MIG-none", {}, "Not Found"),
    ],
)
def test_one_that_is_not_there_or_not_certain_stops_the_start(
    cards: tuple[Any, ...], device: str, environ: dict[str, str], reason: str
) -> None:
    with pytest.raises(EngineStartError, match=reason):
        find_gpu(device, nvml=FakeNvml(*cards), environ=environ)


def test_of_a_split_card_only_an_instance_counts() -> None:
    """MEM-2: the slice's memory, not its parent's."""
    nvml = FakeNvml(A, B, split="GPU-aa11", instances=("MIG-x",))
    assert read(nvml, "MIG-x") == ("MIG-x", 5)
    assert read(nvml, "gpu", CUDA_VISIBLE_DEVICES="MIG-x") == ("MIG-x", 5)
    assert read(nvml, "1") == ("GPU-bb22", 20)
    with pytest.raises(EngineStartError, match="split into MIG instances"):
        find_gpu("0", nvml=nvml, environ={})


@pytest.mark.parametrize(
    ("failure", "reason"), [(NotSupportedError("no"), "memory device is host"), (Error("GPU is lost"), "GPU is lost")]
)
def test_a_lost_card_and_one_without_memory_of_its_own_are_errors(failure: Exception, reason: str) -> None:
    """MEM-1, MEM-9: the machine's memory never stands for it."""
    nvml = FakeNvml(A)
    probe = find_gpu("0", nvml=nvml, environ={})
    nvml.failure = failure
    with pytest.raises(EngineError, match=reason):
        asyncio.run(probe.read())
    with pytest.raises(EngineStartError, match="memory device 0"):
        find_gpu("0", nvml=nvml, environ={})
