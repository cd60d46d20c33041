"""The gateway as HTTP: what it refuses, what it says while one waits, and what it does when somebody leaves."""

import asyncio
import contextlib
import io
import json
import socket
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import pytest_asyncio

from headrace import metrics
from headrace.bus.overview import overview
from headrace.gateway import answers, lifecycle, protocol
from tests.deployment import MODEL, Deployment, Gateway, deployment, sim, until

HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
WITHIN_S = 30.0


class Http:
    """A plain HTTP client of one gateway."""

    def __init__(self, session: aiohttp.ClientSession, gateway: Gateway) -> None:
        self.gateway = gateway
        self._session = session

    def post(self, body: Any, *, path: str = "/v1/chat/completions", **headers: str) -> Any:
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self._session.post(self.gateway.url + path, data=data, headers=named)

    def get(self, path: str) -> Any:
        return self._session.get(self.gateway.url + path)

    def head(self, path: str) -> Any:
        return self._session.head(self.gateway.url + path)

    def delete(self, path: str) -> Any:
        return self._session.delete(self.gateway.url + path)


@contextlib.asynccontextmanager
async def asking(gateway: Gateway) -> AsyncIterator[Http]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WITHIN_S)) as session:
        yield Http(session, gateway)


@pytest_asyncio.fixture
async def running(broker_url: str, prefix: str) -> AsyncIterator[Deployment]:
    async with deployment(broker_url, prefix) as started:
        yield started


@pytest_asyncio.fixture
async def http(running: Deployment, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Http]:
    monkeypatch.setattr(lifecycle, "_SEND_BUFFER_BYTES", 4096)  # so that little is enough to stall a connection
    async with asking(await running.gateway()) as client:
        yield client


async def frames(response: Any) -> list[str]:
    """The lines of an event stream that say something."""
    return [line for line in (await response.text()).split("\n") if line]


async def next_line(response: Any, beginning: str) -> str:
    """The next line with this beginning."""
    async for raw in response.content:
        if (line := raw.decode().rstrip("\n")).startswith(beginning):
            return str(line)
    raise AssertionError(f"the stream ended without a line {beginning!r}")


async def refused(response: Any) -> tuple[int, str]:
    body = await response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return response.status, body["error"]["code"]


def text_of(lines: list[str]) -> str:
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


async def is_state(running: Deployment, job: str, state: str) -> bool:
    with contextlib.suppress(Exception):
        return (await running.client.status(job)).state == state
    return False


# Bodies


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b"\xff\xfe{}", 400, "invalid_json"),
        (b"{}", 400, "invalid_value"),
        (b'{"model":null}', 400, "invalid_value"),
        (b'{"a":' * 500 + b"1" + b"}" * 500, 400, "json_too_deep"),
        (b'{"model":"m","seed":123456789012345678901234567890}', 400, "invalid_value"),
    ],
)
async def test_bodies_that_are_wrong(http: Http, body: bytes, status: int, code: str) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
        async with http.post(body, path=path) as response:
            assert await refused(response) == (status, code)


async def test_the_error_does_not_repeat_what_was_sent(running: Deployment, http: Http) -> None:  # REQ-8
    await running.worker()
    async with http.post({"model": MODEL, "messages": [{"role": 7, "content": "canary"}] * 12_000}) as response:
        text = await response.text()
        assert response.status == 400
        assert len(text) < 4096
        assert "canary" not in text


async def test_a_body_that_is_too_large(running: Deployment, http: Http) -> None:  # REQ-9, NAT-6
    await running.worker()
    large = json.dumps({"model": MODEL, "prompt": "x" * (9 << 20)}).encode()

    async def in_chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(large), 65_536):
            yield large[at : at + 65_536]

    async with http.post(large, path="/v1/completions") as response:
        assert await refused(response) == (413, "request_too_large")
    async with http._session.post(f"{http.gateway.url}/v1/completions", data=in_chunks()) as response:
        assert await refused(response) == (413, "request_too_large")
    async with http.post({**HELLO, "max_tokens": 2}) as response:
        assert response.status == 200


async def test_content_types_do_not_matter_but_encodings_do(running: Deployment, http: Http) -> None:
    await running.worker()
    async with http.post(HELLO, content_type="application/x-www-form-urlencoded") as response:
        assert response.status == 200
    async with http.post(HELLO, content_encoding="gzip") as response:
        assert await refused(response) == (400, "invalid_value")


# Heads


