"""Every subject, stream, bucket, consumer and header name, built here and nowhere else.

    <p>.infer.<tenant>.<op>.<model>              a client's request (core, queue group `router`)
    <p>.jobs.<model>.<pool>.<lane>.<queue>       the job queue (stream <P>_JOBS_<model>)
    <p>.wake.<model>.<pool>.<lane>.<queue>       its headers-only republish; also sent by whoever hands a job back
    <p>.log.<shard>.<tenant>.<job>               the job log (stream <P>_LOG_<shard>); internal
    _INBOX.<tenant>.<job>                        its republish: the job's events, for clients
    <p>.dead.<tenant>.<model>.<job>              dead letters (stream <P>_DEAD)
    <p>.cancel.<tenant>.<job>  .status.…         request/reply, served by routers
    <p>.ended.<tenant>.<job>                     core notice after a terminal append (a hint; may be lost)
    <p>.tokenize.<model>                         exact prompt count by a ready worker (core, queue group `worker`)
    <p>.ctl.<worker>                             nudges for one worker
    <p>.monitor.state                            request/reply, served by any monitor
    <p>.batch.<tenant>.<batch>.<line>            result of one line of a batch (stream <P>_BATCH); internal

`<P>` is the prefix in upper case with dots as `_`.
"""

import hashlib
import re
from typing import Final, Literal, NewType, get_args

import msgspec

Tenant = NewType("Tenant", str)
JobId = NewType("JobId", str)
WorkerId = NewType("WorkerId", str)
Lane = Literal["high", "normal", "low"]

LANES: Final[tuple[Lane, ...]] = get_args(Lane)
"""Strict order: earlier lanes start first."""

DEFAULT_TENANT: Final = Tenant("default")
DEFAULT_POOL: Final = "default"
DEFAULT_QUEUE: Final = "default"
DEFAULT_LANE: Final[Lane] = "normal"

INBOX: Final = "_INBOX"
SERVICE_INBOX_PREFIX: Final = "_INBOX._svc"
"""Inboxes of Headrace's own services; never a valid reply of a client."""

Service = Literal["router", "worker", "monitor", "gateway", "host", "operator"]
"""Who connects as one of Headrace's own; `operator` is the command line."""

ROUTER_GROUP: Final = "router"
WORKER_GROUP: Final = "worker"

# Headers of ours, on requests, queue messages and events.
HDR_ID: Final = "Headrace-Id"
HDR_NEW_ID: Final = "Headrace-New-Id"
"""Beside an id that was made up for this request and is sent for the first time: no job of it needs looking for."""
HDR_PRIORITY: Final = "Headrace-Priority"
HDR_POOL: Final = "Headrace-Pool"
HDR_QUEUE_TIMEOUT: Final = "Headrace-Queue-Timeout"
HDR_DEADLINE: Final = "Headrace-Deadline"
HDR_FALLBACK: Final = "Headrace-Fallback"
HDR_EVENT: Final = "Headrace-Event"
HDR_JOB: Final = "Headrace-Job"
HDR_ATTEMPT: Final = "Headrace-Attempt"
HDR_OFFSET: Final = "Headrace-Offset"
HDR_COUNT: Final = "Headrace-Count"
HDR_WORKER: Final = "Headrace-Worker"
HDR_EPOCH: Final = "Headrace-Epoch"
HDR_ENGINE_RUN: Final = "Headrace-Engine-Run"
HDR_HASH: Final = "Headrace-Hash"
HDR_PASSED: Final = "Headrace-Passed"
HDR_PREFERRED: Final = "Headrace-Preferred"
"""Names the worker that has the beginning of the conversation in its cache: a hint to the others."""
HDR_ATTACHED: Final = "Headrace-Attached"
HDR_FAILED: Final = "Headrace-Failed"
"""On the stored result of a batch's line: it goes to the error file."""
HDR_RETRY_AFTER: Final = "Retry-After"
# Headers of NATS that we read or write.
HDR_MSG_ID: Final = "Nats-Msg-Id"
HDR_TTL: Final = "Nats-TTL"
HDR_EXPECTED_LAST_SUBJECT_SEQUENCE: Final = "Nats-Expected-Last-Subject-Sequence"
HDR_EXPECTED_LAST_SUBJECT_SEQUENCE_SUBJECT: Final = "Nats-Expected-Last-Subject-Sequence-Subject"
HDR_SEQUENCE: Final = "Nats-Sequence"
HDR_LAST_SEQUENCE: Final = "Nats-Last-Sequence"
HDR_SUBJECT: Final = "Nats-Subject"
HDR_TIMESTAMP: Final = "Nats-Time-Stamp"
HDR_MARKER_REASON: Final = "Nats-Marker-Reason"

