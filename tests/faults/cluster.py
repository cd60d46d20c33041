"""A cluster of three nats-servers on loopback, whose nodes can be killed, started again and put into lame duck."""

import asyncio
import contextlib
import json
import signal
import socket
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headrace.bus.connection import Bus
from headrace.bus.server import find_nats_server
from headrace.errors import BrokerError
from headrace.lifecycle import ChildProcess
from tests.deployment import until

__all__ = ["NODES", "Cluster"]

NODES = ("n1", "n2", "n3")
_HEALTHY_WITHIN_S = 30.0
_LAME_DUCK_GRACE_S = 1
_LAME_DUCK_S = 30


class Cluster:
    """Three nodes with JetStream, running inside the block and reachable at `url` and from each other's notices."""

    def __init__(self, state_dir: Path) -> None:
        self._dir = state_dir
        ports = iter(_free_ports(3 * len(NODES)))
        self._ports = {node: (next(ports), next(ports), next(ports)) for node in NODES}
        self._children: dict[str, ChildProcess] = {}
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        for node in NODES:
            await self._spawn(node)
        for node in NODES:
            await self.until_healthy(node)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def url_of(self, node: str) -> str:
        """Where clients reach one node; they learn of the others from it."""
        return f"nats://127.0.0.1:{self._ports[node][0]}"

    async def kill(self, node: str) -> None:
        """SIGKILL."""
        self._children[node].send_signal(signal.SIGKILL)
        await self._children[node].wait()

    async def start(self, node: str) -> None:
        """Start a node that ended, on its own store, and wait until it has caught up."""
        await self._spawn(node)
        await self.until_healthy(node)

    def lame_duck(self, node: str) -> None:
        """Ask a node to give up its leaderships, send its clients away one by one, and end."""
        self._children[node].send_signal(signal.SIGUSR2)

    async def leader_of(self, bus: Bus, stream: str) -> str:
        """The node that leads a stream now."""
        found: list[str] = []

        async def has_leader() -> bool:
            with contextlib.suppress(BrokerError):
                info: dict[str, Any] = json.loads(await bus.api(f"STREAM.INFO.{stream}"))
                found[:] = [info.get("cluster", {}).get("leader", "")]
            return bool(found and found[0])

        await until(has_leader, timeout_s=_HEALTHY_WITHIN_S)
        return found[0]

    async def until_healthy(self, node: str) -> None:
        """Wait until a node's streams and consumers are current."""
        await until(lambda: _is_healthy(self._ports[node][1]), timeout_s=_HEALTHY_WITHIN_S)

    async def _spawn(self, node: str) -> None:
        path = self._dir / f"{node}.conf"
        path.write_text(json.dumps(self._config(node)))
        child = ChildProcess([str(find_nats_server()), "-c", str(path)], name=node, death_signal=signal.SIGKILL)
        self._children[node] = await self._stack.enter_async_context(child)

    def _config(self, node: str) -> dict[str, Any]:
        client, http, cluster = self._ports[node]
        return {
            "server_name": node,
            "listen": f"127.0.0.1:{client}",
            "http": f"127.0.0.1:{http}",
            "lame_duck_grace_period": f"{_LAME_DUCK_GRACE_S}s",
            "lame_duck_duration": f"{_LAME_DUCK_S}s",
            "jetstream": {"store_dir": str(self._dir / node), "sync_interval": "1s"},
            "cluster": {
                "name": "C",
                "listen": f"127.0.0.1:{cluster}",
                "routes": [f"nats-route://127.0.0.1:{ports[2]}" for ports in self._ports.values()],
            },
        }


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


async def _is_healthy(port: int) -> bool:
    try:
        async with asyncio.timeout(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n")
                return (await reader.readline()).split(b" ")[1:2] == [b"200"]
            finally:
                writer.close()
                await writer.wait_closed()
    except (OSError, TimeoutError):
        return False
