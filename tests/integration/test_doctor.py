"""`headrace doctor` against a real broker: a healthy deployment, and each of several broken ones."""

import asyncio
import contextlib
import json
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.bus.clock import format_time
from headrace.bus.connection import Bus, Stored, connect
from headrace.bus.credentials import new_credential
from headrace.bus.deadletters import write_dead_letter
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.jobqueue import JobQueue
from headrace.bus.keyvalue import Bucket
from headrace.bus.members import MONITOR, NOTICES, OPERATOR, ROUTER, Tls
from headrace.bus.securing import SecureDirectory
from headrace.bus.server import BrokerInfo, EmbeddedBroker
from headrace.bus.survey import list_streams
from headrace.cli.http import free_port
from headrace.doctor.finding import Check, Finding, Severity, has_error
from headrace.schemas.instances import HostBeat, host_key
from headrace.schemas.jobs import Job
from headrace.schemas.subjects import JobId, Names, QueueName, Tenant
from headrace.schemas.workers import Heartbeat
from headrace.settings import Settings
from tests.commands import Headrace
from tests.deployment import MODEL, deployment, sim, until
from tests.integration.test_bus_provision import server_without_jetstream
from tests.integration.test_secure_broker import certificate
from tests.secured import secured_broker

OVER_WITHIN_S = 25.0
"""Some 15 s, and what a busy machine adds."""
OF_THIS_MACHINE = {Check.DISK, Check.OPEN_FILES}
WITHIN_S = 60.0
NO_PART: dict[Check, Severity] = {
    Check.ROUTER: "error",
    Check.MONITOR: "error",
    Check.GATEWAY: "warning",
    Check.WORKERS: "warning",
}
WAITING = Job(
    tenant=Tenant("default"),
    job=JobId("j"),
    op="chat",
    model="m",
    body=b"{}",
    body_hash="h",
    accepted_at=1.0,
    queue_timeout_s=60,
    deadline_s=60,
    need_tokens=1,
)


class Doctor:
    """The command, against one deployment."""

    def __init__(self, url: str, prefix: str, state_dir: Path, **variables: str) -> None:
        self._headrace = Headrace(url, prefix, HEADRACE_STATE_DIR=str(state_dir), **variables)

    async def findings(self, *, code: int | None) -> list[Finding]:
        """What it finds; it must end with `code` (None: 0, or 1 if there is an error), and soon."""
        began = time.monotonic()
        result = await self._headrace.run("doctor", "--json", code=code)
        assert time.monotonic() - began < OVER_WITHIN_S
        found = msgspec.json.decode(result.stdout, type=list[Finding])
        assert result.exit_code == int(has_error(found))
        return found

    async def finding(self, check: Check, severity: Severity, *, code: int = 1) -> Finding:
        """The finding of that id and severity, which must come; on a busy machine an answer may be missing once."""
        found: list[Finding] = []

        async def is_found() -> bool:
            found[:] = await self.findings(code=None)
            return any((each.id, each.severity) == (check, severity) for each in found)

        await until(is_found, timeout_s=WITHIN_S)
        assert has_error(found) is (code == 1)
        return next(each for each in found if (each.id, each.severity) == (check, severity))

    async def settles(self, expected: dict[Check, Severity]) -> None:
        """What is not well comes to be just that, apart from what this machine may lack."""

        async def is_so() -> bool:
            found = await self.findings(code=None)
            not_well = {each.id: each.severity for each in found if each.severity != "ok"}
            return {check: not_well[check] for check in not_well.keys() - OF_THIS_MACHINE} == expected

        await until(is_so, timeout_s=WITHIN_S)


@pytest.fixture
def doctor(broker: BrokerInfo, prefix: str, tmp_path: Path) -> Doctor:
    return Doctor(broker.url, prefix, tmp_path, HEADRACE_NATS_SYSTEM_URL=broker.system_url)


async def contents(bus: Bus) -> dict[str, Any]:
    """What every stream of the deployment holds."""
    found = {}
    for name in await list_streams(bus):
        if bus.names.upper in name:
            info = json.loads(await bus.api(f"STREAM.INFO.{name}"))
            found[name] = (info["config"], info["state"]["last_seq"], info["state"]["consumer_count"])
    return found


