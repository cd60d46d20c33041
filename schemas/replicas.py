"""What an operator wants of a model's workers: how many, started how, and how their number may change by itself."""

import hashlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.schemas.subjects import DEFAULT_POOL

__all__ = ["Autoscale", "EngineName", "ReplicaGroup"]

EngineName = Literal["llama", "openai", "sim", "vllm"]
Replicas = Annotated[int, Meta(ge=0, le=1000)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
PoolName = Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,40}\Z", description="1 to 40 of a-z 0-9 -")]
Argument = Annotated[str, Meta(min_length=1, max_length=4096)]

_GENERATION_DIGITS = 8


class Autoscale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Bounds and pace of a number of replicas that follows the load.

    One more is wanted while a request would wait longer than `target_wait_s` for its start; one less when all were idle
    for `idle_s`. Between two steps in one direction lie `up_cooldown_s` and `down_cooldown_s`. A `min_replicas` of 0
    lets the last one go too: the next request then waits in the queue for a worker to come up.
    """

    min_replicas: Replicas = 1
    max_replicas: Annotated[int, Meta(ge=1, le=1000)] = 1
    target_wait_s: Seconds = 5.0
    idle_s: Seconds = 300.0
    up_cooldown_s: Seconds = 15.0
    down_cooldown_s: Seconds = 60.0

    def __post_init__(self) -> None:
        """Raises ValueError for bounds that no number meets."""
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas is {self.min_replicas}; allowed: at most max_replicas ({self.max_replicas})"
            )


class ReplicaGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Workers of one pool of a model, which host agents keep running: `replicas` of them, unless `autoscale` decides.

    `args` are flags of `headrace serve worker` beyond the engine, model, pool and id. `memory_mib` is what one worker
    needs of one device; None is a device of its own. `uses` says whether that device is a GPU or the host's memory.
    `restarts` is raised to have all of them started anew.
    """

    engine: EngineName
    pool: PoolName = DEFAULT_POOL
    replicas: Replicas = 1
    args: Annotated[tuple[Argument, ...], Meta(max_length=128)] = ()
    memory_mib: Annotated[int, Meta(ge=1, le=100_000_000)] | None = None
    uses: Literal["gpu", "host"] = "gpu"
    autoscale: Autoscale | None = None
    restarts: Annotated[int, Meta(ge=0)] = 0

    @property
    def generation(self) -> str:
        """Names how its workers are started: 8 hex digits, the same wherever nothing of it differs.

        Workers of another generation are replaced by ones of this. Their number belongs to no generation.
        """
        how = (self.engine, self.args, self.memory_mib, self.uses, self.restarts)
        return hashlib.sha256(msgspec.json.encode(how)).hexdigest()[:_GENERATION_DIGITS]
