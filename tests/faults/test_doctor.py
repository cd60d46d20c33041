"""`headrace doctor` on a cluster: streams on one node only, then on three, then a node that is lost."""

import json
from pathlib import Path

import msgspec
import pytest

from headrace.bus.connection import Bus, connect
from headrace.bus.provision import provision
from headrace.doctor.finding import Check, Finding
from headrace.errors import BrokerError
from headrace.settings import Settings
from tests.commands import Headrace
from tests.deployment import until
from tests.faults.cluster import Cluster


async def findings(url: str, prefix: str, state_dir: Path, *, replicas: int) -> list[Finding]:
    told = Headrace(url, prefix, HEADRACE_STATE_DIR=str(state_dir), HEADRACE_REPLICAS=str(replicas))
    return msgspec.json.decode((await told.run("doctor", "--json", code=1)).stdout, type=list[Finding])


def ids(found: list[Finding], severity: str) -> set[Check]:
    return {each.id for each in found if each.severity == severity}


async def are_current(bus: Bus) -> bool:
    """Whether every replica of the log and of the jobs has caught up."""
    for stream in (bus.names.log_stream(0), bus.names.jobs_stream("m")):
        try:
            cluster = json.loads(await bus.api(f"STREAM.INFO.{stream}")).get("cluster", {})
        except BrokerError:
            return False
        if not cluster.get("leader") or not all(each.get("current") for each in cluster.get("replicas", [])):
            return False
    return True


@pytest.mark.timeout(150)
async def test_replicas_and_leaders_of_a_cluster(prefix: str, tmp_path: Path) -> None:
    settings = Settings(prefix=prefix, state_dir="unused", request_timeout_s=5, retry_for_s=30)
    found: list[Finding] = []

    async def come(severity: str, *checks: Check, replicas: int) -> None:
        """Wait until these are found, which the cluster may take a while to tell."""

        async def are_found() -> bool:
            found[:] = await findings(url, prefix, tmp_path, replicas=replicas)
            return set(checks) <= ids(found, severity)

        await until(are_found, timeout_s=60)

    async with Cluster(tmp_path) as cluster:
        url = cluster.url_of("n1")
        async with connect(url, settings, name="test") as bus:
            await provision(bus, models=("m",))
            await come("warning", Check.REPLICAS, replicas=1)

            thrice = Bus(bus.nc, msgspec.structs.replace(settings, replicas=3))
            await provision(thrice, models=("m",))
            await until(lambda: are_current(thrice), timeout_s=60)
            await come("ok", Check.REPLICAS, Check.STREAM_LEADER, Check.STREAM_SETTINGS, replicas=3)
            await come("warning", Check.STREAM_SETTINGS, replicas=1)

            await cluster.kill("n3")

            async def is_seen() -> bool:
                found[:] = await findings(url, prefix, tmp_path, replicas=3)
                return any(each.id == Check.STREAM_LEADER and "n3" in each.found for each in found)

            await until(is_seen, timeout_s=60)
            assert Check.BROKER in ids(found, "ok")
