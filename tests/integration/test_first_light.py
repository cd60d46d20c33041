"""The path a request takes, seen from outside: bare clients, idempotent ids, races, and a router that dies."""

import asyncio
import json
import time
from typing import Any

import nats
import pytest
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from headrace.bus.jobqueue import JobQueue
from headrace.client import Accepted, Delta, Done, Started
from headrace.errors import JobCancelledError, RequestError
from headrace.schemas.jobs import Job, body_hash
from headrace.schemas.subjects import JobId, QueueName, Tenant
from tests.deployment import MODEL, deployment, header, sim, until

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "tell me of rivers"}], "max_tokens": 12}


async def bare_connection(url: str) -> NatsClient:
    return await nats.connect(url)


async def read_to_end(subscription: Any, *, timeout_s: float = 10.0) -> list[Msg]:
    ends = ("done", "failed", "cancelled", "expired", "error")
    messages: list[Msg] = []
    while not messages or header(messages[-1], "Headrace-Event") not in ends:
        messages.append(await subscription.next_msg(timeout_s))
    return messages


def kinds(messages: list[Msg]) -> list[str]:
    return [header(message, "Headrace-Event") for message in messages]


def check_stream(messages: list[Msg]) -> dict[str, Any]:
    """Accepted first, then started, deltas in order from offset 0 without a hole, and a done that equals them."""
    seen = kinds(messages)
    assert seen[0] == "accepted"
    assert seen[-1] == "done"
    assert seen.index("started") < seen.index("delta")
    offset, text = 0, ""
    for message in messages:
        if header(message, "Headrace-Event") != "delta":
            continue
        assert int(header(message, "Headrace-Offset")) == offset
        offset += int(header(message, "Headrace-Count"))
        text += json.loads(message.data)["choices"][0]["delta"].get("content", "")
    response: dict[str, Any] = json.loads(messages[-1].data)
    assert response["choices"][0]["message"]["content"] == text
    assert response["usage"]["completion_tokens"] == offset
    return response


