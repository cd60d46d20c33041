"""Files and batches as they are kept, and the states of a batch."""

from typing import Any, Final, Literal, get_args

import msgspec

from headrace.schemas.subjects import Tenant

__all__ = [
    "BATCH_ENDED",
    "BATCH_MOVES",
    "COMPLETION_WINDOWS_S",
    "MAX_OUTPUT_TTL_S",
    "MIN_TTL_S",
    "BatchRecord",
    "BatchStatus",
    "FileRecord",
    "Lease",
    "LineError",
    "Purpose",
    "batch_object",
    "file_object",
    "job_of_line",
    "moved",
]

BatchStatus = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]
Purpose = Literal["batch", "batch_output"]

COMPLETION_WINDOWS_S: Final = {"24h": 86_400}
"""How long a batch may take, by what its maker says."""
MIN_TTL_S: Final = 3_600
"""The shortest time that a file may be asked to be kept; OpenAI's."""
MAX_OUTPUT_TTL_S: Final = 2_592_000
"""The longest time that results may be asked to be kept; OpenAI's."""

BATCH_MOVES: Final[dict[BatchStatus, frozenset[BatchStatus]]] = {
    "validating": frozenset({"in_progress", "failed", "expired", "cancelling"}),
    "in_progress": frozenset({"finalizing", "failed", "expired", "cancelling"}),
    "finalizing": frozenset({"completed", "failed"}),
    "cancelling": frozenset({"cancelled", "failed"}),
    "completed": frozenset(),
    "failed": frozenset(),
    "expired": frozenset(),
    "cancelled": frozenset(),
}
"""From each state the states that can follow; those without one are ends."""

BATCH_ENDED: Final = frozenset(status for status, after in BATCH_MOVES.items() if not after)

_STATUSES: Final[tuple[BatchStatus, ...]] = get_args(BatchStatus)


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A stored file, key `file.<tenant>.<file>` of the batches bucket; its bytes lie in the object store.

    Written once, by the gateway that took the file or made it, after the bytes, and gone together with them. It is not
    shown after `expires_at`, which may be earlier; the tenant's next upload removes it then. Times are whole Unix
    seconds. `num_lines` and `urls` are of the requests in it.
    """

    id: str
    tenant: Tenant
    filename: str
    purpose: Purpose
    size_bytes: int
    created_at: int
    expires_at: int
    num_lines: int = 0
    urls: tuple[str, ...] = ()


class LineError(msgspec.Struct, frozen=True):
    """Why a batch failed as a whole; `line` of its input file, where one is to blame."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch, key `batch.<tenant>.<batch>` of the batches bucket; every write compares and sets its revision.

    `epoch` counts the runners it had: each raises it before it does anything, so that one which was away learns at its
    next write that another has taken over. `at` has the second in which a state was reached.
    """

    id: str
    tenant: Tenant
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: BatchStatus = "validating"
    at: dict[BatchStatus, int] = msgspec.field(default_factory=dict)
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[LineError, ...] = ()
    metadata: dict[str, str] | None = None
    output_ttl_s: int | None = None
    epoch: int = 0

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in BATCH_ENDED


class Lease(msgspec.Struct, frozen=True):
    """Who runs a batch, key `batch.<tenant>.<batch>.lease`: short-lived, renewed by its owner's compare-and-set.

    It only keeps two from doing the same work; what either writes is right without it.
    """

    owner: str


def moved(record: BatchRecord, status: BatchStatus, *, now: float, **changes: Any) -> BatchRecord:
    """The record in its next state. Raises ValueError for a step that is not in the table."""
    if status not in BATCH_MOVES[record.status]:
        raise ValueError(f"a batch does not go from {record.status} to {status}")
    at = {**record.at, status: int(now)}
    return msgspec.structs.replace(record, status=status, at=at, **changes)


def job_of_line(batch: str, line: int, number: int) -> str:
    """Id of the job that a line becomes, the `number`th (from 0) if those before ended without an answer.

    Whoever runs the batch submits a line under the same ids in the same order, so it runs once.
    """
    return f"{batch}-{line}-{number}" if number else f"{batch}-{line}"


def file_object(record: FileRecord) -> dict[str, Any]:
    """A file in OpenAI's form."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.size_bytes,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(record: BatchRecord) -> dict[str, Any]:
    """A batch in OpenAI's form."""
    errors = [msgspec.to_builtins(error) for error in record.errors]
    times = {f"{status}_at": record.at.get(status) for status in _STATUSES if status != "validating"}
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": record.status,
        "output_file_id": record.output_file_id,
        "error_file_id": record.error_file_id,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        **times,
        "request_counts": {"total": record.total, "completed": record.completed, "failed": record.failed},
        "metadata": record.metadata,
    }
