"""The brokers of compose.yaml for real: three nodes on loopback addresses of their own, and a deployment on them."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import aiohttp
import pytest
import yaml

from headrace.bus.connection import connect
from headrace.bus.disconnects import Disconnect, disconnects
from headrace.bus.provision import provision
from headrace.bus.server import find_nats_server
from headrace.lifecycle import ChildProcess
from headrace.settings import Settings
from tests.deployment import deployment, sim, until
from tests.unit.test_deploy import ROOT, resolved

NODES = ("broker-1", "broker-2", "broker-3")
PASSWORD = "secret-7"


def address(node: str) -> str:
    """A loopback address that no other process of this machine is likely to use, for each node of this process."""
    return f"127.{100 + os.getpid() // 250 % 100}.{os.getpid() % 250 + 1}.{node[-1]}"


def configuration(node: str, folder: Path) -> str:
    given = {"BROKER_SYSTEM_PASSWORD": PASSWORD, "BROKER_ROUTE_PASSWORD": PASSWORD}
    text = resolved(yaml.safe_load((ROOT / "compose.yaml").read_text())["configs"]["broker"]["content"], **given)
    for each in NODES:
        text = text.replace(f"@{each}:", f"@{address(each)}:")
    text = text.replace("0.0.0.0:", f"{address(node)}:").replace("127.0.0.1:8222", f"{address(node)}:8222")
    return text.replace("/var/lib/headrace", str(folder))


@pytest.mark.timeout(90)
async def test_three_brokers_find_each_other_and_carry_a_deployment_without_one(tmp_path: Path, prefix: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        children = {}
        for node in NODES:
            folder = tmp_path / node
            folder.mkdir()
            (folder / "nats.conf").write_text(configuration(node, folder))
            argv = [str(find_nats_server()), "-c", str(folder / "nats.conf")]
            child = ChildProcess(argv, name=node, env={"BROKER_NAME": node}, stop_timeout_s=5)
            children[node] = await stack.enter_async_context(child)

        async def all_are_healthy() -> bool:
            with contextlib.suppress(aiohttp.ClientError):
                async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
                    for node in NODES:
                        async with session.get(f"http://{address(node)}:8222/healthz") as response:
                            if response.status != 200:
                                return False
                return True
            return False

        await until(all_are_healthy, timeout_s=40)
        url = f"nats://{address('broker-2')}:4222"
        settings = Settings(prefix=prefix, state_dir=str(tmp_path / "own"), replicas=3, grace_s=5.0, monitor_port=0)
        async with connect(url, settings, name="test") as bus:
            await provision(bus, models=("sim-model",))
        heard: asyncio.Queue[Disconnect] = asyncio.Queue(100)

        async def hear(notice: Disconnect) -> None:
            heard.put_nowait(notice)

        system_url = f"nats://sys:{PASSWORD}@{address('broker-3')}:4222"
        async with disconnects(system_url, settings, handler=hear):
            async with deployment(url, prefix, replicas=3, monitor_port=0) as running:
                await running.worker(sim(), worker="w1")
                assert (await running.client.complete(model="sim-model", prompt="x", max_tokens=3)).usage is not None
                children["broker-1"].send_signal(signal.SIGKILL)
                await children["broker-1"].wait()
                done = await running.client.complete(model="sim-model", prompt="x", max_tokens=3, deadline_s=40)
                assert done.usage is not None
            async with asyncio.timeout(10):
                await heard.get()