MAX_MODEL_BYTES: Final = 100
_JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_NAME = re.compile(r"[a-z0-9-]{1,40}\Z")
_WORKER_ID = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_PREFIX = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\Z")
_TOKEN_BYTE = re.compile(r"=([0-9A-F]{2})")
_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")


def is_job_id(text: str) -> bool:
    """Whether it is a job id: `[A-Za-z0-9_-]{1,64}`."""
    return _JOB_ID.match(text) is not None


def is_name(text: str) -> bool:
    """Whether it is a tenant, pool or queue name: `[a-z0-9-]{1,40}`."""
    return _NAME.match(text) is not None


def is_worker_id(text: str) -> bool:
    """Whether it is a worker id: `[A-Za-z0-9_-]{1,64}`."""
    return _WORKER_ID.match(text) is not None


def is_prefix(text: str) -> bool:
    """Whether it is a deployment prefix: plain NATS tokens joined by dots, 64 characters at most."""
    return len(text) <= 64 and _PREFIX.match(text) is not None


def is_model_name(text: str) -> bool:
    """Whether it is a model name: not empty, at most 100 bytes of UTF-8, no control characters."""
    try:
        size_bytes = len(text.encode())
    except UnicodeEncodeError:
        return False
    return 0 < size_bytes <= MAX_MODEL_BYTES and not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in text)


def is_reply(subject: str, prefix: str) -> bool:
    """Whether an answer may be sent there: to nothing of the broker's own, nor what this deployment serves or stores.

    Whose inbox it is, is a matter of the caller, who knows the tenant.
    """
    parts = subject.split(".")
    if not subject.isprintable() or any(part in ("", "*", ">") or " " in part for part in parts):
        return False
    return not subject.startswith(("$", f"{prefix}."))


def is_reply_to_tenant(subject: str, tenant: str) -> bool:
    """Whether an answer to a tenant's request may be sent there in a secured deployment.

    Its own inbox, or that of a gateway or an operator that asks for it: what those are named, no tenant can know.
    """
    trusted = (service_inbox("gateway"), service_inbox("operator"), f"{INBOX}.{tenant}")
    return any(subject.startswith(f"{prefix}.") for prefix in trusted)


def service_inbox(service: Service, identity: str = "") -> str:
    """Prefix of a service's own inboxes; a worker's `identity` is its id, so that no other reads its answers."""
    return f"{SERVICE_INBOX_PREFIX}.{service}" + (f".{identity}" if identity else "")


def model_to_token(model: str) -> str:
    """A model name as one NATS token, reversibly: bytes outside `[A-Za-z0-9_-]` become `=HH`.

    Raises ValueError for a name that `is_model_name` refuses.
    """
    if not is_model_name(model):
        raise ValueError(f"model name must be 1 to {MAX_MODEL_BYTES} bytes without control characters")
    return "".join(chr(b) if b in _PLAIN else f"={b:02X}" for b in model.encode())


def token_to_model(token: str) -> str:
    """The inverse of `model_to_token`. Raises ValueError for any token that function would not make."""
    raw = _TOKEN_BYTE.sub(lambda m: chr(int(m[1], 16)), token).encode("latin-1", errors="strict")
    model = raw.decode()  # UnicodeDecodeError is a ValueError
    if not is_model_name(model) or model_to_token(model) != token:
        raise ValueError("not an encoded model name")
    return model


