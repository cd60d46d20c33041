"""A router is killed between acceptance and completion: nothing is lost, on a bare inbox neither."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import nats
from nats.aio.msg import Msg

import headrace.client
from headrace.client import Accepted, Delta, Done
from headrace.settings import Settings
from tests.deployment import header
from tests.processes import part, serving

MODEL = "sim-model"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 30, "ignore_eos": True}


async def test_streams_outlive_the_router_that_accepted_them(broker_url: str, prefix: str, tmp_path: Path) -> None:
    settings = Settings(prefix=prefix)
    worker = part(
        "serve", "worker", "--engine", "sim", "--model", MODEL, "-o", "tokens_per_second=30",
        url=broker_url, prefix=prefix, state_dir=tmp_path,
    )  # fmt: skip
    router = part("serve", "router", url=broker_url, prefix=prefix, state_dir=tmp_path)
    async with worker, router, headrace.client.connect(broker_url, settings=settings) as client:
        await serving(client, MODEL)
        nc = await nats.connect(broker_url)
        try:
            inbox = nc.new_inbox()
            bare = await nc.subscribe(inbox)
            await nc.publish(f"{prefix}.infer.default.chat.{MODEL}", json.dumps(BODY).encode(), reply=inbox)
            kinds = [header((await bare.next_msg(5)), "Headrace-Event") for _ in range(2)]
            assert kinds[0] == "accepted"  # the router's answer; what follows is the broker's own delivery

            events = aiter(client.stream(model=MODEL, **BODY))
            assert isinstance(await anext(events), Accepted)
            router.send_signal(signal.SIGKILL)
            assert await asyncio.wait_for(router.wait(), 5) == -signal.SIGKILL

            rest = [event async for event in events]
            assert isinstance(rest[-1], Done)
            assert rest[-1].text == "".join(event.text for event in rest if isinstance(event, Delta))
            assert rest[-1].usage is not None
            assert rest[-1].usage.completion_tokens == 30

            offset = 0
            while True:
                message = await bare.next_msg(10)
                kind = header(message, "Headrace-Event")
                if kind == "delta":
                    assert int(header(message, "Headrace-Offset")) == offset
                    offset += int(header(message, "Headrace-Count"))
                if kind == "done":
                    break
            assert offset == 30
        finally:
            await nc.close()


async def test_whoever_was_told_accepted_gets_an_end_on_a_bare_inbox_too(
    broker_url: str, prefix: str, tmp_path: Path
) -> None:
    """Many at once, so that the router is killed between many an answer and the delivery that follows it."""
    worker = part(
        "serve", "worker", "--engine", "sim", "--model", MODEL, "-o", "tokens_per_second=99", "-o", "kv_tokens=999999",
        url=broker_url, prefix=prefix, state_dir=tmp_path,
    )  # fmt: skip
    router = part("serve", "router", url=broker_url, prefix=prefix, state_dir=tmp_path)
    async with worker, router, headrace.client.connect(broker_url, settings=Settings(prefix=prefix)) as client:
        await serving(client, MODEL)
        nc = await nats.connect(broker_url)
        told: list[asyncio.Queue[str]] = []
        first = asyncio.Event()

        async def listen(inbox: str) -> None:
            seen: asyncio.Queue[str] = asyncio.Queue()
            told.append(seen)

            async def on_message(message: Msg) -> None:
                first.set()
                if (message.headers or {}).get("Status") is None:
                    seen.put_nowait(header(message, "Headrace-Event"))

            await nc.subscribe(inbox, cb=on_message)

        try:
            inboxes = [nc.new_inbox() for _ in range(40)]
            for inbox in inboxes:
                await listen(inbox)
            for inbox in inboxes:
                await nc.publish(f"{prefix}.infer.default.chat.{MODEL}", json.dumps(BODY).encode(), reply=inbox)
            await asyncio.wait_for(first.wait(), 5)
            router.send_signal(signal.SIGKILL)
            assert await asyncio.wait_for(router.wait(), 5) == -signal.SIGKILL
            await nc.flush()
            answered = [seen for seen in told if not seen.empty()]
            assert answered
            async with asyncio.timeout(120):
                for seen in answered:
                    assert await seen.get() == "accepted"
                    while await seen.get() != "done":
                        pass
        finally:
            await nc.close()
