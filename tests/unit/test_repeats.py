"""Which requests to begin a batch are repeats."""

import msgspec
import pytest

from headrace.errors import RequestError
from headrace.gateway.repeats import batch_id, is_sent_again, made_before, repeat_key
from headrace.schemas.batches import BatchRecord
from headrace.schemas.subjects import Tenant

TENANT = Tenant("acme")
WANTED = BatchRecord(
    id="batch_new",
    tenant=TENANT,
    endpoint="/v1/completions",
    input_file_id="file-1",
    completion_window="24h",
    created_at=10_000,
    expires_at=96_400,
    metadata={"a": "b"},
)


def like(**changes: object) -> BatchRecord:
    return msgspec.structs.replace(WANTED, id="batch_old", status="in_progress", total=5, epoch=2, **changes)


def test_a_key_names_one_batch_of_a_tenant() -> None:
    key = repeat_key({"X-Headrace-Id": "one", "Idempotency-Key": "two"})
    assert key is not None
    assert (key.header, key.value) == ("X-Headrace-Id", "one")
    assert batch_id(TENANT, key) == batch_id(TENANT, key) != batch_id(Tenant("other"), key)
    assert repeat_key({}) is None
    assert batch_id(TENANT, None) != batch_id(TENANT, None)
    with pytest.raises(RequestError):
        repeat_key({"Idempotency-Key": ""})


@pytest.mark.parametrize(("count", "expected"), [("0", False), ("1", True), ("10", True), ("00", False), ("x", False)])
def test_a_client_says_that_it_sends_again(count: str, expected: bool) -> None:
    assert is_sent_again({"x-stainless-retry-count": count}) is expected
    assert not is_sent_again({})


def test_what_is_sent_again_means_the_newest_in_the_same_words() -> None:
    old, newer = like(created_at=9_500), like(created_at=9_900)
    assert made_before(WANTED, [newer, old]) is newer
    others = [
        like(created_at=9_000),
        like(input_file_id="file-2"),
        like(metadata=None),
        like(output_ttl_s=3_600),
        like(endpoint="/v1/embeddings"),
        like(tenant=Tenant("other")),
    ]
    assert made_before(WANTED, others) is None
    assert made_before(WANTED, []) is None
