"""What the driver's library (NVML) tells of GPUs. The only module that imports pynvml."""

import asyncio
import os
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec

from headrace.errors import EngineError, EngineStartError
from headrace.hardware.memory import Memory, read_host_memory

__all__ = ["Gpu", "GpuProbe", "find_gpu", "list_gpus", "process_memory", "visible_gpus"]

_INTEGRATED: Final = re.compile(r"\b(GB10|Xavier|Orin|Thor|Tegra\w*|nvgpu)\b", re.IGNORECASE)
"""Names of GPUs that have no memory but the machine's: DGX Spark and Jetson. NVML has no other sign of it."""
_OLD_MIG: Final = re.compile(r"MIG-(GPU-[0-9a-f-]+)/(\d+)/(\d+)")
"""How drivers before 470 named an instance: its card, GPU instance and compute instance."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One card, or one MIG instance, which has its card as `parent`. `number` is its card's, as nvidia-smi shows it.

    Bytes are None, and `error` says why, where the driver tells none. `is_unified`: they are the machine's memory.
    `utilisation` is the share of the last moment in which it computed, 0 to 1; None where that is not told.
    """

    uuid: str
    number: int
    name: str
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    utilisation: float | None = None
    is_unified: bool = False
    is_split: bool = False
    parent: str | None = None
    error: str = ""


class GpuProbe:
    """One GPU's memory, followed by its UUID, whatever becomes of its number.

    A lost one is an error at each read, until it is back. The machine's memory stands for it only where the GPU is one
    that has no other.
    """

    def __init__(self, nvml: Any, handle: Any, uuid: str, name: str) -> None:
        self._nvml = nvml
        self._handle = handle
        self._uuid = uuid
        self._name = name

    async def read(self) -> Memory:
        """See `MemoryProbe.read`."""
        return await asyncio.to_thread(self._read)

    def _read(self) -> Memory:
        try:
            if self._handle is None:
                self._handle = self._nvml.nvmlDeviceGetHandleByUUID(self._uuid)
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._nvml.NVMLError_NotSupported:
            return self._read_unified()
        except self._nvml.NVMLError as error:
            self._handle = None
            raise EngineError(f"the free memory of GPU {self._uuid} cannot be read: {error}") from None
        return Memory(total_bytes=memory.total, free_bytes=memory.free, source="gpu", gpu=self._uuid)

    def _read_unified(self) -> Memory:
        if not _INTEGRATED.search(self._name):
            raise EngineError(
                f"GPU {self._uuid} ({self._name}) tells no memory of its own; if it shares the machine's, "
                "the memory device is host"
            )
        memory = read_host_memory()
        if memory is None:
            raise EngineError(f"GPU {self._uuid} shares the machine's memory, which cannot be read")
        return msgspec.structs.replace(memory, gpu=self._uuid)


def find_gpu(device: str, *, nvml: Any = None, environ: Mapping[str, str] = os.environ) -> GpuProbe:
    """The GPU named by its UUID, how that begins, or its number; by a MIG instance's UUID; `gpu`, the only visible; or
    `cuda:N`, the N-th that CUDA shows a program started with this environment.

    Numbers alone are the driver's, as nvidia-smi shows them. Raises `EngineStartError` where the GPU is not there or
    not certain.
    """
    nvml = nvml if nvml is not None else _load(device)
    try:
        nvml.nvmlInit()
        cards = _cards(nvml)
        handle = _chosen(nvml, cards, device, environ)
        uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
        if not uuid.startswith("MIG-") and _is_split(nvml, handle):
            raise EngineStartError(f"GPU {uuid} is split into MIG instances; name the engine's by its UUID (MIG-…)")
    except nvml.NVMLError as error:
        raise EngineStartError(f"memory device {device}: {error}") from None
    return GpuProbe(nvml, handle, uuid, name)


def visible_gpus(*, nvml: Any = None, environ: Mapping[str, str] = os.environ) -> list[str]:
    """UUIDs of the GPUs that CUDA shows a program with this environment, in CUDA's order; none where none is visible.

    Raises `EngineStartError` where no driver tells, or the order is not certain.
    """
    nvml = nvml if nvml is not None else _load("gpu")
    try:
        nvml.nvmlInit()
        return [nvml.nvmlDeviceGetUUID(handle) for handle in _visible(nvml, _cards(nvml), environ)]
    except nvml.NVMLError as error:
        raise EngineStartError(f"the visible GPUs are not known: {error}") from None


def list_gpus(*, nvml: Any = None) -> list[Gpu]:
    """Every card by its number, each followed by its MIG instances; those that are lost say so.

    Raises `EngineStartError` where there is no driver.
    """
    nvml = nvml if nvml is not None else _load("gpu")
    try:
        nvml.nvmlInit()
        gpus = []
        for number, handle in enumerate(_cards(nvml)):
            card = _describe(nvml, handle, number)
            gpus.append(card)
            if card.is_split:
                gpus += [_describe(nvml, each, number, card.uuid) for each in _instances(nvml, handle)]
        return gpus
    except nvml.NVMLError as error:
        raise EngineStartError(f"the GPUs of this machine are not known: {error}") from None


def process_memory(pids: Collection[int], *, nvml: Any = None) -> tuple[int, float] | None:
    """Bytes that these processes have on all cards and instances together, and the least share that is free on one of
    those; None where they have none, or the driver does not tell, as inside many containers.
    """
    try:
        nvml = nvml if nvml is not None else _load("gpu")
        nvml.nvmlInit()
        cards = [card for card in _cards(nvml) if not isinstance(card, nvml.NVMLError)]
        handles = [each for card in cards for each in (_instances(nvml, card) if _is_split(nvml, card) else [card])]
        used_bytes, free_ratios = 0, []
        for handle in handles:
            running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            ours = [process.usedGpuMemory or 0 for process in running if process.pid in pids]
            if sum(ours):
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                used_bytes += sum(ours)
                free_ratios.append(memory.free / memory.total)
    except EngineStartError:
        return None
    except nvml.NVMLError:
        return None
    return (used_bytes, min(free_ratios)) if free_ratios else None


