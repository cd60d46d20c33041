"""A library in NVML's place: cards as a driver describes them, with pynvml's own errors and return codes.

The cards are recorded from public reports (see docs/cases.md, MEM-1 and MEM-9): no test here ran on a GPU.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 1 << 30


@dataclass
class Card:
    """One card or instance. Reading it fails with `failure`, a return code of NVML, unless that is 0.

    `processes` compute on it: what each has, in GiB, by its process id; None where the driver does not tell.
    """

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    free_gib: float = 10
    total_gib: float = 80
    failure: int = pynvml.NVML_SUCCESS
    is_split: bool = False
    instances: tuple["Card", ...] = ()
    place: tuple[int, int] = (0, 0)
    has_mig: bool = True
    free_bytes: int | None = None
    processes: dict[int, float | None] = field(default_factory=dict)


@dataclass
class FakeNvml:
    """What `find_gpu` and its neighbours call."""

    cards: list[Card] = field(default_factory=list)
    failure: int = pynvml.NVML_SUCCESS
    NVMLError = pynvml.NVMLError
    NVMLError_NotSupported = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED).__class__

    def nvmlInit(self) -> None:  # noqa: N802  # NVML's name, as those below
        check(self.failure)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:  # noqa: N802
        card = self.cards[index]
        check(card.failure if card.failure == pynvml.NVML_ERROR_GPU_IS_LOST else 0)
        return card

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:  # noqa: N802
        for card in self.cards:
            for each in (card, *card.instances):
                if each.uuid == uuid:
                    check(each.failure if each.failure == pynvml.NVML_ERROR_GPU_IS_LOST else 0)
                    return each
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, card: Card) -> str:  # noqa: N802
        return card.uuid

    def nvmlDeviceGetName(self, card: Card) -> str:  # noqa: N802
        return card.name

    def nvmlDeviceGetMigMode(self, card: Card) -> list[int]:  # noqa: N802
        check(0 if card.has_mig else pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(card.is_split), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, index: int) -> Card:  # noqa: N802
        if index >= len(card.instances):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return card.instances[index]

    def nvmlDeviceGetGpuInstanceId(self, card: Card) -> int:  # noqa: N802
        return card.place[0]

    def nvmlDeviceGetComputeInstanceId(self, card: Card) -> int:  # noqa: N802
        return card.place[1]

    def nvmlDeviceGetUtilizationRates(self, card: Card) -> Any:  # noqa: N802
        check(pynvml.NVML_ERROR_NOT_SUPPORTED if card.uuid.startswith("MIG-") else card.failure)
        return SimpleNamespace(gpu=37, memory=12)

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> Any:  # noqa: N802
        check(card.failure)
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=None if gib is None else int(gib * GIB))
            for pid, gib in card.processes.items()
        ]

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> Any:  # noqa: N802
        check(card.failure)
        free = int(card.free_gib * GIB) if card.free_bytes is None else card.free_bytes
        return SimpleNamespace(total=int(card.total_gib * GIB), free=free, used=int(card.total_gib * GIB) - free)


def check(code: int) -> None:
    """As pynvml does after each call."""
    if code != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(code)