# well


async def test_a_healthy_deployment_has_no_finding(
    broker: BrokerInfo, prefix: str, doctor: Doctor, tmp_path: Path
) -> None:
    async with deployment(broker.url, prefix, state_dir=str(tmp_path), nats_system_url=broker.system_url) as running:
        await running.monitor()
        await running.gateway()
        await running.worker(sim())
        await running.client.complete(model=MODEL, prompt="x", max_tokens=2)

        await doctor.settles({})
        found = {each.id: each.found for each in await doctor.findings(code=0)}
    assert found[Check.SYSTEM_ACCOUNT] == "notices of disconnects come"
    assert "1 worker: 1 Ready" in found[Check.WORKERS]
    assert {Check.ROUTER, Check.MONITOR, Check.GATEWAY, Check.VERSIONS, Check.CLOCK, Check.PERMISSIONS} <= found.keys()


async def test_it_writes_nothing(bus: Bus, doctor: Doctor) -> None:
    before = await contents(bus)
    await doctor.findings(code=1)
    assert await contents(bus) == before


# broken


async def test_nothing_provisioned(broker: BrokerInfo, prefix: str, doctor: Doctor) -> None:
    found = await doctor.finding(Check.PROVISIONED, "error")
    assert found.remedy == "headrace provision"
    assert "9 of 9" in found.found
    assert Check.UNANSWERED not in {each.id for each in await doctor.findings(code=1)}
    async with connect(broker.url, Settings(prefix=prefix, state_dir="unused"), name="test") as bus:
        assert await contents(bus) == {}


async def test_no_part_at_all(bus: Bus, doctor: Doctor) -> None:
    await doctor.settles(NO_PART)


async def test_no_monitor(broker: BrokerInfo, prefix: str, doctor: Doctor) -> None:
    async with deployment(broker.url, prefix) as running:
        await running.worker(sim())
        await doctor.settles({Check.MONITOR: "error", Check.GATEWAY: "warning"})


async def test_a_monitor_of_another_deployment_does_not_count(
    broker: BrokerInfo, prefix: str, bus: Bus, doctor: Doctor
) -> None:
    async with deployment(broker.url, f"{prefix}.b") as other:
        await other.monitor()
        await doctor.settles(NO_PART)
        for name in await list_streams(bus):
            if Names(f"{prefix}.b").upper in name:
                await bus.api(f"STREAM.DELETE.{name}")


async def test_a_monitor_without_a_system_account(broker: BrokerInfo, prefix: str, tmp_path: Path) -> None:
    doctor = Doctor(broker.url, prefix, tmp_path)
    async with deployment(broker.url, prefix) as running:
        await running.monitor()
        await running.worker(sim())
        found = await doctor.finding(Check.SYSTEM_ACCOUNT, "warning", code=0)
    assert "1 of 1 monitors" in found.found
    assert "HEADRACE_NATS_SYSTEM_URL" in found.remedy


async def test_a_user_that_is_not_the_systems(bus: Bus, broker: BrokerInfo, prefix: str, tmp_path: Path) -> None:
    doctor = Doctor(broker.url, prefix, tmp_path, HEADRACE_NATS_SYSTEM_URL=broker.url)
    found = await doctor.finding(Check.SYSTEM_ACCOUNT, "warning")
    assert "told nothing of a connection" in found.found


async def test_workers_that_no_host_runs_or_has_room_for(
    bus: Bus, broker: BrokerInfo, prefix: str, doctor: Doctor
) -> None:
    await Headrace(broker.url, prefix).run("models", "add", "m", "--engine", "sim", "--memory", "1GiB", code=0)
    found = await doctor.finding(Check.HOSTS, "error")
    assert "1 worker wanted, of m" in found.found
    host = msgspec.json.encode(HostBeat(host="h", epoch="e"))
    await Bucket(bus, bus.names.instances_bucket).put(host_key("h"), host, expected_revision=0)
    found = await doctor.finding(Check.WORKERS_MISSING, "error")
    assert "no host has a GPU" in found.found