class QueueName(msgspec.Struct, frozen=True, order=True):
    """One queue of a model: where its jobs wait, and the durable consumer that serves them."""

    pool: str = DEFAULT_POOL
    lane: Lane = DEFAULT_LANE
    queue: str = DEFAULT_QUEUE

    @property
    def consumer(self) -> str:
        """Name of its durable consumer."""
        return f"{self.pool}_{self.lane}_{self.queue}"

    @classmethod
    def from_consumer(cls, name: str) -> "QueueName | None":
        """The queue a consumer serves; None if the name is not one of ours."""
        return cls._from_parts(name.split("_"))

    @classmethod
    def from_subject(cls, subject: str) -> "QueueName | None":
        """The queue of a jobs or wake subject; None if it is not one of ours."""
        return cls._from_parts(subject.split(".")[-3:])

    @classmethod
    def _from_parts(cls, parts: list[str]) -> "QueueName | None":
        if len(parts) != 3 or not is_name(parts[0]) or not is_name(parts[2]):
            return None
        for lane in LANES:
            if parts[1] == lane:
                return cls(parts[0], lane, parts[2])
        return None


class Ingress(msgspec.Struct, frozen=True):
    """The parts of an ingress subject; `op` is not yet checked."""

    tenant: Tenant
    op: str
    model: str


