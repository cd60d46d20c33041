"""Files and batches under the official `openai` client, unmodified."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, Final

import httpx2
import msgspec
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types import Batch

from headrace.batch import Files
from headrace.bus.batches import BatchRecords
from headrace.bus.provision import ensure_jobs_stream
from headrace.errors import ObjectGoneError
from headrace.schemas.batches import BatchRecord
from headrace.schemas.subjects import DEFAULT_TENANT
from headrace.worker.engines.sim import SimEngine
from tests.deployment import MODEL, Deployment, deployment, sim, until
from tests.faults.checking import sim_answer

URL: Final = "/v1/completions"
NUM_TOKENS = 5


@pytest_asyncio.fixture
async def running(broker_url: str, prefix: str) -> AsyncIterator[Deployment]:
    async with deployment(broker_url, prefix) as started:
        yield started


@pytest_asyncio.fixture
async def client(running: Deployment) -> AsyncIterator[AsyncOpenAI]:
    gateway = await running.gateway()
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0, timeout=20) as connected:
        yield connected


def line(custom_id: str, *, url: str = URL, **body: Any) -> dict[str, Any]:
    whole = {"model": MODEL, "prompt": custom_id, "max_tokens": NUM_TOKENS, "ignore_eos": True, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": whole}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def read(content: bytes) -> dict[str, Any]:
    """Lines of a result file by their custom ids, each of which is there once."""
    lines = [json.loads(each) for each in content.splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines)
    return found


async def started(client: AsyncOpenAI, *lines: dict[str, Any], endpoint: Any = URL) -> Batch:
    file = await client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


async def ended(client: AsyncOpenAI, batch: Batch, status: str = "completed") -> Batch:
    found: list[Batch] = []

    async def is_over() -> bool:
        found[:] = [await client.batches.retrieve(batch.id)]
        return found[0].status in ("completed", "failed", "expired", "cancelled")

    await until(is_over)
    assert found[0].status == status, found[0]
    return found[0]


async def content(client: AsyncOpenAI, file: str | None) -> dict[str, Any]:
    assert file is not None
    return read((await client.files.content(file)).content)


async def test_each_line_is_answered_and_bad_ones_are_in_the_error_file(
    running: Deployment, client: AsyncOpenAI
) -> None:
    engine = sim()
    await running.worker(engine)
    good = [f"line {number}" for number in range(30)]
    batch = await started(
        client, *map(line, good), line("too hot", temperature=7), line("no such", model="nobody's"), line("late")
    )
    assert batch.object == "batch"
    assert batch.status == "validating"
    over = await ended(client, batch)
    assert over.request_counts is not None
    assert (over.request_counts.total, over.request_counts.completed, over.request_counts.failed) == (33, 31, 2)
    assert over.in_progress_at is not None
    assert over.finalizing_at is not None
    assert over.completed_at is not None
    output, errors = await content(client, over.output_file_id), await content(client, over.error_file_id)
    assert set(output) == {*good, "late"}
    for name, result in output.items():
        assert result["error"] is None
        assert result["response"]["status_code"] == 200
        assert result["response"]["body"]["choices"][0]["text"] == sim_answer(name, NUM_TOKENS)
    assert {name: each["response"]["status_code"] for name, each in errors.items()} == {"too hot": 400, "no such": 404}
    assert errors["too hot"]["response"]["body"]["error"]["param"] == "temperature"
    assert engine.num_started == len(output)


async def test_chat_and_embeddings(running: Deployment, client: AsyncOpenAI) -> None:
    await running.worker()
    chat = line("a", url="/v1/chat/completions", messages=[{"role": "user", "content": "hello"}])
    del chat["body"]["prompt"]
    over = await ended(client, await started(client, chat, endpoint="/v1/chat/completions"))
    body = (await content(client, over.output_file_id))["a"]["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["usage"]["completion_tokens"] == NUM_TOKENS


async def test_files_are_listed_read_and_removed(client: AsyncOpenAI) -> None:
    data = jsonl(*(line(f"{number}", prompt="x" * 5_000) for number in range(100)))
    first = await client.files.create(file=("one.jsonl", data), purpose="batch")
    second = await client.files.create(
        file=("two.jsonl", jsonl(line("1"))), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (first.bytes, first.filename, first.purpose, first.status) == (len(data), "one.jsonl", "batch", "processed")
    assert second.expires_at == second.created_at + 3600
    assert {file.id async for file in client.files.list()} == {first.id, second.id}
    assert (await client.files.content(first.id)).content == data
    assert (await client.files.retrieve(first.id)) == first
    assert (await client.files.delete(first.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.files.content(first.id)
    assert {file.id async for file in client.files.list()} == {second.id}


async def test_the_head_of_a_content_is_answered_without_reading_it(
    client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = jsonl(line("a", prompt="x" * 300_000))
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    url = f"{client.base_url}files/{file.id}/content"

    def read_nothing(self: Files, tenant: str, file: str) -> None:
        pytest.fail("it is read")

    monkeypatch.setattr(Files, "read", read_nothing)
    async with httpx2.AsyncClient() as http:
        head = await http.head(url)
        assert (head.status_code, head.headers["content-length"]) == (200, str(len(data)))
        assert head.headers["content-type"] == "application/octet-stream"
        await client.files.delete(file.id)
        assert (await http.head(url)).status_code == 404


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (jsonl(line("a"), line("b"), line("a")), "Line 3: 'custom_id' must be unique"),
        (jsonl(line("a")) + b"{not json}\n", "Line 2: It is not valid JSON"),
        (jsonl(line("a"), {**line("b"), "method": "GET"}), "Line 2: 'method' must be 'POST'"),
        (jsonl({**line("a"), "url": "/v1/audio"}), "Line 1: 'url' must be one of /v1/chat/completions"),
        (jsonl({**line("a"), "body": []}), "Line 1: 'body' must be an object, not an array"),
        (jsonl({**line("a"), "custom_id": 5}), "Line 1: 'custom_id' must be a string"),
        (jsonl(line("a", stream=True)), "Line 1: 'body.stream' must be false"),
        (jsonl(line("a", model=None)), "Line 1: 'body.model' must name a model"),
        (b"\n\n" + b"x" * 1_100_000, "Line 3: It has 1"),
        (b"\n \n", "The file holds no request"),
        (b"", "The file holds no request"),
        (b'{"a":' * 100, "Line 1: It nests"),
    ],
)
async def test_a_bad_file_is_refused_with_the_number_of_the_line(client: AsyncOpenAI, data: bytes, told: str) -> None:
    with pytest.raises(openai.APIStatusError, match=told) as refused:
        await client.files.create(file=("in.jsonl", data), purpose="batch")
    assert refused.value.status_code in (400, 413)
    assert [file async for file in client.files.list()] == []


async def test_other_purposes_and_batches_that_cannot_be_are_refused(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await client.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="fine-tune")
    with pytest.raises(openai.NotFoundError):
        await client.batches.create(input_file_id="file-none", endpoint=URL, completion_window="24h")
    file = await client.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="completion_window"):
        await client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="1h")  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError):
        await client.batches.retrieve("batch_none")
    other = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h", metadata={"who": "me"}
    )
    over = await ended(client, other, "failed")
    assert over.metadata == {"who": "me"}
    assert over.errors is not None
    assert over.errors.data is not None
    assert over.errors.data[0].param == "endpoint"
    assert [batch.id async for batch in client.batches.list()] == [other.id]


async def test_a_cancelled_batch_keeps_what_it_has(running: Deployment, client: AsyncOpenAI) -> None:
    engine = sim(tokens_per_second=20.0)
    await running.worker(engine, max_concurrency=32)  # room for all: lines may come to it in any order
    lines = [line("quick"), *(line(f"long {number}", max_tokens=400) for number in range(20))]
    batch = await started(client, *lines)

    async def has_one() -> bool:
        counts = (await client.batches.retrieve(batch.id)).request_counts
        return counts is not None and counts.completed == 1

    await until(has_one)
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    over = await ended(client, batch, "cancelled")
    output, errors = await content(client, over.output_file_id), await content(client, over.error_file_id)
    assert set(output) == {"quick"}
    assert {each["error"]["code"] for each in errors.values()} == {"batch_cancelled"}
    assert len(errors) == 20
    await until(lambda: is_idle(engine))
    finished = await ended(client, await started(client, line("done")))
    with pytest.raises(openai.BadRequestError):
        await client.batches.cancel(finished.id)


async def is_idle(engine: SimEngine) -> bool:
    return engine.num_running == 0


@pytest.mark.parametrize("header", ["X-Headrace-Id", "Idempotency-Key"])
async def test_the_same_key_is_the_same_batch(running: Deployment, client: AsyncOpenAI, header: str) -> None:
    await running.worker()
    file = await client.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch")

    async def make(key: str, metadata: dict[str, str] | None = None) -> Batch:
        return await client.batches.create(
            input_file_id=file.id,
            endpoint=URL,
            completion_window="24h",
            metadata=metadata,
            extra_headers={header: key},
        )

    made = await make("mine")
    assert (await make("mine")).id == made.id
    assert (await make("other")).id != made.id
    with pytest.raises(openai.BadRequestError, match=f"'{header}' was used for another batch"):
        await make("mine", {"not": "the same"})
    with pytest.raises(openai.BadRequestError, match=f"'{header}' must have 1 to 255 characters"):
        await make("x" * 256)
    await ended(client, made)
    await client.files.delete(file.id)
    assert (await make("mine")).id == made.id


class LosesFirstAnswer(httpx2.AsyncHTTPTransport):
    """Sends everything; of requests to a URL that ends so, the first answer is lost."""

    def __init__(self, ending: str) -> None:
        super().__init__()
        self._ending = ending
        self.num_sent = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        if request.url.path.endswith(self._ending):
            self.num_sent += 1
            if self.num_sent == 1:
                await response.aread()
                raise httpx2.ReadError("the answer is lost", request=request)
        return response


async def test_what_the_official_client_sends_again_is_the_same_batch(running: Deployment) -> None:
    gateway = await running.gateway()
    transport = LosesFirstAnswer("/batches")
    async with AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="any", max_retries=2, http_client=httpx2.AsyncClient(transport=transport)
    ) as client:
        batch = await started(client, line("a"))
        assert transport.num_sent == 2
        assert [each.id for each in (await client.batches.list()).data] == [batch.id]
        again = await client.batches.create(
            input_file_id=str(batch.input_file_id), endpoint=URL, completion_window="24h"
        )
        assert again.id != batch.id, "the same is asked for twice"


async def test_a_batch_whose_time_is_up_keeps_what_it_has(running: Deployment, client: AsyncOpenAI) -> None:
    await running.worker(sim(tokens_per_second=20.0), max_concurrency=32)
    lines = [line("quick"), *(line(f"long {number}", max_tokens=1000) for number in range(10))]
    file = await client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    now = int(running.bus.clock.now())
    record = BatchRecord(
        id="batch_short",
        tenant=DEFAULT_TENANT,
        endpoint=URL,
        input_file_id=file.id,
        completion_window="24h",
        created_at=now,
        expires_at=now + 3,
        total=len(lines),
    )
    await BatchRecords(running.bus).add_batch(record)
    over = await ended(client, await client.batches.retrieve(record.id), "expired")
    assert set(await content(client, over.output_file_id)) == {"quick"}
    errors = await content(client, over.error_file_id)
    assert {each["error"]["code"] for each in errors.values()} == {"batch_expired"}
    assert len(errors) == 10


async def test_a_batch_without_its_input_fails(running: Deployment, client: AsyncOpenAI) -> None:
    file = await client.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch")
    record = BatchRecord(
        id="batch_orphan",
        tenant=DEFAULT_TENANT,
        endpoint=URL,
        input_file_id=file.id,
        completion_window="24h",
        created_at=1,
        expires_at=2**40,
    )
    await client.files.delete(file.id)
    await BatchRecords(running.bus).add_batch(record)
    over = await ended(client, await client.batches.retrieve(record.id), "failed")
    assert over.errors is not None
    assert over.errors.data is not None
    assert over.errors.data[0].code == "file_not_found"


async def test_a_full_queue_is_waited_for(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, queue_limit=4, batch_window=64) as running:
        engine = sim(tokens_per_second=200.0)
        await running.worker(engine, max_concurrency=2)
        gateway = await running.gateway()
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0, timeout=20) as client:
            names = [f"line {number}" for number in range(40)]
            over = await ended(client, await started(client, *map(line, names)))
            assert set(await content(client, over.output_file_id)) == set(names)
        assert engine.num_started == len(names)


async def test_tenants_have_as_many_files_and_batches_as_they_may_have(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, file_limit=2, batch_limit=1, file_max_bytes=2000) as running:
        gateway = await running.gateway()
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0, timeout=20) as client:
            await running.worker(sim(tokens_per_second=5.0))
            await started(client, line("a", max_tokens=1000))
            with pytest.raises(openai.RateLimitError) as refused:
                await started(client, line("b"))
            assert int(refused.value.response.headers["retry-after"]) >= 1
            with pytest.raises(openai.BadRequestError, match="2 files"):
                await client.files.create(file=("in.jsonl", jsonl(line("c"))), purpose="batch")
            (first, *_) = [file async for file in client.files.list(order="asc")]
            await client.files.delete((await client.files.list()).data[0].id)
            with pytest.raises(openai.APIStatusError, match="larger than the limit of 2000 bytes"):
                await client.files.create(file=("in.jsonl", jsonl(line("d", prompt="x" * 3000))), purpose="batch")
            assert first.purpose == "batch"


async def test_what_is_made_at_once_at_two_gateways_does_not_exceed_the_limits(broker_url: str, prefix: str) -> None:
    async with (
        deployment(broker_url, prefix, file_limit=3, batch_limit=2) as running,
        contextlib.AsyncExitStack() as stack,
    ):
        await ensure_jobs_stream(running.bus, MODEL)  # without a worker: no batch ends meanwhile and makes room
        clients = []
        for _ in range(2):
            gateway = await running.gateway()
            client = AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0, timeout=20)
            clients.append(await stack.enter_async_context(client))
        file = ("in.jsonl", jsonl(line("a")))
        sent = await asyncio.gather(
            *(client.files.create(file=file, purpose="batch") for client in clients * 4), return_exceptions=True
        )
        files = [each for each in sent if not isinstance(each, BaseException)]
        assert len(files) == 3
        assert all("3 files" in str(each) for each in sent if isinstance(each, BaseException))
        assert len({each.id for each in (await clients[0].files.list()).data}) == 3
        info = await running.bus.nc.jetstream().stream_info(f"OBJ_{running.bus.names.files_store}")
        assert info.state.messages == 2 * 3, "the bytes of those that were refused are gone"
        made = await asyncio.gather(
            *(
                client.batches.create(input_file_id=files[0].id, endpoint=URL, completion_window="24h")
                for client in clients * 4
            ),
            return_exceptions=True,
        )
        assert sum(isinstance(each, Batch) for each in made) == 2
        assert all(isinstance(each, Batch | openai.RateLimitError) for each in made)


async def test_a_file_that_asked_for_less_time_is_gone_then_bytes_and_all(
    running: Deployment, client: AsyncOpenAI
) -> None:
    short = await client.files.create(
        file=("in.jsonl", jsonl(line("a"))), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    bus = running.bus
    record = await BatchRecords(bus).file("default", short.id)
    assert record is not None
    await BatchRecords(bus).remove_file("default", short.id)
    expired = msgspec.structs.replace(record, id="file-old", expires_at=record.created_at)
    await BatchRecords(bus).add_file(expired, ttl_s=60)
    writer = Files(bus).writer(DEFAULT_TENANT, "file-old", ttl_s=60)
    await writer.write(b"bytes")
    await writer.commit()
    with pytest.raises(openai.NotFoundError):
        await client.files.content("file-old")
    assert [file.id async for file in client.files.list()] == []
    await client.files.create(file=("in.jsonl", jsonl(line("b"))), purpose="batch")
    assert await BatchRecords(bus).file("default", "file-old") is None
    with pytest.raises(ObjectGoneError):
        await anext(Files(bus).read(DEFAULT_TENANT, "file-old"))
