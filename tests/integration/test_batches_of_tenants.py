"""Batches and files of several tenants: nobody's keep another's from running, and a removed tenant's send nothing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
import yarl
from openai import AsyncOpenAI
from openai.types import Batch

import headrace.gateway.batches
from headrace.bus.batches import BatchRecords
from headrace.bus.provision import ensure_jobs_stream
from tests.commands import Headrace
from tests.deployment import Deployment, Gateway, deployment, sim, until
from tests.integration.test_gateway_batches import URL, content, ended, jsonl, line, started
from tests.integration.test_tenants import ask, new_tenant

IDLE = "nobodys"
NUM_BATCHES = 9
NUM_UPLOADS = 16


@pytest_asyncio.fixture
async def running(broker_url: str, prefix: str) -> AsyncIterator[Deployment]:
    async with deployment(broker_url, prefix, batch_window=2) as there:
        yield there


@pytest.fixture
def command(broker_url: str, prefix: str) -> Headrace:
    return Headrace(broker_url, prefix)


@pytest_asyncio.fixture
async def gateway(running: Deployment) -> Gateway:
    return await running.gateway()


@contextlib.asynccontextmanager
async def as_tenant(gateway: Gateway, key: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0, timeout=20) as client:
        yield client


async def in_progress(client: AsyncOpenAI, batch: Batch) -> bool:
    return (await client.batches.retrieve(batch.id)).status == "in_progress"


async def num_completed(client: AsyncOpenAI, batch: Batch) -> int:
    counts = (await client.batches.retrieve(batch.id)).request_counts
    return counts.completed if counts is not None else 0


async def test_batches_and_files_of_others_are_not_found(gateway: Gateway, command: Headrace) -> None:
    one, two = [await new_tenant(command, gateway, name) for name in ("acme", "rival")]
    async with as_tenant(gateway, one) as mine, as_tenant(gateway, two) as other:
        batch = await started(mine, line("a", model=IDLE))
        for path in (f"files/{batch.input_file_id}", f"files/{batch.input_file_id}/content", f"batches/{batch.id}"):
            assert (await ask(gateway, f"/v1/{path}", two))[0] == 404
        assert (await ask(gateway, f"/v1/batches/{batch.id}/cancel", two, method="POST"))[0] == 404
        assert (await ask(gateway, f"/v1/files/{batch.input_file_id}", two, method="DELETE"))[0] == 404
        assert (await ask(gateway, f"/v1/batches?after={batch.id}", two))[0] == 400
        assert (await ask(gateway, f"/v1/files?after={batch.input_file_id}", two))[0] == 400
        assert (await other.batches.list()).data == []
        with pytest.raises(openai.NotFoundError):
            await other.batches.create(input_file_id=batch.input_file_id, endpoint=URL, completion_window="24h")


@pytest.mark.parametrize("odd", ["*", ">", "%2e%2e", "a.b", "a%20b", "%00", "%2A", "a%2Fb", "%ff", "x" * 65])
async def test_an_id_that_cannot_be_is_not_found(gateway: Gateway, odd: str) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        for path in ("files/{}", "files/{}/content", "batches/{}"):
            url = yarl.URL(f"{gateway.url}/v1/{path.format(odd)}", encoded=True)
            async with session.get(url) as response:
                assert response.status == 404


async def test_nobodys_batches_keep_anothers_from_running(
    running: Deployment, gateway: Gateway, command: Headrace
) -> None:
    await running.worker()
    await ensure_jobs_stream(running.bus, IDLE)
    one, two = [await new_tenant(command, gateway, name) for name in ("acme", "rival")]
    async with as_tenant(gateway, one) as waiting, as_tenant(gateway, two) as quick:
        made = [await started(waiting, line("a", model=IDLE)) for _ in range(NUM_BATCHES)]

        async def are_all_taken() -> bool:
            return sum([await in_progress(waiting, each) for each in made]) >= NUM_BATCHES - 1

        await until(are_all_taken)
        await ended(quick, await started(quick, line("b")))


async def test_a_removed_tenants_batch_sends_nothing_until_it_is_added_again(
    running: Deployment, gateway: Gateway, command: Headrace
) -> None:
    engine = sim(tokens_per_second=50.0)
    await running.worker(engine)
    await new_tenant(command, gateway, "keeper")
    key = await new_tenant(command, gateway, "acme")
    names = [f"line {number}" for number in range(60)]
    async with as_tenant(gateway, key) as client:
        batch = await started(client, *(line(name, max_tokens=10) for name in names))
        await until(lambda: _is_under_way(client, batch))
    removed = await command.run("tenant", "remove", "acme")
    assert "1 of its batches send nothing more" in removed.output
    assert "1 of its files stay" in removed.output

    async def is_given_up() -> bool:
        lease, _ = await BatchRecords(running.bus).lease("acme", batch.id)
        return lease is None

    await until(is_given_up)
    await until(lambda: _is_idle(engine))
    num_started = engine.num_started
    seen = await BatchRecords(running.bus).batch("acme", batch.id)
    assert seen is not None
    assert seen.record.status == "in_progress"
    assert num_started < len(names)
    key = await new_tenant(command, gateway, "acme")
    async with as_tenant(gateway, key) as client:
        assert set(await content(client, (await ended(client, batch)).output_file_id)) == set(names)
    assert num_started < engine.num_started <= len(names)


async def _is_under_way(client: AsyncOpenAI, batch: Batch) -> bool:
    return await num_completed(client, batch) > 0


async def _is_idle(engine: Any) -> bool:
    return bool(engine.num_running == 0)


async def test_a_batch_whose_input_is_removed_keeps_what_it_has(running: Deployment, gateway: Gateway) -> None:
    engine = sim(tokens_per_second=100.0)
    await running.worker(engine, max_concurrency=2)
    async with as_tenant(gateway, "any") as client:
        lines = [line(f"{number}", prompt="x " * 5_000) for number in range(400)]
        batch = await started(client, *lines)
        await until(lambda: _is_under_way(client, batch))
        await client.files.delete(batch.input_file_id)
        over = await ended(client, batch, "failed")
        assert over.errors is not None
        assert over.errors.data is not None
        assert over.errors.data[0].code == "file_not_found"
        assert over.request_counts is not None
        assert len(await content(client, over.output_file_id)) == over.request_counts.completed > 0
        await until(lambda: _is_idle(engine))


async def test_nobodys_slow_uploads_keep_anothers_out(gateway: Gateway, command: Headrace) -> None:
    one, two = [await new_tenant(command, gateway, name) for name in ("acme", "rival")]
    release, num_begun = asyncio.Event(), 0
    head = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    )

    async def body() -> AsyncIterator[bytes]:
        nonlocal num_begun
        num_begun += 1
        yield head
        await release.wait()
        yield jsonl(line("a")) + b"\r\n--b--\r\n"

    async def send(session: aiohttp.ClientSession) -> int:
        headers = {"Authorization": f"Bearer {one}", "Content-Type": "multipart/form-data; boundary=b"}
        async with session.post(f"{gateway.url}/v1/files", data=body(), headers=headers) as response:
            return response.status

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        async with asyncio.TaskGroup() as group:
            sending = [group.create_task(send(session)) for _ in range(NUM_UPLOADS)]

            async def is_full() -> bool:
                return num_begun == NUM_UPLOADS and (await _upload(gateway, one)) == 429

            await until(is_full)
            assert await _upload(gateway, two) == 200
            release.set()
        assert [task.result() for task in sending] == [200] * NUM_UPLOADS
    assert await _upload(gateway, one) == 200


async def _upload(gateway: Gateway, key: str) -> int:
    async with as_tenant(gateway, key) as client:
        try:
            await client.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch")
        except openai.APIStatusError as error:
            return error.status_code
        return 200


async def test_one_id_at_the_same_moment_is_one_batch(gateway: Gateway) -> None:
    async with as_tenant(gateway, "any") as client:
        files = [await client.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch") for _ in range(4)]

        async def make(file: str) -> str:
            try:
                made = await client.batches.create(
                    input_file_id=file, endpoint=URL, completion_window="24h", extra_headers={"X-Headrace-Id": "mine"}
                )
            except openai.BadRequestError:
                return ""
            return made.input_file_id

        made = await asyncio.gather(*(make(file.id) for file in files))
        (batch,) = (await client.batches.list()).data
        assert sorted(made) == ["", "", "", batch.input_file_id]


async def test_of_batches_that_are_over_the_last_are_kept(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headrace.gateway.batches, "_MAX_ENDED", 2)
    async with as_tenant(gateway, "any") as client:
        made = [await ended(client, await started(client, line("a"), endpoint="/v1/embeddings"), "failed")]
        for _ in range(4):
            made.append(await ended(client, await started(client, line("a"), endpoint="/v1/embeddings"), "failed"))
        assert {batch.id for batch in (await client.batches.list()).data} == {batch.id for batch in made[-3:]}


async def test_with_too_many_files_no_batch_is_begun(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, file_limit=2) as running:
        await running.worker()
        gateway = await running.gateway()
        async with as_tenant(gateway, "any") as client:
            first = await started(client, line("a"))
            await ended(client, first)
            file = first.input_file_id
            await ended(client, await client.batches.create(input_file_id=file, endpoint=URL, completion_window="24h"))
            with pytest.raises(openai.BadRequestError, match="no room for results"):
                await client.batches.create(input_file_id=file, endpoint=URL, completion_window="24h")


async def test_an_upload_that_a_stopping_gateway_cannot_wait_for_is_told_so(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, grace_s=0.2) as running:
        gateway, is_sending = await running.gateway(), asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
            is_sending.set()
            await asyncio.Event().wait()

        async def send(session: aiohttp.ClientSession) -> tuple[int, str]:
            headers = {"Content-Type": "multipart/form-data; boundary=b"}
            async with session.post(f"{gateway.url}/v1/files", data=body(), headers=headers) as response:
                return response.status, (await response.json())["error"]["code"]

        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
            sending = asyncio.create_task(send(session))
            await is_sending.wait()
            await until(lambda: _is_met(gateway))
            await gateway.stop()
            assert await sending == (503, "shutting_down")


async def _is_met(gateway: Gateway) -> bool:
    """Another request is answered behind the one that was sent before it."""
    return (await ask(gateway, "/v1/files"))[0] == 200
