"""A request on its way through the simulation, and what it met there."""

from headrace.schemas.subjects import QueueName
from headrace.simulator.traces import Arrival

__all__ = ["Request"]


class Request:
    """One arrival being served: identity by `index`, its place in the trace; times in seconds of virtual time.

    `fetched_s` is when a worker last took it from our queues, `started_s` when an engine first began to compute it, and
    `cached_tokens` what it found cached then. All None or 0 until they happen.
    """

    __slots__ = (
        "arrival",
        "cached_tokens",
        "fetched_s",
        "finish_step",
        "finished_s",
        "first_token_s",
        "hashes",
        "index",
        "join_step",
        "named",
        "need_tokens",
        "num_delivered",
        "num_generated",
        "num_preemptions",
        "num_to_read",
        "queue",
        "started_s",
        "worker",
    )

    def __init__(self, index: int, arrival: Arrival, need_tokens: int) -> None:
        self.index = index
        self.arrival = arrival
        self.need_tokens = need_tokens
        self.queue = QueueName(lane=arrival.lane, queue=arrival.tenant)
        self.hashes: tuple[str, ...] = ()
        self.named: str | None = None  # whom the router's hint names
        self.worker: str | None = None
        self.fetched_s: float | None = None
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self.cached_tokens = 0
        self.num_preemptions = 0
        self.num_delivered = 0
        self.num_generated = 0
        self.num_to_read = 0  # prompt tokens the engine has yet to compute
        self.join_step = 0
        self.finish_step = 0
