"""What this machine lends to workers: each GPU, and a budget of its own memory."""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Final

from headrace.errors import EngineStartError
from headrace.hardware.gpu import Gpu, list_gpus, visible_gpus
from headrace.hardware.memory import Memory, read_host_memory
from headrace.schemas.instances import Device

__all__ = ["HOST_DEVICE", "find_devices"]

log = logging.getLogger(__name__)

HOST_DEVICE: Final = "host"
"""Name of the machine's own memory as a device."""

_MIB: Final = 1 << 20
_RESERVE_BYTES: Final = 2 << 30
_RESERVE_SHARE: Final = 4
"""The system keeps 2 GiB, or a quarter of a machine that has less than 8."""


def find_devices(
    memory_bytes: int | None,
    *,
    gpus: Callable[[], list[Gpu]] = list_gpus,
    visible: Callable[[], list[str]] = visible_gpus,
    memory: Callable[[], Memory | None] = read_host_memory,
    environ: Mapping[str, str] = os.environ,
) -> tuple[Device, ...]:
    """The GPUs, MIG instances in place of their card, and the machine's memory: `memory_bytes` of it, or all but a
    reserve. Where `CUDA_VISIBLE_DEVICES` is set, only the GPUs that it shows.

    A GPU without memory of its own counts with the machine's, of which without `memory_bytes` nothing else is lent:
    no byte counts twice. No driver is no GPU. Raises EngineStartError where it is not certain which GPUs are shown.
    """
    found = _gpus(gpus)
    if found and "CUDA_VISIBLE_DEVICES" in environ:
        shown = visible()
        found = [gpu for gpu in found if gpu.uuid in shown]
    devices = [Device(name=gpu.uuid, kind="gpu", total_bytes=gpu.total_bytes or 0) for gpu in found]
    total = memory()
    if memory_bytes is None:
        is_lent_as_gpu = any(gpu.is_unified for gpu in found)
        total_bytes = 0 if total is None or is_lent_as_gpu else total.total_bytes
        memory_bytes = total_bytes - min(_RESERVE_BYTES, total_bytes // _RESERVE_SHARE)
    elif total is not None and memory_bytes > total.total_bytes:
        log.warning("%d MiB are lent of a machine that has %d MiB", memory_bytes // _MIB, total.total_bytes // _MIB)
    if memory_bytes:
        devices.append(Device(name=HOST_DEVICE, kind="host", total_bytes=memory_bytes))
    return tuple(devices)


def _gpus(gpus: Callable[[], list[Gpu]]) -> list[Gpu]:
    try:
        found = gpus()
    except EngineStartError as error:
        log.info("no GPU: %s", error)
        return []
    usable = []
    for gpu in found:
        if gpu.error:
            log.warning("GPU %s is left out: %s", gpu.uuid or gpu.number, gpu.error)
        elif not gpu.is_split:
            usable.append(gpu)
    return usable
