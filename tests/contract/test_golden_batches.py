"""Golden bytes of what is kept of files and batches: a gateway reads what an older or newer one wrote."""

from typing import Any

import msgspec
import pytest

from headrace.schemas.batches import BatchRecord, FileRecord, Lease, LineError
from headrace.schemas.subjects import Names, Tenant

FILE = FileRecord(
    id="file-1",
    tenant=Tenant("acme"),
    filename="in.jsonl",
    purpose="batch",
    size_bytes=7,
    created_at=1,
    expires_at=2,
    num_lines=3,
    urls=("/v1/completions",),
)
BATCH = BatchRecord(
    id="batch_1",
    tenant=Tenant("acme"),
    endpoint="/v1/completions",
    input_file_id="file-1",
    completion_window="24h",
    created_at=1,
    expires_at=2,
    status="failed",
    at={"failed": 5},
    total=3,
    completed=1,
    failed=1,
    errors=(LineError("c", "m", line=4),),
    metadata={"a": "b"},
    epoch=2,
)
GOLDEN: list[tuple[Any, bytes]] = [
    (
        FILE,
        b'{"id":"file-1","tenant":"acme","filename":"in.jsonl","purpose":"batch","size_bytes":7,"created_at":1,'
        b'"expires_at":2,"num_lines":3,"urls":["/v1/completions"]}',
    ),
    (
        BATCH,
        b'{"id":"batch_1","tenant":"acme","endpoint":"/v1/completions","input_file_id":"file-1",'
        b'"completion_window":"24h","created_at":1,"expires_at":2,"status":"failed","at":{"failed":5},"total":3,'
        b'"completed":1,"failed":1,"output_file_id":null,"error_file_id":null,'
        b'"errors":[{"code":"c","message":"m","param":null,"line":4}],"metadata":{"a":"b"},"output_ttl_s":null,'
        b'"epoch":2}',
    ),
    (Lease("o"), b'{"owner":"o"}'),
]


@pytest.mark.parametrize(("record", "data"), GOLDEN, ids=lambda value: type(value).__name__)
def test_record_in_the_bucket(record: Any, data: bytes) -> None:
    assert msgspec.json.encode(record) == data
    assert msgspec.json.decode(data, type=type(record)) == record
    newer = b'{"newer":1,' + data[1:]
    assert msgspec.json.decode(newer, type=type(record)) == record


def test_least_an_old_writer_said_still_decodes() -> None:
    head = (
        b'{"id":"b","tenant":"t","endpoint":"e","input_file_id":"f","completion_window":"24h","created_at":1,'
        b'"expires_at":2}'
    )
    old = msgspec.json.decode(head, type=BatchRecord)
    assert (old.status, old.epoch, old.total) == ("validating", 0, 0)


def test_names() -> None:
    names = Names()
    assert names.batches_bucket == "HEADRACE_V1_batches"
    assert names.files_store == "HEADRACE_V1_files"
    assert names.batch_stream == "HEADRACE_V1_BATCH"
    assert names.batch_result("acme", "batch_1", 7) == "headrace.v1.batch.acme.batch_1.7"