def _cards(nvml: Any) -> list[Any]:
    """A handle for each card, by its number; the error in its place where the card is lost."""
    handles: list[Any] = []
    for number in range(nvml.nvmlDeviceGetCount()):
        try:
            handles.append(nvml.nvmlDeviceGetHandleByIndex(number))
        except nvml.NVMLError as error:
            handles.append(error)
    return handles


def _chosen(nvml: Any, cards: list[Any], device: str, environ: Mapping[str, str]) -> Any:
    place = device.removeprefix("cuda:")
    if device == "gpu" or (device != place and place.isdigit()):
        visible = _visible(nvml, cards, environ)
        if device == "gpu" and len(visible) != 1:
            raise EngineStartError(f"memory device gpu: {len(visible)} are visible; name the engine's by its UUID")
        number = 0 if device == "gpu" else int(place)
        if number >= len(visible):
            raise EngineStartError(f"memory device {device}: {len(visible)} are visible")
        return visible[number]
    found = _named(nvml, cards, device)
    if len(found) != 1:
        raise EngineStartError(f"memory device {device}: {len(found)} of {len(cards)} GPUs are called that")
    if isinstance(found[0], nvml.NVMLError):
        raise EngineStartError(f"memory device {device}: {found[0]}")
    return found[0]


def _visible(nvml: Any, cards: list[Any], environ: Mapping[str, str]) -> list[Any]:
    """By `CUDA_VISIBLE_DEVICES`: numbers in CUDA's own order, UUIDs or beginnings of them, instances of both forms.

    As in the CUDA programming guide ("CUDA Environment Variables"), what stands after one that is not there is not
    visible, and without `CUDA_DEVICE_ORDER=PCI_BUS_ID` the fastest card comes first. Which that is only CUDA knows, so
    a number counts only where the cards are alike, or nothing depends on it.
    """
    there = [card for card in cards if not isinstance(card, nvml.NVMLError)]
    told = environ.get("CUDA_VISIBLE_DEVICES")
    names = (
        [str(number) for number in range(len(there))] if told is None else [name.strip() for name in told.split(",")]
    )
    is_alike = len({nvml.nvmlDeviceGetName(card) for card in there}) <= 1
    is_certain = is_alike or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if told is not None and any(name.isdigit() for name in names) and not is_certain:
        raise EngineStartError(f"CUDA_VISIBLE_DEVICES={told[:80]}: the cards are unlike; name the engine's by its UUID")
    if told is None and len(there) > 1 and not is_certain:
        names = [nvml.nvmlDeviceGetUUID(card) for card in there]
    visible: list[Any] = []
    for name in names:
        try:
            found = _named(nvml, there, name)
        except nvml.NVMLError:
            found = []
        if len(found) != 1:
            break
        visible += found
    uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in visible]
    if len(set(uuids)) != len(uuids):
        raise EngineStartError(f"CUDA_VISIBLE_DEVICES={(told or '')[:80]}: one of them is named twice")
    return visible


def _named(nvml: Any, cards: list[Any], name: str) -> list[Any]:
    if old := _OLD_MIG.fullmatch(name):
        instances = [each for card in _named(nvml, cards, old[1]) for each in _instances(nvml, card)]
        return [each for each in instances if _place(nvml, each) == (int(old[2]), int(old[3]))]
    if name.startswith("MIG-"):
        return [nvml.nvmlDeviceGetHandleByUUID(name)]
    if name.isdigit():
        return cards[int(name) : int(name) + 1]
    there = [card for card in cards if not isinstance(card, nvml.NVMLError)]
    return [card for card in there if name and nvml.nvmlDeviceGetUUID(card).startswith(name)]


def _instances(nvml: Any, card: Any) -> list[Any]:
    found = []
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(card)):
        try:
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, number))
        except nvml.NVMLError:  # numbers of instances have gaps
            continue
    return found


def _place(nvml: Any, instance: Any) -> tuple[int, int]:
    return nvml.nvmlDeviceGetGpuInstanceId(instance), nvml.nvmlDeviceGetComputeInstanceId(instance)


def _describe(nvml: Any, handle: Any, number: int, parent: str | None = None) -> Gpu:
    if isinstance(handle, nvml.NVMLError):
        return Gpu(uuid="", number=number, name="", error=str(handle))
    uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
    probe = GpuProbe(nvml, handle, uuid, name)
    known = Gpu(uuid=uuid, number=number, name=name, parent=parent)
    try:
        memory = probe._read()
    except EngineError as error:
        return msgspec.structs.replace(known, error=str(error))
    return msgspec.structs.replace(
        known,
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        used_bytes=memory.total_bytes - memory.free_bytes,
        utilisation=_utilisation(nvml, handle),
        is_unified=memory.source == "system",
        is_split=parent is None and _is_split(nvml, handle),
    )


def _utilisation(nvml: Any, handle: Any) -> float | None:
    try:
        return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except nvml.NVMLError:  # instances tell none
        return None


def _is_split(nvml: Any, gpu: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(gpu)[0])
    except nvml.NVMLError_NotSupported:
        return False


def _load(device: str) -> Any:
    try:
        import pynvml
    except ImportError:
        raise EngineStartError(f"memory device {device}: install headrace[gpu] to read a GPU's memory") from None
    return pynvml
