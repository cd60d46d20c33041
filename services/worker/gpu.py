"""A GPU's free memory, as the driver's library (NVML) tells it. The only module that imports pynvml."""

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from headrace.errors import EngineError, EngineStartError
from headrace.worker.memory import Memory

__all__ = ["GpuProbe", "find_gpu"]


class GpuProbe:
    """One GPU, or one MIG instance. A lost one is an error at each read; the machine's memory never stands for it."""

    def __init__(self, nvml: Any, handle: Any, uuid: str) -> None:
        self._nvml = nvml
        self._handle = handle
        self._uuid = uuid

    async def read(self) -> Memory:
        """See `MemoryProbe.read`."""
        try:
            memory = await asyncio.to_thread(self._nvml.nvmlDeviceGetMemoryInfo, self._handle)
        except self._nvml.NVMLError_NotSupported:
            raise EngineError(
                f"GPU {self._uuid} tells no memory of its own; if it shares the machine's, the memory device is host"
            ) from None
        except self._nvml.NVMLError as error:
            raise EngineError(f"the free memory of GPU {self._uuid} cannot be read: {error}") from None
        return Memory(total_bytes=memory.total, free_bytes=memory.free, source="gpu", gpu=self._uuid)


def find_gpu(device: str, *, nvml: Any = None, environ: Mapping[str, str] = os.environ) -> GpuProbe:
    """The GPU named by its UUID, how that begins, or its number; by a MIG instance's UUID; or `gpu`, the only visible.

    Numbers are the driver's, as nvidia-smi shows them. `CUDA_VISIBLE_DEVICES` says which are visible; CUDA may count in
    another order, so a number in it counts only where the cards are alike or `CUDA_DEVICE_ORDER` is `PCI_BUS_ID`.
    Raises `EngineStartError` where the GPU is not there or not certain.
    """
    nvml = nvml if nvml is not None else _load(device)
    try:
        nvml.nvmlInit()
        gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        names = _visible(nvml, gpus, environ) if device == "gpu" else [device]
        if len(names) != 1:
            raise EngineStartError(f"memory device gpu: {len(names)} are visible; name the engine's by its UUID")
        found = _named(nvml, gpus, names[0])
        if len(found) != 1:
            raise EngineStartError(f"memory device {names[0]}: {len(found)} of {len(gpus)} GPUs are called that")
        uuid = nvml.nvmlDeviceGetUUID(found[0])
        if not uuid.startswith("MIG-") and _is_split(nvml, found[0]):
            raise EngineStartError(f"GPU {uuid} is split into MIG instances; name the engine's by its UUID (MIG-…)")
    except nvml.NVMLError as error:
        raise EngineStartError(f"memory device {device}: {error}") from None
    return GpuProbe(nvml, found[0], uuid)


def _visible(nvml: Any, gpus: list[Any], environ: Mapping[str, str]) -> list[str]:
    told = environ.get("CUDA_VISIBLE_DEVICES")
    if told is None:
        return [str(index) for index in range(len(gpus))]
    names = [name.strip() for name in told.split(",") if name.strip() and name.strip() != "-1"]
    is_alike = len({nvml.nvmlDeviceGetName(gpu) for gpu in gpus}) <= 1
    if any(name.isdigit() for name in names) and not is_alike and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise EngineStartError(f"CUDA_VISIBLE_DEVICES={told}: the cards are unlike; name the engine's by its UUID")
    return names


def _named(nvml: Any, gpus: list[Any], name: str) -> list[Any]:
    if name.startswith("MIG-"):
        return [nvml.nvmlDeviceGetHandleByUUID(name)]
    if name.isdigit():
        return gpus[int(name) : int(name) + 1]
    return [gpu for gpu in gpus if nvml.nvmlDeviceGetUUID(gpu).startswith(name)]


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