async def test_a_stream_with_a_wrong_setting(bus: Bus, doctor: Doctor) -> None:
    stream = bus.names.log_stream(0)
    config = json.loads(await bus.api(f"STREAM.INFO.{stream}"))["config"]
    await bus.api(f"STREAM.UPDATE.{stream}", {**config, "allow_direct": False})
    found = await doctor.finding(Check.STREAM_SETTINGS, "error")
    assert f"stream {stream}: allow_direct is false, should be true" in found.found
    assert "headrace provision" in found.remedy


async def test_a_paused_queue_that_nobody_serves(bus: Bus, doctor: Doctor) -> None:
    queue = QueueName()
    await bus.sync_clock()
    async with JobQueue(bus, "m") as jobs:
        await jobs.ensure_consumer(queue)
        now = bus.clock.now()
        job = msgspec.structs.replace(WAITING, accepted_at=now, queue_timeout_s=5)
        assert isinstance(await jobs.publish(job, queue, {}), Stored)
    until_then = format_time(now + 3600)
    await bus.api(f"CONSUMER.PAUSE.{jobs.stream}.{queue.consumer}", {"pause_until": until_then})
    assert "1 request, the oldest for" in (await doctor.finding(Check.QUEUE_UNSERVED, "error")).found
    paused = await doctor.finding(Check.QUEUE_PAUSED, "error")
    assert paused.remedy == f"nats consumer resume {jobs.stream} {queue.consumer}"
    expiring = await doctor.finding(Check.EXPIRING, "error")  # it had 5 s, and nobody ended it
    assert "job j of tenant default" in expiring.found


async def test_a_strangers_consumer(bus: Bus, doctor: Doctor) -> None:
    stream = bus.names.jobs_stream("m")
    config = {"durable_name": "theirs", "ack_policy": "explicit"}
    await bus.api(f"CONSUMER.DURABLE.CREATE.{stream}.theirs", {"stream_name": stream, "config": config})
    found = await doctor.finding(Check.FOREIGN_CONSUMER, "error")
    assert found.remedy == f"nats consumer rm {stream} theirs"


async def test_a_worker_that_failed(bus: Bus, doctor: Doctor) -> None:
    beat = Heartbeat(worker="w1", epoch="e", state="Failed", model="m", reason="CUDA is gone", interval_s=30)
    assert isinstance(await WorkersBucket(bus).put(beat, expected_revision=0, ttl_s=60), Stored)
    await doctor.finding(Check.WORKER_HEARTBEAT, "warning")
    assert "CUDA is gone" in (await doctor.finding(Check.WORKER_STATE, "error")).found


async def test_a_key_of_the_configuration_that_cannot_be_read(bus: Bus, doctor: Doctor) -> None:
    bucket = Bucket(bus, bus.names.config_bucket)
    assert isinstance(await bucket.put("tenants.acme", b"{", expected_revision=0), Stored)
    found = await doctor.finding(Check.CONFIG_KEY, "error")
    assert "tenants.acme is not JSON" in found.found


async def test_a_dead_letter(bus: Bus, doctor: Doctor) -> None:
    await write_dead_letter(bus, WAITING, reason="faults", attempts=3, faults=[])
    found = await doctor.finding(Check.DEAD_LETTERS, "warning")
    assert "headrace jobs dead" in found.remedy


# no broker to speak of


async def test_a_broker_without_jetstream(prefix: str, tmp_path: Path) -> None:
    async with server_without_jetstream(tmp_path) as url:
        found = await Doctor(url, prefix, tmp_path).finding(Check.JETSTREAM, "error")
    assert "jetstream" in found.remedy


async def test_a_broker_that_is_gone(prefix: str, tmp_path: Path) -> None:
    url = f"nats://127.0.0.1:{free_port('127.0.0.1', 0)}"
    found = await Doctor(url, prefix, tmp_path).finding(Check.BROKER, "error")
    assert url in found.found


