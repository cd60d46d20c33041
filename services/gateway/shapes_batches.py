"""What answers about files and batches look like: OpenAI's objects."""

from typing import Literal

import msgspec

from headrace.schemas.batches import BatchStatus, LineError, Purpose

__all__ = ["Batch", "Batches", "DeletedFile", "File", "Files"]


class File(msgspec.Struct):
    """A file. Times are whole Unix seconds."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"]
    status_details: str | None


class Files(msgspec.Struct):
    """A page of files."""

    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct):
    """A file that is gone."""

    id: str
    object: Literal["file"]
    deleted: bool


class RequestCounts(msgspec.Struct):
    """Lines of a batch: all, those with an answer, those that were refused or failed."""

    total: int
    completed: int
    failed: int


class BatchErrors(msgspec.Struct):
    """Why a batch failed as a whole."""

    object: Literal["list"]
    data: list[LineError]


class Batch(msgspec.Struct):
    """A batch. Times are whole Unix seconds; those of states that it was not in are null."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class Batches(msgspec.Struct):
    """A page of batches."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
