"""The deployment at one moment, as `status --json` prints it and monitors answer it."""

from typing import Literal

import msgspec

from headrace.schemas.subjects import Lane
from headrace.schemas.workers import CapacitySource, Heartbeat, HeldRequest, WorkerHealth, WorkerState

Ending = Literal["left", "expired", "tombstoned"]
"""How a worker's key ended: taken away by the worker, not renewed in time, or overwritten by a monitor."""


class WorkerOverview(msgspec.Struct, frozen=True, kw_only=True):
    """A live worker: its heartbeat, under the names of the contract. Token figures are KV-cache tokens."""

    id: str
    model: str
    engine: str
    state: WorkerState
    kv_capacity_tokens: int
    kv_reserved_tokens: int
    running: int
    max_concurrency: int
    effective_concurrency: int | None = None
    waiting: int = 0
    pool: str = "default"
    host: str = ""
    pid: int = 0
    epoch: str = ""
    version: str = ""
    gpu: str | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    memory_source: str | None = None
    kv_capacity_source: CapacitySource | None = None
    kv_capacity_peak_tokens: int | None = None
    max_model_len: int | None = None
    tokens_per_second: float | None = None
    reason: str = ""
    age_s: float = 0.0
    held: tuple[HeldRequest, ...] = ()
    health: WorkerHealth | None = None

    @classmethod
    def from_heartbeat(cls, beat: Heartbeat, *, age_s: float) -> "WorkerOverview":
        """The worker that sent `beat` `age_s` seconds ago."""
        shared = {name: getattr(beat, name) for name in cls.__struct_fields__ if name not in ("id", "age_s")}
        return cls(id=beat.worker, age_s=age_s, **shared)


class QueueOverview(msgspec.Struct, frozen=True, kw_only=True):
    """One queue of a model. `queued` wait; `running` were handed to a worker and are not settled.

    `oldest_age_s` is how long the oldest queued request has waited, None where none waits. A request sent now would
    have `position` others before it and wait `eta_s` seconds, None where no worker has measured anything yet, and while
    the model is `paused`.
    """

    model: str
    pool: str
    lane: Lane
    queue: str
    queued: int
    running: int
    oldest_age_s: float | None = None
    position: int = 0
    eta_s: float | None = None
    paused: bool = False


class GoneWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker whose key ended `age_s` seconds ago, at most a minute or so; `model` is empty where nobody knows it."""

    id: str
    ending: Ending
    age_s: float
    model: str = ""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """Workers, queues and the workers that are gone since a moment ago.

    Answered by any monitor on `<p>.monitor.state`; read-only, so asking twice is harmless. A known model without any
    queue yet is there as its empty default queue.
    """

    workers: tuple[WorkerOverview, ...]
    queues: tuple[QueueOverview, ...]
    gone: tuple[GoneWorker, ...] = ()

    @property
    def models(self) -> list[str]:
        """Every known model, sorted."""
        return sorted({queue.model for queue in self.queues})