def port_of(gateway: Gateway) -> int:
    return int(gateway.url.rpartition(":")[2])


async def raw(gateway: Gateway, request: bytes) -> bytes:
    """What comes back for bytes that no HTTP library would send, until the gateway closes or a moment has passed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gateway))
    try:
        writer.write(request)
        await writer.drain()
        async with asyncio.timeout(WITHIN_S):
            return await reader.read(65_536)
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + b"a" * (1 << 20) + b"\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + b"a" * (1 << 20),
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
    ],
    ids=["long", "endless", "url", "many"],
)
async def test_heads_that_are_too_large(http: Http, head: bytes) -> None:  # REQ-5
    answer = await raw(http.gateway, head)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"code":"header_too_large"' in answer
    async with http.get("/healthz") as response:
        assert response.status == 200


async def test_a_head_that_does_not_end_costs_the_connection(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_HEAD_S", 0.3)
    for head in (b"", b"GET /healthz HTTP/1.1\r\nHost:"):
        assert await raw(http.gateway, head) == b""


REFUSED_HEAD = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n"


async def test_a_body_that_trickles_on_after_the_answer_costs_the_connection(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_DRAIN_S", 0.5)
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(http.gateway))

    async def trickle() -> None:
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)

    writer.write(REFUSED_HEAD)
    trickling = asyncio.create_task(trickle())
    try:
        async with asyncio.timeout(WITHIN_S):
            assert (await reader.readline()).startswith(b"HTTP/1.1 404")
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
    finally:
        trickling.cancel()
        await asyncio.wait([trickling])
        writer.close()


async def test_a_large_body_is_not_read_for_ever_after_the_answer(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_MAX_DRAINED_BYTES", 1_000_000)
    monkeypatch.setattr(protocol, "_DRAIN_S", 600.0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(http.gateway))
    writer.write(REFUSED_HEAD)
    async with asyncio.timeout(WITHIN_S):
        assert (await reader.readline()).startswith(b"HTTP/1.1 404")
        with contextlib.suppress(ConnectionError):
            while True:  # until the timeout, unless the gateway closes
                writer.write(b"x" * 65_536)
                await writer.drain()
    writer.close()


async def test_a_connection_whose_body_ends_soon_after_the_answer_is_used_again(http: Http) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(http.gateway))
    async with asyncio.timeout(WITHIN_S):
        for _ in range(2):
            writer.write(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            await reader.readexactly(int(length.partition(b":")[2]))
            writer.write(b"0123456789")
    writer.close()


async def test_a_client_that_takes_nothing_for_long_loses_its_connection_and_its_job(
    running: Deployment, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_STALL_S", 0.5)
    await running.worker(
        sim(default_tokens=6000, tokens_per_second=1000, tokens_per_chunk=8, max_model_len=10_000, token_ids=True)
    )
    body = json.dumps({**HELLO, "n": 4, "stream": True, "max_tokens": 6000}).encode()
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", int(http.gateway.url.rpartition(":")[2])))
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Headrace-Id: stalled\r\n"
        await loop.sock_sendall(connection, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await until(lambda: is_state(running, "stalled", "cancelled"), timeout_s=WITHIN_S)


async def test_an_offer_of_another_protocol_is_ignored(running: Deployment, http: Http) -> None:
    await running.worker()
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQAoAAAAAIAAAAA"}
    for _ in range(2):
        async with http.post({**HELLO, "max_tokens": 2}, **offer) as response:
            assert response.status == 200


async def test_what_is_no_http(http: Http) -> None:
    answer = await raw(http.gateway, b"\x16\x03\x01\x02\x00\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"type":"invalid_request_error"' in answer


async def test_request_ids(running: Deployment, http: Http) -> None:  # REQ-4, REQ-5
    await running.worker()
    async with http.post(HELLO, x_request_id="dup-1") as one, http.post(HELLO, x_request_id="dup-1") as two:
        assert one.headers["x-request-id"] == two.headers["x-request-id"] == "dup-1"
        assert one.headers["x-headrace-job"] != two.headers["x-headrace-job"]
        assert (await one.json())["id"] != (await two.json())["id"]
    for bad in ("*.>", "a" * 200, "a b"):
        async with http.post(HELLO, x_request_id=bad) as response:
            assert response.status == 200
            assert response.headers["x-request-id"].startswith("req_")
            assert bad not in await response.text()


async def test_urls_and_methods_that_are_not_there(http: Http) -> None:
    async with http.get("/v1/nothing") as response:
        assert await refused(response) == (404, "unknown_url")
    async with http.get("/v1/chat/completions") as response:
        assert await refused(response) == (405, "method_not_allowed")


# Lanes


@pytest.mark.parametrize(
    ("body", "headers", "lane"),
    [
        ({"service_tier": "priority"}, {}, "high"),
        ({"service_tier": "flex"}, {}, "low"),
        ({"service_tier": "default"}, {}, "normal"),
        ({"service_tier": "auto"}, {}, "normal"),
        ({}, {"x_headrace_priority": "low"}, "low"),
        ({"service_tier": "flex"}, {"x_headrace_priority": "high"}, "high"),
    ],
)
async def test_lanes(running: Deployment, http: Http, body: dict[str, Any], headers: dict[str, str], lane: str) -> None:
    await running.worker(sim(default_tokens=4000, tokens_per_second=10), max_concurrency=1)
    async with http.post({**HELLO, "max_tokens": 500, "stream": True}) as first:
        await next_line(first, "data: ")
        async with http.post({**HELLO, **body, "stream": True}, **headers) as second:
            assert second.status == 200
            waiting = {queue.lane: queue.queued for queue in (await overview(running.bus)).queues if queue.queued}
            assert waiting == {lane: 1}


# Streams


async def test_a_stream_is_events_and_nothing_else(running: Deployment, http: Http) -> None:  # API-2
    await running.worker()
    async with http.post({**HELLO, "max_tokens": 3, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["cache-control"] == "no-cache"
        lines = await frames(response)
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith(("data: {", ": ")) for line in lines[:-1])
    offsets = [json.loads(line[6:])["headrace"]["offset"] for line in lines if line.startswith("data: {")]
    assert offsets == sorted(offsets)  # what comes together shares a frame: tokens, and the end with the last of them
    assert (offsets[0] > 0, offsets[-1]) == (True, 3)


async def test_token_ids_stay_inside(running: Deployment, http: Http) -> None:
    await running.worker(sim(token_ids=True))
    async with http.post({**HELLO, "max_tokens": 3, "stream": True}) as response:
        text = await response.text()
    assert "token_ids" not in text
    assert len(text_of(text.split("\n")).split()) == 3


async def test_who_waits_is_told_where_it_stands(
    running: Deployment, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "_COMMENT_EVERY_S", 0.2)
    await running.worker(sim(default_tokens=4000, tokens_per_second=50), max_concurrency=1)
    async with (
        contextlib.AsyncExitStack() as stack,
        http.post({**HELLO, "max_tokens": 120, "stream": True}) as first,
    ):
        await next_line(first, "data: ")
        async with http.post({**HELLO, "max_tokens": 1, "stream": True}) as second:
            while not (await next_line(second, ": ")).startswith(": queued, position 0"):
                pass  # the first counts as one that waits until its worker's heartbeat says that it runs
            third = await stack.enter_async_context(http.post({**HELLO, "max_tokens": 1, "stream": True}))
            for _ in range(2):
                assert (await next_line(third, ": ")).startswith(": queued, position 1")
            assert await next_line(third, "data: {")


async def test_a_slow_first_token_is_no_silence(
    running: Deployment, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:  # API-2
    monkeypatch.setattr(answers, "_COMMENT_EVERY_S", 0.2)
    await running.worker(sim(ttft_s=2.0))
    async with http.post({**HELLO, "max_tokens": 1, "stream": True}) as response:
        lines = await frames(response)
    assert lines.count(": running") >= 2
    assert lines[-1] == "data: [DONE]"


# Leaving


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_a_client_that_leaves_ends_its_job(running: Deployment, http: Http, is_streaming: bool) -> None:  # STR-3
    engine = sim(default_tokens=4000, tokens_per_second=20)
    await running.worker(engine)
    await leave_after_begin(http, engine, is_streaming=is_streaming)
    began = asyncio.get_running_loop().time()
    await until(lambda: is_state(running, "left", "cancelled"))
    await until(lambda: aborted(engine))
    assert asyncio.get_running_loop().time() - began < 2.0


async def test_who_leaves_before_the_answer_is_counted_apart(running: Deployment, http: Http) -> None:
    def counted() -> dict[str, float]:
        return {sample.labels["status"]: sample.value for sample in metrics.HTTP_REQUESTS.samples()}

    async def is_open() -> bool:
        return any(sample.value for sample in metrics.HTTP_OPEN.samples())

    async def are_counted(number: float) -> bool:
        return counted().get("499", 0.0) == before.get("499", 0.0) + number

    before = counted()
    engine = sim(default_tokens=4000, tokens_per_second=20)
    await running.worker(engine)
    await leave_after_begin(http, engine, is_streaming=False)
    await until(lambda: are_counted(1))
    _, writer = await asyncio.open_connection(*urlsplit(http.gateway.url).netloc.split(":"))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    await until(is_open)
    writer.close()
    await until(lambda: are_counted(2))
    assert {**counted(), "499": 0.0} == {**before, "499": 0.0}


async def leave_after_begin(http: Http, engine: Any, *, is_streaming: bool) -> None:
    request = http.post({**HELLO, "max_tokens": 4000, "stream": is_streaming}, x_headrace_id="left")
    if is_streaming:
        async with request as response:
            for _ in range(3):
                await next_line(response, "data: ")
            response.close()
        return
    waiting = asyncio.create_task(request.__aenter__())

    async def is_running() -> bool:
        return bool(engine.num_running)

    await until(is_running)
    waiting.cancel()
    await asyncio.wait([waiting])


async def aborted(engine: Any) -> bool:
    return bool(engine.num_aborted == 1 and engine.num_running == 0)


async def test_a_client_that_leaves_the_queue_is_out_of_it(running: Deployment, http: Http) -> None:
    await running.worker(sim(default_tokens=4000, tokens_per_second=20), max_concurrency=1)
    async with http.post({**HELLO, "max_tokens": 4000, "stream": True}) as first:
        await next_line(first, "data: ")
        async with http.post({**HELLO, "stream": True}, x_headrace_id="queued") as second:
            assert (await running.client.status("queued")).state == "queued"
            second.close()
        await until(lambda: is_state(running, "queued", "cancelled"))

        async def is_empty() -> bool:
            return not any(queue.queued for queue in (await overview(running.bus)).queues)

        await until(is_empty)


async def test_leaving_a_job_of_somebody_else_leaves_it_alone(running: Deployment, http: Http) -> None:
    await running.worker(sim(default_tokens=4000, tokens_per_second=40))
    body = {**HELLO, "max_tokens": 60, "stream": True}
    async with http.post(body, x_headrace_id="shared") as first:
        await next_line(first, "data: ")
        async with http.post(body, x_headrace_id="shared") as second:
            await next_line(second, "data: ")
            second.close()
        async with http.get("/v1/jobs/shared/stream") as third:
            await next_line(third, "data: ")
            third.close()
        lines = await frames(first)
    assert lines[-1] == "data: [DONE]"
    assert "error" not in lines[-2]


# Jobs


async def test_a_job_by_its_id(running: Deployment, http: Http) -> None:
    await running.worker(sim(default_tokens=4000, tokens_per_second=20))
    async with http.post({**HELLO, "max_tokens": 4000, "stream": True}) as response:
        job = response.headers["x-headrace-job"]
        await next_line(response, "data: ")
        async with http.get(f"/v1/jobs/{job}") as shown:
            status = await shown.json()
            assert (status["job"], status["state"], status["attempt"]) == (job, "running", 1)
        async with http.delete(f"/v1/jobs/{job}") as ended:
            assert (await ended.json())["state"] == "cancelled"
        *_, error, last = await frames(response)
        assert json.loads(error[6:])["error"]["code"] == "job_failed"
        assert last == "data: [DONE]"
    for path in ("/v1/jobs/nothing", "/v1/jobs/nothing/stream", "/v1/jobs/a.b"):
        async with http.get(path) as response:
            status, code = await refused(response)
            assert (status, code) in {(404, "job_not_found"), (400, "invalid_value")}


async def test_the_head_of_a_stream_does_not_wait_for_its_end(running: Deployment, http: Http) -> None:
    await running.worker(sim(default_tokens=4000, tokens_per_second=5))
    async with http.post({**HELLO, "max_tokens": 4000, "stream": True}, x_headrace_id="long") as response:
        await next_line(response, "data: ")
        async with http.head("/v1/jobs/long/stream") as head:
            assert head.status == 200
            assert head.headers["content-type"].startswith("text/event-stream")
            assert head.headers["x-headrace-job"] == "long"
        await next_line(response, "data: ")
    async with http.head("/v1/jobs/nobody/stream") as head:
        assert head.status == 404


async def test_a_stream_read_anew_after_an_offset(running: Deployment, http: Http) -> None:
    await running.worker()
    async with http.post({**HELLO, "max_tokens": 6, "stream": True}, x_headrace_id="again") as response:
        lines = await frames(response)
    whole = text_of(lines)
    after = json.loads(next(line for line in lines if line.startswith("data: {"))[6:])["headrace"]["offset"]
    async with http.get("/v1/jobs/again/stream?after=0") as response:
        assert text_of(await frames(response)) == whole
    async with http.get(f"/v1/jobs/again/stream?after={after}&include_usage=true") as response:
        lines = await frames(response)
        assert text_of(lines).split() == whole.split()[after:]
        assert json.loads(lines[-2][6:])["usage"]["completion_tokens"] == 6
    async with http.get("/v1/jobs/again/stream?after=6") as response:
        assert text_of(await frames(response)) == ""
    async with http.get("/v1/jobs/again/stream?after=-1") as response:
        assert await refused(response) == (400, "invalid_value")


async def test_an_answer_that_was_not_streamed_is_read_as_one_chunk(running: Deployment, http: Http) -> None:
    await running.worker()
    async with http.post({**HELLO, "max_tokens": 6}, x_headrace_id="whole") as response:
        whole = (await response.json())["choices"][0]["message"]["content"]
    async with http.get("/v1/jobs/whole/stream") as response:
        assert text_of(await frames(response)) == whole


# Health and the end


async def test_nats_micro_finds_it_with_its_url(running: Deployment, http: Http) -> None:
    inbox = running.bus.new_inbox()
    subscription = await running.bus.subscribe(inbox)

    async def is_found() -> bool:
        """Asked again each time: it listens a moment before it is told of."""
        await running.bus.publish("$SRV.INFO.headrace-gateway", reply=inbox)
        message = await running.bus.next_message(subscription, 0.1)
        return bool(message and message.data and json.loads(message.data)["metadata"].get("url") == http.gateway.url)

    await until(is_found)
    await subscription.unsubscribe()


async def test_health(running: Deployment, http: Http) -> None:
    for path in ("/healthz", "/readyz"):
        async with http.get(path) as response:
            assert response.status == 200
    await running._parts[0].stop()  # the router
    async with http.get("/readyz") as response:
        assert response.status == 503
    async with http.get("/healthz") as response:
        assert response.status == 200


async def test_open_streams_come_to_their_end(running: Deployment, http: Http) -> None:
    await running.worker(sim(default_tokens=4000, tokens_per_second=20))
    async with http.post({**HELLO, "max_tokens": 20, "stream": True}) as response:
        await next_line(response, "data: ")
        stopping = asyncio.create_task(http.gateway.stop())
        lines = await frames(response)
    assert lines[-1] == "data: [DONE]"
    assert "error" not in lines[-2]
    await stopping


async def test_streams_that_outlast_the_grace_period_are_told(broker_url: str, prefix: str) -> None:
    async with deployment(broker_url, prefix, grace_s=0.5) as running:
        await running.worker(sim(default_tokens=4000, tokens_per_second=20))
        first, second = await running.gateway(), await running.gateway()
        async with asking(first) as http, asking(second) as other:
            async with http.post({**HELLO, "max_tokens": 60, "stream": True}) as response:
                job = response.headers["x-headrace-job"]
                await next_line(response, "data: ")
                whole = asyncio.create_task(answered(http))
                stopping = asyncio.create_task(first.stop())
                lines = await frames(response)
            assert json.loads(lines[-2][6:])["error"]["code"] == "shutting_down"
            assert lines[-1] == "data: [DONE]"
            status, retry_after = await whole
            assert (status, retry_after) in {(503, "1"), (0, "")}
            await stopping
            chunks = [json.loads(line[6:]) for line in lines if line.startswith('data: {"id"')]
            async with other.get(f"/v1/jobs/{job}/stream?after={chunks[-1]['headrace']['offset']}") as response:
                rest = await frames(response)
            assert rest[-1] == "data: [DONE]"
            assert "error" not in rest[-2]


async def answered(http: Http) -> tuple[int, str]:
    """Status and Retry-After of a request that does not stream; 0 where it was not taken any more."""
    try:
        async with http.post({**HELLO, "max_tokens": 4000}) as response:
            return response.status, response.headers["retry-after"]
    except aiohttp.ClientConnectionError:
        return 0, ""