class Names(msgspec.Struct, frozen=True):
    """All names of one deployment. `num_shards` is fixed when the deployment is provisioned."""

    prefix: str = "headrace.v1"
    num_shards: int = 1

    @property
    def upper(self) -> str:
        """The prefix as streams and buckets carry it."""
        return self.prefix.upper().replace(".", "_")

    # streams and buckets
    def jobs_stream(self, model: str) -> str:
        """Stream of one model's queued and running jobs."""
        return f"{self.upper}_JOBS_{model_to_token(model)}"

    def model_of_stream(self, stream: str) -> str | None:
        """The model of a jobs stream; None if it is another stream."""
        head = f"{self.upper}_JOBS_"
        if not stream.startswith(head):
            return None
        try:
            return token_to_model(stream[len(head) :])
        except ValueError:
            return None

    def log_stream(self, shard: int) -> str:
        """Stream of one shard of the job log."""
        return f"{self.upper}_LOG_{shard}"

    @property
    def dead_stream(self) -> str:
        """Stream of dead letters."""
        return f"{self.upper}_DEAD"

    @property
    def workers_bucket(self) -> str:
        """KV bucket of heartbeats."""
        return f"{self.upper}_workers"

    @property
    def config_bucket(self) -> str:
        """KV bucket of tenants, models and aliases."""
        return f"{self.upper}_config"

    @property
    def usage_bucket(self) -> str:
        """KV bucket of what tenants used of their limits."""
        return f"{self.upper}_usage"

    @property
    def instances_bucket(self) -> str:
        """KV bucket of hosts, the replicas they run, and how many of each there shall be."""
        return f"{self.upper}_instances"

    @property
    def batches_bucket(self) -> str:
        """KV bucket of batches, their leases, and what files there are."""
        return f"{self.upper}_batches"

    @property
    def files_store(self) -> str:
        """Object store of what is in the files."""
        return f"{self.upper}_files"

    @property
    def files_stream(self) -> str:
        """Stream of that object store."""
        return f"OBJ_{self.files_store}"

    @property
    def batch_stream(self) -> str:
        """Stream of the results of batches that are not over."""
        return f"{self.upper}_BATCH"

    # subjects
    def infer_filter(self) -> str:
        """What routers subscribe to."""
        return f"{self.prefix}.infer.*.*.*"

    def infer(self, tenant: str, op: str, model: str) -> str:
        """Where a client publishes a request."""
        return f"{self.prefix}.infer.{tenant}.{op}.{model_to_token(model)}"

    def parse_infer(self, subject: str) -> Ingress | None:
        """The parts of an ingress subject; None for any other subject, or if tenant or model are not well-formed."""
        head = f"{self.prefix}.infer."
        parts = subject[len(head) :].split(".") if subject.startswith(head) else []
        if len(parts) != 3 or not is_name(parts[0]):
            return None
        tenant, op, token = parts
        try:
            return Ingress(Tenant(tenant), op, token_to_model(token))
        except ValueError:
            return None

    def tenant_of_infer(self, subject: str) -> str:
        """Whose request it is, whatever else is wrong with an ingress subject; may be no tenant's name."""
        return subject.removeprefix(f"{self.prefix}.infer.").partition(".")[0]

    def jobs_filter(self, model: str) -> str:
        """All jobs of a model."""
        return f"{self.prefix}.jobs.{model_to_token(model)}.>"

    def jobs(self, model: str, queue: QueueName) -> str:
        """Subject of one queue's jobs."""
        return f"{self.prefix}.jobs.{model_to_token(model)}.{queue.pool}.{queue.lane}.{queue.queue}"

    def jobs_of_queue(self, model: str, queue: str) -> str:
        """Jobs of one queue name, in every pool and lane."""
        return f"{self.prefix}.jobs.{model_to_token(model)}.*.*.{queue}"

    def wake_filter(self, model: str) -> str:
        """All wakes of a model."""
        return f"{self.prefix}.wake.{model_to_token(model)}.>"

    def wake_pool(self, model: str, pool: str) -> str:
        """Wakes of one pool of a model."""
        return f"{self.prefix}.wake.{model_to_token(model)}.{pool}.*.*"

    def wake(self, model: str, queue: QueueName) -> str:
        """Wake of one queue."""
        return f"{self.prefix}.wake.{model_to_token(model)}.{queue.pool}.{queue.lane}.{queue.queue}"

    def shard_of(self, job: str) -> int:
        """Shard of a job: the first 8 bytes of BLAKE2b of its id, modulo the number of shards."""
        if self.num_shards == 1:
            return 0
        digest = hashlib.blake2b(job.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.num_shards

    def log_filter(self, shard: int) -> str:
        """All events of a shard."""
        return f"{self.prefix}.log.{shard}.*.*"

    def log(self, tenant: str, job: str) -> str:
        """Subject of one job's events."""
        return f"{self.prefix}.log.{self.shard_of(job)}.{tenant}.{job}"

    def parse_log(self, subject: str) -> tuple[Tenant, JobId] | None:
        """Tenant and job of a log subject; None for any other subject."""
        head = f"{self.prefix}.log."
        parts = subject[len(head) :].split(".") if subject.startswith(head) else []
        if len(parts) != 3 or not is_name(parts[1]) or not is_job_id(parts[2]):
            return None
        return Tenant(parts[1]), JobId(parts[2])

    def dead_filter(self, *, tenant: str | None = None, model: str | None = None, job: str | None = None) -> str:
        """All dead letters, or those of a tenant, a model, a job."""
        token = model_to_token(model) if model is not None else "*"
        return f"{self.prefix}.dead.{tenant or '*'}.{token}.{job or '*'}"

    def dead(self, tenant: str, model: str, job: str) -> str:
        """Subject of one dead letter."""
        return f"{self.prefix}.dead.{tenant}.{model_to_token(model)}.{job}"

    def cancel(self, tenant: str, job: str) -> str:
        """Request: cancel a job."""
        return f"{self.prefix}.cancel.{tenant}.{job}"

    def status(self, tenant: str, job: str) -> str:
        """Request: status of a job."""
        return f"{self.prefix}.status.{tenant}.{job}"

    def ended(self, tenant: str, job: str) -> str:
        """Notice that a job's terminal event was appended."""
        return f"{self.prefix}.ended.{tenant}.{job}"

    def tokenize(self, model: str) -> str:
        """Request: exact number of prompt tokens of a body."""
        return f"{self.prefix}.tokenize.{model_to_token(model)}"

    def ctl(self, worker: str) -> str:
        """Nudges for one worker."""
        return f"{self.prefix}.ctl.{worker}"

    def monitor_state(self) -> str:
        """Request: what a monitor sees of the deployment."""
        return f"{self.prefix}.monitor.state"

    def metrics(self) -> str:
        """Request to every part at once: what it counted."""
        return f"{self.prefix}.metrics"

    def batch_filter(self) -> str:
        """Results of all batches."""
        return f"{self.prefix}.batch.*.*.*"

    def batch_results(self, tenant: str, batch: str) -> str:
        """All results of one batch."""
        return f"{self.prefix}.batch.{tenant}.{batch}.*"

    def batch_result(self, tenant: str, batch: str, line: int) -> str:
        """Subject of the result of one line."""
        return f"{self.prefix}.batch.{tenant}.{batch}.{line}"

    def job_inbox(self, tenant: str, job: str) -> str:
        """Where a job's events appear for clients."""
        return f"{INBOX}.{tenant}.{job}"

    def message_id(self, tenant: str, job: str, *, is_handed_over: bool = False) -> str:
        """Dedupe id of a job's queue message; the one that a hand-over makes has its own.

        A router whose first try was unclear may have left a message there before, which was settled since.
        """
        return f"{tenant}.{job}.handed-over" if is_handed_over else f"{tenant}.{job}"
