"""What a worker says of itself, every half second, under its own key of the workers bucket."""

from typing import Literal

import msgspec

from headrace.schemas.events import Owner

WorkerState = Literal["Starting", "Ready", "Busy", "Draining", "Failed"]
CapacitySource = Literal["engine", "told", "memory"]
"""Whose word a worker's capacity is: its engine's, that of whoever started it, or what free memory carries."""
Ailment = Literal["errs", "slow", "memory", "probe"]
"""Why a worker is taken out: too many of its requests fail, it is slower than its pool, its engine's memory only grows,
or its engine does not answer a probe."""


class HeldRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request a worker holds: its queue message (consumer and stream sequence), and which attempt of which job.

    `has_claimed`: that attempt's `started`, for this message, is in the log.
    """

    consumer: str
    sequence: int
    tenant: str
    job: str
    attempt: int
    has_claimed: bool = False


class WorkerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How the requests of a worker went lately, by its own count, and how often it was taken out for its health.

    Of its last requests `finished` ended well and `failed` by the engine's fault, each job once. What the engine
    refused, had no room for, was cancelled, drained or too late is in neither. `seconds_per_token` and `ttft_s` (from
    asking the engine to its first token) are medians of the last `num_paces` and `num_firsts` measurements, `load` that
    of the requests that ran at once then. All of this begins anew with each `engine_run`. `restarts` is how often the
    engine was started again for its health since the worker began, `last_restart` why. One that `is_left_out` takes
    nothing until its process is started again.
    """

    engine_run: int = 0
    finished: int = 0
    failed: int = 0
    seconds_per_token: float | None = None
    num_paces: int = 0
    ttft_s: float | None = None
    num_firsts: int = 0
    load: float | None = None
    restarts: int = 0
    last_restart: str = ""
    is_left_out: bool = False


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """One beat: sent by a worker as compare-and-set on its key's revision with a TTL, read by monitors and `status`.

    A key that is gone or overwritten refuses the next beat, which is how a worker learns it was declared dead.
    `epoch` names one registration, `connection` the broker connection (server id and client id) it beats on. Token
    figures are KV-cache tokens; memory figures are bytes of what `memory_source` names (`system`: the host's), None
    where that is not known. `effective_concurrency` is how many requests of the usual size memory lets run at once, of
    the `max_concurrency` asked for. `faulted` counts the requests here, running or held, that a worker or an engine was
    lost with before, `unproven` those of them that run on probation. `prefixes` are hashes of the conversations it
    served last. `fetchable_tokens` are those that a request fetched now may need to start at once, beside all that runs
    and waits there; None where the worker does not say. A `kv_capacity_tokens` of 0 without a `kv_capacity_source`
    means that it is not known. One that follows free memory has a `kv_capacity_peak_tokens`, the most it ever was.
    """

    worker: str
    epoch: str
    state: WorkerState
    model: str
    version: str = ""
    engine: str = ""
    pool: str = "default"
    host: str = ""
    pid: int = 0
    port: int | None = None
    gpu: str | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    memory_source: str | None = None
    kv_capacity_tokens: int = 0
    kv_capacity_source: CapacitySource | None = None
    kv_capacity_peak_tokens: int | None = None
    kv_reserved_tokens: int = 0
    block_size: int = 1
    max_model_len: int | None = None
    max_concurrency: int = 1
    effective_concurrency: int | None = None
    running: int = 0
    waiting: int = 0
    faulted: int = 0
    unproven: int = 0
    supports_streaming: bool = True
    interval_s: float = 0.5
    tokens_per_second: float | None = None
    seconds_per_job: float | None = None
    connection: str = ""
    reason: str = ""
    held: tuple[HeldRequest, ...] = ()
    prefixes: tuple[str, ...] = ()
    is_tombstone: bool = False
    fetchable_tokens: int | None = None
    health: WorkerHealth | None = None

    @property
    def capacity_tokens(self) -> int | None:
        """KV tokens it carries now; None where that is not known."""
        return self.kv_capacity_tokens if self.kv_capacity_tokens or self.kv_capacity_source is not None else None

    @property
    def peak_tokens(self) -> int | None:
        """The most KV tokens it was ever seen to carry; None where that is not known."""
        now = self.capacity_tokens
        return None if now is None else max(now, self.kv_capacity_peak_tokens or 0)

    def holds(self, queue_sequence: int | None) -> bool:
        """Whether it lists that queue message."""
        return any(held.sequence == queue_sequence for held in self.held)


class SeenBeat(msgspec.Struct, frozen=True, kw_only=True):
    """A heartbeat as read from the bucket; `beat` is None where the key expired, or `has_left` by its own will."""

    revision: int
    beat: Heartbeat | None
    has_left: bool = False


def is_owner_alive(owner: Owner, seen: SeenBeat | None) -> bool:
    """Whether the owner of a running job still has it, by its heartbeat.

    PROTOCOL.md, "owner alive": its key is not tombstoned, has the same epoch, and either lists the queue sequence it
    named when it claimed, or has not beaten since then.
    """
    if _is_older_than_claim(owner, seen):
        return True
    if seen is None or seen.beat is None or seen.beat.is_tombstone or seen.beat.epoch != owner.epoch:
        return False
    return seen.beat.holds(owner.queue_sequence) or seen.revision <= owner.beat


def has_died(owner: Owner, seen: SeenBeat | None) -> bool:
    """Whether the owner's registration is gone, which counts as a fault; one that only let go of the job is not."""
    if _is_older_than_claim(owner, seen):
        return False
    return seen is None or seen.beat is None or seen.beat.is_tombstone or seen.beat.epoch != owner.epoch


def _is_older_than_claim(owner: Owner, seen: SeenBeat | None) -> bool:
    """Whether what was read of the key was overwritten before the owner claimed: a stale read, which says nothing."""
    return seen is not None and seen.revision < owner.beat


def decode_heartbeat(data: bytes) -> Heartbeat | None:
    """A heartbeat from its bytes; None if they are no heartbeat."""
    try:
        return msgspec.json.decode(data, type=Heartbeat)
    except (msgspec.DecodeError, RecursionError):
        return None


class WorkerNudge(msgspec.Struct, frozen=True, kw_only=True):
    """A nudge on a worker's control subject; at most once, so it only ever hastens what the log or key says anyway.

    Sent by whoever cancelled a job (`cancelled`), by operators (`drain`), and by whoever has a job that this worker
    would start at once (`wake`, with the consumer to fetch it from). Monitors tell every worker of a pool of requests
    that lost their worker (`interrupted`, with the consumer, how many, and how many of them are its share if all have
    room), since a full one hears no wake; and a sick one to start its engine again (`restart`, with the ailment, the
    reason, and the registration and engine run that were judged: of another it is void, so that several may say it).
    """

    kind: Literal["cancelled", "drain", "evicted", "wake", "interrupted", "restart"]
    tenant: str | None = None
    job: str | None = None
    consumer: str | None = None
    number: int = 0
    share: int = 0
    ailment: Ailment | None = None
    reason: str = ""
    epoch: str = ""
    engine_run: int = 0


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's answer to a tokenize request: exact prompt tokens of a body, and its engine's limits."""

    num_prompt_tokens: int
    max_model_len: int | None = None
    kv_capacity_tokens: int | None = None