@contextlib.asynccontextmanager
async def mute(first_words: bytes) -> AsyncIterator[str]:
    """A server that lets clients in, if it says anything at first, and is silent then."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(first_words)
            has_ponged = not first_words
            while words := await reader.read(4096):
                if b"PING" in words and not has_ponged:
                    writer.write(b"PONG\r\n")
                    has_ponged = True
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


INFO = b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576,"headers":true,"proto":1}\r\n'


@pytest.mark.parametrize("first_words", [b"", INFO], ids=["from the start", "once let in"])
async def test_a_mute_broker(first_words: bytes, prefix: str, tmp_path: Path) -> None:
    async with mute(first_words) as url:
        await Doctor(url, prefix, tmp_path).finding(Check.BROKER, "error")


# secured


async def test_a_secured_deployment_with_the_operators_credential(prefix: str, tmp_path: Path) -> None:
    async with secured_broker(tmp_path / "b", prefix, [], models=("m",)) as broker:
        variables = {
            "HEADRACE_NATS_CREDENTIALS": broker.credentials(OPERATOR),
            "HEADRACE_NATS_SYSTEM_CREDENTIALS": broker.credentials(NOTICES),
        }
        await Doctor(broker.url, prefix, tmp_path, **variables).settles(NO_PART)
        assert broker.violations() == []


async def test_what_another_credential_does_not_permit_is_said(prefix: str, tmp_path: Path) -> None:
    async with secured_broker(tmp_path / "b", prefix, [], models=("m",)) as broker:
        for member in (ROUTER, MONITOR):
            doctor = Doctor(broker.url, prefix, tmp_path, HEADRACE_NATS_CREDENTIALS=broker.credentials(member))
            found = await doctor.finding(Check.PERMISSIONS, "warning", code=0)
            assert "operator.nk" in found.remedy
            assert "limits of the account" in found.found


async def test_a_credential_that_the_broker_does_not_know(prefix: str, tmp_path: Path) -> None:
    file = tmp_path / "unknown.nk"
    file.write_text(new_credential(bytes(32))[0])
    file.chmod(stat.S_IRUSR)
    async with secured_broker(tmp_path / "b", prefix, []) as broker:
        for variables in ({}, {"HEADRACE_NATS_CREDENTIALS": str(file)}):
            await Doctor(broker.url, prefix, tmp_path, **variables).finding(Check.CREDENTIAL, "error")
    missing = {"HEADRACE_NATS_CREDENTIALS": str(tmp_path / "not-there.nk")}
    found = await Doctor(broker.url, prefix, tmp_path, **missing).finding(Check.CREDENTIAL, "error")
    assert "not-there.nk" in found.found


async def test_certificates_that_are_not_trusted_or_not_shown(prefix: str, tmp_path: Path) -> None:
    ca, cert, key = certificate(tmp_path)
    directory = SecureDirectory(tmp_path / "b" / "secure")
    directory.enrol(Names(prefix), [], tls=Tls(cert=str(cert), key=str(key), ca=str(ca), must_verify=True))
    async with EmbeddedBroker(tmp_path / "b", port=0, accounts=directory.accounts) as broker:
        variables = {"HEADRACE_NATS_CREDENTIALS": str(directory.file_of(OPERATOR))}
        found = await Doctor(broker.info.url, prefix, tmp_path, **variables).finding(Check.TLS, "error")
        assert "HEADRACE_NATS_TLS_CA" in found.remedy
        variables["HEADRACE_NATS_TLS_CA"] = str(ca)
        found = await Doctor(broker.info.url, prefix, tmp_path, **variables).finding(Check.TLS, "error")
        assert "HEADRACE_NATS_TLS_CERT" in found.found
        variables |= {"HEADRACE_NATS_TLS_CERT": str(cert), "HEADRACE_NATS_TLS_KEY": str(key)}
        await Doctor(broker.info.url, prefix, tmp_path, **variables).finding(Check.PROVISIONED, "error")


# the command


async def test_a_person_is_told_in_a_table_without_colours_where_there_is_no_terminal(
    bus: Bus, broker: BrokerInfo, prefix: str, tmp_path: Path
) -> None:
    result = await Headrace(broker.url, prefix, HEADRACE_STATE_DIR=str(tmp_path)).run("doctor", code=1)
    lines = result.stdout.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.split()[:2] == ["error", "router"]]
    assert lines[at + 1].strip() == "→ headrace serve router"
    assert "\x1b" not in result.output
    assert result.stderr == ""
    assert lines[-1].startswith("2 errors, ")