async def test_a_client_of_nothing_but_nats_reads_the_whole_stream(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running:
        await running.worker()
        nc = await bare_connection(broker_url)
        try:
            inbox = nc.new_inbox()
            subscription = await nc.subscribe(inbox)
            await nc.publish(f"{prefix}.infer.default.chat.{MODEL}", json.dumps(BODY).encode(), reply=inbox)
            messages = await read_to_end(subscription)
        finally:
            await nc.close()
    first = json.loads(messages[0].data)
    assert set(first) >= {"job", "sequence", "position", "eta_s"}
    assert {header(message, "Headrace-Job") for message in messages} == {first["job"]}
    assert "started" in kinds(messages)[1:3]  # before it, the log's own `accepted`, unless the worker was faster
    response = check_stream(messages)
    assert response["usage"] == {"prompt_tokens": 8, "completion_tokens": 12, "total_tokens": 20}
    assert response["choices"][0]["finish_reason"] == "length"


async def test_a_client_whose_inbox_is_one_of_a_wildcard_reads_the_whole_stream(broker_url: str, prefix: str) -> None:
    # As clients do that keep one subscription for all their replies; the broker's own delivery does not reach those.
    async with deployment(broker_url, prefix) as running:
        await running.worker()
        nc = await bare_connection(broker_url)
        try:
            subscription = await nc.subscribe("_INBOX.mux.*")
            await nc.publish(f"{prefix}.infer.default.chat.{MODEL}", json.dumps(BODY).encode(), reply="_INBOX.mux.7")
            messages = await read_to_end(subscription)
        finally:
            await nc.close()
    check_stream(messages)


async def test_stream_false_sends_no_deltas_and_the_same_answer(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running:
        await running.worker()
        silent = [event async for event in running.client.stream(model=MODEL, **BODY, stream=False)]
        aloud = await running.client.complete(model=MODEL, **BODY)
    assert [type(event) for event in silent] == [Accepted, Started, Done]
    assert isinstance(silent[-1], Done)
    assert silent[-1].text == aloud.text != ""


@pytest.mark.parametrize("said", [{}, {"Headrace-New-Id": "1"}], ids=["", "though it is said to be new"])
async def test_the_same_id_from_two_clients_to_two_routers_runs_once_and_both_read_all(
    broker_url: str, prefix: str, said: dict[str, str]
) -> None:
    engine = sim()
    async with deployment(broker_url, prefix, routers=2) as running:
        await running.worker(engine)
        nc = await bare_connection(broker_url)
        try:
            inboxes = [nc.new_inbox() for _ in range(6)]
            subscriptions = [await nc.subscribe(inbox) for inbox in inboxes]
            for inbox in inboxes:
                await nc.publish(
                    f"{prefix}.infer.default.chat.{MODEL}",
                    json.dumps(BODY).encode(),
                    reply=inbox,
                    headers={"Headrace-Id": "twice", **said},
                )
            streams = await asyncio.gather(*(read_to_end(subscription) for subscription in subscriptions))
            late = nc.new_inbox()
            afterwards = await nc.subscribe(late)
            await nc.publish(
                f"{prefix}.infer.default.chat.{MODEL}",
                json.dumps(BODY).encode(),
                reply=late,
                headers={"Headrace-Id": "twice", **said},
            )
            streams.append(await read_to_end(afterwards))
        finally:
            await nc.close()
    assert engine.num_started == 1
    texts = {check_stream(stream)["choices"][0]["message"]["content"] for stream in streams}
    assert len(texts) == 1


async def test_another_body_under_a_used_id_is_refused(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running:
        await running.worker()
        await running.client.complete(model=MODEL, job_id="used", **BODY)
        with pytest.raises(RequestError) as caught:
            await running.client.complete(model=MODEL, job_id="used", prompt="something else")
    assert (caught.value.code, caught.value.param) == ("invalid_value", "Headrace-Id")


async def test_two_sdk_clients_with_one_id_both_read_the_whole_stream(broker_url: str, prefix: str) -> None:
    engine = sim()
    async with deployment(broker_url, prefix, routers=2) as running:
        await running.worker(engine)

        async def read() -> tuple[str, str]:
            text = ""
            async for event in running.client.stream(model=MODEL, job_id="shared", **BODY):
                if isinstance(event, Delta):
                    assert event.offset == len(text.split())
                    text += event.text
                if isinstance(event, Done):
                    return text, event.text
            raise AssertionError("no end")

        results = await asyncio.gather(read(), read(), read())
    assert engine.num_started == 1
    assert len({*results}) == 1
    assert results[0][0] == results[0][1]


async def test_two_workers_with_the_same_message_run_the_engine_once(broker_url: str, prefix: str) -> None:
    # The ack wait is so short that the broker hands the running job's message out again and again.
    engines = [sim(tokens_per_second=20.0), sim(tokens_per_second=20.0)]
    async with deployment(broker_url, prefix, ack_wait_s=1.0) as running:
        for engine in engines:
            await running.worker(engine)
        queue = JobQueue(running.bus, MODEL)
        body = json.dumps(BODY).encode()
        stream = running.client.stream(model=MODEL, job_id="raced", **BODY)
        done: Done | None = None
        async for event in stream:
            if isinstance(event, Started):
                # A second copy of the job, as after a dedupe window, and the first one handed back by a stranger.
                copy = Job(
                    tenant=Tenant("default"),
                    job=JobId("raced"),
                    op="chat",
                    model=MODEL,
                    body=body,
                    body_hash=body_hash("chat", MODEL, body),
                    accepted_at=time.time(),
                    queue_timeout_s=60,
                    deadline_s=60,
                    need_tokens=20,
                )
                headers = {**copy.headers(), "Nats-Msg-Id": "another-window"}
                await running.bus.store(running.bus.names.jobs(MODEL, QueueName()), body, headers=headers)
                progress = await queue.progress(QueueName())
                assert progress is not None
                await queue.nak_on_behalf(QueueName(), 1, progress)
            if isinstance(event, Done):
                done = event

        async def is_settled() -> bool:
            return not await queue.counts()

        await until(is_settled)
    assert done is not None
    assert sum(engine.num_started for engine in engines) == 1


async def test_200_concurrent_streams_through_one_router_and_two_workers(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running:
        for _ in range(2):
            await running.worker(sim(tokens_per_second=50.0, max_concurrency=128, kv_tokens=1_000_000))

        async def read(number: int) -> int:
            offset, text = 0, ""
            body: dict[str, Any] = {"messages": [{"role": "user", "content": f"stream {number}"}], "max_tokens": 20}
            async for event in running.client.stream(model=MODEL, **body):
                if isinstance(event, Delta):
                    assert event.offset == offset
                    offset += event.num_tokens
                    text += event.text
                if isinstance(event, Done):
                    assert event.text == text
            return offset

        async with asyncio.TaskGroup() as group:
            readers = [group.create_task(read(number)) for number in range(200)]
    assert [reader.result() for reader in readers] == [20] * 200


async def test_cancelling_a_running_job_aborts_its_engine(broker_url: str, prefix: str) -> None:
    engine = sim(tokens_per_second=20.0)
    async with deployment(broker_url, prefix) as running:
        await running.worker(engine)
        stream = running.client.stream(model=MODEL, messages=BODY["messages"], max_tokens=2000, ignore_eos=True)

        async def read_and_cancel() -> None:
            async for event in stream:
                if isinstance(event, Delta) and event.offset == 3:
                    status = await stream.cancel()
                    assert status.state == "cancelled"

        with pytest.raises(JobCancelledError):
            await read_and_cancel()

        async def is_aborted() -> bool:
            return engine.num_running == 0

        await until(is_aborted, timeout_s=1.0)
        assert engine.num_aborted == 1
        assert await JobQueue(running.bus, MODEL).counts() == {}


async def test_cancelling_a_queued_job_frees_its_place(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running:
        await running.worker(sim(tokens_per_second=20.0), max_concurrency=1)
        busy = running.client.stream(model=MODEL, messages=BODY["messages"], max_tokens=40, ignore_eos=True)
        events = aiter(busy)
        assert isinstance(await anext(events), Accepted)
        assert isinstance(await anext(events), Started)
        queued = running.client.stream(model=MODEL, **BODY)
        accepted = await anext(aiter(queued))
        assert isinstance(accepted, Accepted)
        assert (await running.client.status(queued.job)).state == "queued"
        assert (await queued.cancel()).state == "cancelled"
        assert sum((await JobQueue(running.bus, MODEL).counts()).values()) == 1
        with pytest.raises(JobCancelledError):
            async for _ in queued:
                pass
        rest = [event async for event in busy]
    assert isinstance(rest[-1], Done)


async def test_attaching_to_a_finished_job_gives_the_same_stream(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running:
        await running.worker()
        live = [event async for event in running.client.stream(model=MODEL, job_id="again", **BODY)]
        later = [event async for event in running.client.attach("again")]
        offsets = [event.offset for event in live if isinstance(event, Delta)]
        tail = [event async for event in running.client.attach("again", after=offsets[-2])]
    assert [event for event in later if isinstance(event, Delta | Done)] == [
        event for event in live if isinstance(event, Delta | Done)
    ]
    assert [event.offset for event in tail if isinstance(event, Delta)] == offsets[-2:]


async def test_an_unknown_job_is_not_found(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix) as running:
        for call in (running.client.status("nowhere"), running.client.cancel("nowhere")):
            with pytest.raises(RequestError) as caught:
                await call
            assert caught.value.code == "job_not_found"
        with pytest.raises(RequestError) as caught:
            async for _ in running.client.attach("nowhere"):
                pass
        assert caught.value.code == "job_not_found"
