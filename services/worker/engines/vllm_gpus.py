"""The GPUs that one vLLM server will compute on: whether it fits before it starts, and its shares while it runs."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from headrace.errors import EngineError, EngineStartError
from headrace.hardware.gpu import find_gpu, visible_gpus
from headrace.worker.allotment import Allotment
from headrace.worker.engines.vllm_demand import ANYWAY, Demand, require_fit
from headrace.worker.memory import Memory, shared_by

__all__ = ["VllmGpus"]

log = logging.getLogger(__name__)

_WITHIN_S: Final = 10.0
_ADVICE: Final = f"set --gpu-memory-utilization so that all fit ({ANYWAY})"


class VllmGpus:
    """Held from before the start of a server until after its end. `shared_folder` None: nobody else is there."""

    def __init__(self, *, name: str, shared_folder: Path | None) -> None:
        self._name = name
        self._shared_folder = shared_folder
        self._shares: list[Allotment] = []

    async def take(self, demand: Demand, environ: Mapping[str, str]) -> None:
        """Check each GPU that the server will use, in CUDA's order, and tell other workers its share of it.

        Raises EngineStartError where it does not fit. Where no driver says what is free, nothing is checked: this may
        be a build for processors, or for GPUs that are not NVIDIA's.
        """
        for uuid, memory in (await self._read(demand.num_gpus, environ)).items():
            if self._shared_folder is not None:
                share = Allotment(shared_by(self._shared_folder, memory), name=self._name)
                self._shares.append(share)
                share.take(demand.share_bytes(memory), memory, device=f"GPU {uuid}", advice=_ADVICE)
            require_fit(demand, memory, f"GPU {uuid}")

    def settle(self) -> None:
        """The server is up, and has all its memory."""
        for share in self._shares:
            share.settle()

    def keep(self) -> None:
        """Be known to others, whatever happens to the files. To be called often."""
        for share in self._shares:
            share.keep()

    def release(self) -> None:
        """The server is gone. Safe to call twice."""
        for share in self._shares:
            share.release()
        self._shares.clear()

    async def _read(self, num_gpus: int, environ: Mapping[str, str]) -> dict[str, Memory]:
        found = {}
        try:
            async with asyncio.timeout(_WITHIN_S):
                for uuid in (await asyncio.to_thread(visible_gpus, environ=environ))[:num_gpus]:
                    found[uuid] = await (await asyncio.to_thread(find_gpu, uuid)).read()
        except (EngineStartError, EngineError, TimeoutError) as error:
            log.info("whether vLLM fits into a GPU is not checked: %s", str(error) or "the driver does not answer")
            return {}
        return found
