"""Objects, records and results in the broker."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from headrace.batch.sweeping import LEFT_ALONE_S, sweep
from headrace.bus.batches import BatchRecords, BatchResults
from headrace.bus.connection import Bus, connect
from headrace.bus.objects import WRITER_RESTS_S, Objects
from headrace.bus.provision import ensure_provisioned
from headrace.errors import BrokerUnavailableError, ObjectGoneError
from headrace.schemas.batch_lines import LineResult
from headrace.schemas.batches import BatchRecord, FileRecord
from headrace.schemas.subjects import Tenant
from headrace.settings import Settings
from tests.deployment import until

TENANT = Tenant("default")
MEGABYTE = bytes(range(256)) * 4096
RECORD = BatchRecord(
    id="batch_1",
    tenant=TENANT,
    endpoint="/v1/completions",
    input_file_id="file-1",
    completion_window="24h",
    created_at=1,
    expires_at=2,
)


@pytest_asyncio.fixture
async def bus(broker_url: str, prefix: str) -> AsyncIterator[Bus]:
    async with connect(broker_url, Settings(prefix=prefix), name="test") as connected:
        await ensure_provisioned(connected)
        yield connected


@pytest.fixture
def objects(bus: Bus) -> Objects:
    return Objects(bus, bus.names.files_store)


async def num_messages(bus: Bus) -> int:
    info = await bus.nc.jetstream().stream_info(f"OBJ_{bus.names.files_store}")
    return info.state.messages


async def read(objects: Objects, name: str) -> bytes:
    return b"".join([piece async for piece in objects.read(name)])


@pytest.mark.parametrize("data", [b"", b"x", MEGABYTE * 3 + b"end"], ids=["empty", "small", "large"])
async def test_an_object_is_read_as_it_was_written(bus: Bus, objects: Objects, data: bytes) -> None:
    writer = objects.writer("a/b c", ttl_s=60)
    for start in range(0, len(data), 100_000):
        await writer.write(data[start : start + 100_000])
    with pytest.raises(ObjectGoneError):
        await read(objects, "a/b c")
    info = await writer.commit()
    assert (info.size, info.name) == (len(data), "a/b c")
    assert await read(objects, "a/b c") == data
    if data:  # as the tools of NATS know it
        store = await bus.nc.jetstream().object_store(bus.names.files_store)
        assert (await store.get("a/b c")).data == data
    await objects.remove("a/b c")
    await objects.remove("a/b c")
    assert await num_messages(bus) == 0


async def test_an_object_that_is_given_up_leaves_nothing(bus: Bus, objects: Objects) -> None:
    writer = objects.writer("a", ttl_s=60)
    await writer.write(MEGABYTE)
    assert await num_messages(bus) > 0
    await writer.abandon()
    assert await num_messages(bus) == 0


async def test_an_object_that_lacks_a_part_is_not_taken_for_whole(objects: Objects) -> None:
    writer = objects.writer("a", ttl_s=60)
    await writer.write(MEGABYTE)
    info = await writer.commit()
    await objects.purge(objects.chunk_subject(info.nuid))
    with pytest.raises(ObjectGoneError):
        await read(objects, "a")


async def test_what_lives_for_a_second_is_gone_after_it(bus: Bus, objects: Objects) -> None:
    writer = objects.writer("a", ttl_s=1)
    await writer.write(MEGABYTE)
    await writer.commit()

    async def is_gone() -> bool:
        return await num_messages(bus) == 0

    await until(is_gone)


async def test_the_first_result_of_a_line_stays(bus: Bus) -> None:
    results = BatchResults(bus)
    assert await results.add(TENANT, "batch_1", LineResult(number=2, is_failed=False, data=b"first"), ttl_s=60)
    assert not await results.add(TENANT, "batch_1", LineResult(number=2, is_failed=True, data=b"second"), ttl_s=60)
    assert await results.add(TENANT, "batch_1", LineResult(number=1, is_failed=True, data=b"other"), ttl_s=60)
    assert await results.add(TENANT, "batch_2", LineResult(number=1, is_failed=False, data=b"else"), ttl_s=60)
    found = [result async for result in results.each(TENANT, "batch_1")]
    assert [(result.number, result.is_failed, result.data) for result in found] == [
        (2, False, b"first"),
        (1, True, b"other"),
    ]
    await results.purge(TENANT, "batch_1")
    assert [result async for result in results.each(TENANT, "batch_1")] == []
    assert len([result async for result in results.each(TENANT, "batch_2")]) == 1
    huge = LineResult(number=3, is_failed=False, data=b"x" * int(bus.nc.max_payload))
    with pytest.raises(ValueError, match="bytes"):
        await results.add(TENANT, "batch_1", huge, ttl_s=60)


async def test_a_record_is_written_by_who_saw_the_last_one(bus: Bus) -> None:
    records = BatchRecords(bus)
    await records.add_batch(RECORD)
    seen = await records.batch(TENANT, "batch_1")
    assert seen is not None
    assert await records.replace_batch(seen, RECORD)
    assert not await records.replace_batch(seen, RECORD)
    assert await records.batch("other", "batch_1") is None
    assert await records.batches(TENANT) == [RECORD]


@pytest.mark.parametrize("name", ["*", ">", "batch_1.lease", "", "a b", "a\r\nPUB x 0", "é"])
async def test_an_id_that_cannot_be_names_nothing(bus: Bus, name: str) -> None:
    records = BatchRecords(bus)
    await records.add_batch(RECORD)
    file = FileRecord(
        id="file-1", tenant=TENANT, filename="f", purpose="batch", size_bytes=1, created_at=1, expires_at=2
    )
    await records.add_file(file, ttl_s=60)
    assert await records.file(TENANT, "file-1") == file
    assert await records.batch(TENANT, name) is None
    assert await records.file(TENANT, name) is None


async def test_a_lease_has_one_owner_and_runs_out(bus: Bus) -> None:
    records = BatchRecords(bus)
    await records.add_batch(RECORD)
    taken = await records.take_lease(TENANT, "batch_1", "one", expected=0, ttl_s=1)
    assert taken is not None
    assert await records.take_lease(TENANT, "batch_1", "two", expected=0, ttl_s=1) is None

    async def is_free() -> bool:
        lease, _ = await records.lease(TENANT, "batch_1")
        return lease is None

    await until(is_free)
    _, revision = await records.lease(TENANT, "batch_1")
    assert await records.take_lease(TENANT, "batch_1", "one", expected=taken, ttl_s=1) is None
    assert await records.take_lease(TENANT, "batch_1", "two", expected=revision, ttl_s=5) is not None
    changes = [change async for change in records.changes(after=0)]
    assert {(change.is_lease, change.batch) for change in changes} == {(False, "batch_1"), (True, "batch_1")}


async def test_batches_added_at_once_do_not_exceed_what_is_allowed_together(bus: Bus) -> None:
    records = BatchRecords(bus)
    await records.add_batch(msgspec.structs.replace(RECORD, tenant=Tenant("other"), id="batch_other"))

    def at_most_three(seen: list[BatchRecord]) -> None:
        if len(seen) >= 3:
            raise ValueError("too many")

    added = await asyncio.gather(
        *(
            records.add_batch(msgspec.structs.replace(RECORD, id=f"batch_{number}"), check=at_most_three)
            for number in range(12)
        ),
        return_exceptions=True,
    )
    assert [each for each in added if not isinstance(each, ValueError)] == [True] * 3
    known = await records.batches(TENANT)
    assert len(known) == 3
    assert not await records.add_batch(known[0], check=at_most_three)


async def test_a_file_that_was_barred_is_not_added_beside_others(bus: Bus) -> None:
    records = BatchRecords(bus)
    file = FileRecord(
        id="file-1", tenant=TENANT, filename="a", purpose="batch", size_bytes=1, created_at=1, expires_at=2
    )
    await records.remove_file(TENANT, file.id)
    await records.add_file(file, ttl_s=60, check=lambda _: None)
    assert await records.files(TENANT) == []
    await records.add_file(msgspec.structs.replace(file, id="file-2"), ttl_s=60, check=lambda _: None)
    assert [each.id for each in await records.files(TENANT)] == ["file-2"]


async def test_what_dead_writers_left_is_removed_and_nothing_else(bus: Bus, objects: Objects) -> None:
    records = BatchRecords(bus)
    later = bus.clock.now() + LEFT_ALONE_S + 60
    dead = objects.writer("default/file-dead", ttl_s=60)
    await dead.write(MEGABYTE)
    for name in ("default/file-known", "default/file-untold", "somebody's own"):
        writer = objects.writer(name, ttl_s=60)
        await writer.write(MEGABYTE)
        await writer.commit()
    known = FileRecord(
        id="file-known", tenant=TENANT, filename="a", purpose="batch", size_bytes=1, created_at=1, expires_at=2
    )
    await records.add_file(known, ttl_s=60)
    assert await objects.nuids() > {each.info.nuid async for each in objects.each()}
    before = await num_messages(bus)
    assert await sweep(bus, now=bus.clock.now()) == 0
    assert await num_messages(bus) == before, "all of it may be under way"
    assert await sweep(bus, now=later) == 2
    assert {each.info.name async for each in objects.each()} == {"default/file-known", "somebody's own"}
    assert await objects.nuids() == {each.info.nuid async for each in objects.each()}
    assert await read(objects, "default/file-known") == MEGABYTE
    assert await sweep(bus, now=later) == 0


async def test_a_writer_that_rested_for_too_long_gives_up(
    bus: Bus, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = objects.writer("a", ttl_s=60)
    await writer.write(MEGABYTE)
    now = bus.clock.now()
    monkeypatch.setattr(bus.clock, "now", lambda: now + WRITER_RESTS_S + 60)
    with pytest.raises(BrokerUnavailableError, match="left alone for too long"):
        await writer.commit()
    with pytest.raises(ObjectGoneError):
        await read(objects, "a")
