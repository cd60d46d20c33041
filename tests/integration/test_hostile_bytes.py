"""What only a raw connection can send: subjects, replies and headers that are no text. Nobody goes deaf over them."""

import asyncio
from urllib.parse import urlsplit

import pytest

from tests.deployment import MODEL, deployment


def pub(subject: bytes, reply: bytes = b"") -> bytes:
    return b"PUB %s%s 2\r\n{}\r\n" % (subject, b" " + reply if reply else b"")


def hpub(subject: bytes, headers: bytes) -> bytes:
    return b"HPUB %s %d %d\r\n%s{}\r\n" % (subject, len(headers), len(headers) + 2, headers)


@pytest.mark.parametrize(
    "message",
    [
        pub(b"PREFIX.infer.default.chat.\xff", b"_INBOX.x.y"),
        pub(b"PREFIX.infer.default.chat.sim-model", b"_INBOX.\xff"),
        pub(b"PREFIX.status.default.abc", b"_INBOX.\xff\xfe"),
        hpub(b"PREFIX.status.default.abc", b"NATS/1.0"),
        hpub(b"PREFIX.status.default.abc", b"NATS/1.0 \xff\xff\xff\r\n\r\n"),
        hpub(b"PREFIX.infer.default.chat.sim-model", b"NATS/1.0\r\n\xff: \xff\r\nno colon\r\n\r\n"),
        pub(b"PREFIX.tokenize.sim-model", b"_INBOX.\xff"),
        pub(b"PREFIX.ctl.w1", b"_INBOX.\xff"),
        pub(b"PREFIX.wake.sim-model.default.\xff.x"),
        pub(b"$SRV.PING", b"_INBOX.\xff"),
        pub(b"_INBOX.default.\xff"),
    ],
)
async def test_the_next_request_is_served_at_once(broker_url: str, prefix: str, message: bytes) -> None:
    async with deployment(broker_url, prefix) as running:
        await running.worker(worker="w1")
        await send(broker_url, message.replace(b"PREFIX", prefix.encode()))
        async with asyncio.timeout(5):  # a deaf process takes ten seconds to notice
            assert (await running.client.complete(model=MODEL, prompt="still there?", max_tokens=2)).text


async def send(url: str, message: bytes) -> None:
    """Send bytes as they are and wait until the broker has taken them."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    async with asyncio.timeout(5):
        await reader.readline()
        writer.write(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n' + message + b"PING\r\n")
        while (await reader.readline()) != b"PONG\r\n":
            pass
    writer.close()
    await writer.wait_closed()
