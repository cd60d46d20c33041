"""The secured broker itself: TLS, tenants that come and go without a restart, the command for it, `headrace up`."""

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import headrace.client
from headrace.bus.batchget import batch_get
from headrace.bus.connection import Bus, connect
from headrace.bus.disconnects import Disconnect, disconnects
from headrace.bus.joblog import JobLog
from headrace.bus.members import MONITOR, NOTICES, OPERATOR, ROUTER, Tls
from headrace.bus.provision import ensure_jobs_stream
from headrace.bus.securing import SecureDirectory
from headrace.bus.server import EmbeddedBroker, discover, find_nats_server
from headrace.cli.app import command
from headrace.cli.stack import Plan, running_stack
from headrace.errors import BrokerUnavailableError
from headrace.monitor.tidying import tidying
from headrace.router import run_router
from headrace.schemas import events
from headrace.schemas.subjects import Names, service_inbox
from headrace.settings import Settings
from tests.deployment import until
from tests.secured import ACME, RIVAL, bare, secured_broker, worker


async def test_tenants_come_and_go_without_a_restart_and_nobody_else_notices(tmp_path: Path, prefix: str) -> None:
    ended: list[Disconnect] = []

    async def on_notice(notice: Disconnect) -> None:
        ended.append(notice)

    async with secured_broker(tmp_path, prefix, [ACME], models=("m",)) as broker:
        info = discover(tmp_path)
        assert info is not None
        assert info.credentials == broker.credentials(OPERATOR)
        system = broker.settings(MONITOR, nats_system_credentials=broker.credentials(NOTICES))
        assert system.system_url == broker.url
        async with (
            disconnects(broker.url, system, handler=on_notice),
            bare(broker, ACME, inbox_prefix="_INBOX.acme") as acme,
        ):
            broker.directory.enrol(broker.names, [RIVAL])
            os.kill(info.pid, signal.SIGHUP)

            async def is_let_in() -> bool:
                try:
                    async with bare(broker, RIVAL, inbox_prefix="_INBOX.rival") as rival:
                        return not await rival.is_deaf("_INBOX.rival.x")
                except Exception:  # not yet
                    return False

            await until(is_let_in)
            await acme.client.flush()
            assert acme.client.is_connected
            broker.directory.enrol(broker.names, [], removed=["tenant-acme"])
            os.kill(info.pid, signal.SIGHUP)

            async def is_cut() -> bool:
                return not acme.client.is_connected

            await until(is_cut)


async def test_a_wrong_credential_says_so_and_shows_nothing(tmp_path: Path, prefix: str) -> None:
    async with secured_broker(tmp_path, prefix, [ACME]) as broker:
        secret = Path(broker.credentials(ACME)).read_text()
        broker.directory.enrol(broker.names, [], removed=["tenant-acme"])
        stray = tmp_path / "stray.nk"
        stray.write_text(secret)
        info = discover(tmp_path)
        assert info is not None
        os.kill(info.pid, signal.SIGHUP)
        settings = Settings(prefix=prefix, nats_credentials=str(stray), retry_for_s=1)
        said: list[str] = []

        async def is_refused() -> bool:
            try:
                async with connect(broker.url, settings, name="test"):
                    return False
            except BrokerUnavailableError as error:
                said.append(str(error))
                return "uthorization" in said[-1]  # on a busy machine its time may be over before the broker's words

        await until(is_refused)
        assert f"does not know the credential {stray}" in said[-1]
        assert all(secret not in words for words in said)
        with pytest.raises(BrokerUnavailableError, match=r"lets nobody in without a credential: .*_NATS_CREDENTIALS"):
            async with connect(broker.url, Settings(prefix=prefix, retry_for_s=2), name="test"):
                pass


async def test_what_a_credential_may_not_is_said(tmp_path: Path, prefix: str) -> None:
    """A worker whose model's stream nobody made, and one that is told another model than its credential's."""
    async with secured_broker(tmp_path, prefix, [worker("w1", "m")]) as broker:
        settings = broker.settings(worker("w1", "m"), retry_for_s=1, request_timeout_s=1)
        async with connect(broker.url, settings, name="w1", inbox_prefix=service_inbox("worker", "w1")) as bus:
            with pytest.raises(BrokerUnavailableError, match=r"not permit .*STREAM\.CREATE\..*_JOBS_m to this"):
                await ensure_jobs_stream(bus, "m")
            with pytest.raises(BrokerUnavailableError, match=r"not permit .*STREAM\.INFO\..*_JOBS_other to this"):
                await ensure_jobs_stream(bus, "other")


async def test_another_workers_credential_is_told(tmp_path: Path, prefix: str) -> None:
    async with secured_broker(tmp_path, prefix, [worker("w1", "m")]) as broker:
        settings = broker.settings(worker("w1", "m"), request_timeout_s=0.5)
        async with connect(broker.url, settings, name="w2", inbox_prefix=service_inbox("worker", "w2")) as bus:
            with pytest.raises(
                BrokerUnavailableError, match=r"not permit inboxes below _INBOX\._svc\.worker\.w2 to this"
            ):
                await bus.api("INFO")


async def test_another_tenants_name_is_told_soon(tmp_path: Path, prefix: str) -> None:
    async with secured_broker(tmp_path, prefix, [ACME]) as broker:
        settings = broker.settings(ACME, retry_for_s=60, request_timeout_s=0.5)
        async with headrace.client.connect(broker.url, tenant="rival", settings=settings) as client:
            with pytest.raises(
                BrokerUnavailableError, match=r"not permit .*\.infer\.rival\.chat\.m to this credential"
            ):
                await client.complete(model="m", messages=[{"role": "user", "content": "hello"}])


async def test_over_tls_with_a_ca_of_its_own(tmp_path: Path, prefix: str) -> None:
    ca, cert, key = certificate(tmp_path)
    directory = SecureDirectory(tmp_path / "secure")
    directory.enrol(Names(prefix), [ACME], tls=Tls(cert=str(cert), key=str(key), ca=str(ca)))
    async with EmbeddedBroker(
        tmp_path, port=0, accounts=directory.accounts, operator_credentials=directory.file_of(OPERATOR)
    ) as broker:
        own: dict[str, Any] = {"prefix": prefix, "nats_credentials": str(directory.file_of(ACME)), "retry_for_s": 2.0}
        trusting = Settings(nats_tls_ca=str(ca), **own)
        for url in (broker.info.url, broker.info.url.replace("nats://", "tls://")):
            async with headrace.client.connect(url, tenant="acme", settings=trusting) as client:
                await client.bus.flush()
        with pytest.raises(BrokerUnavailableError, match=r"(?i)certificate"):
            async with headrace.client.connect(broker.info.url, tenant="acme", settings=Settings(**own)):
                pass


async def test_over_tls_a_client_may_be_asked_for_a_certificate(tmp_path: Path, prefix: str) -> None:
    ca, cert, key = certificate(tmp_path)
    directory = SecureDirectory(tmp_path / "secure")
    tls = Tls(cert=str(cert), key=str(key), ca=str(ca), must_verify=True)
    directory.enrol(Names(prefix), [ACME], tls=tls)
    async with EmbeddedBroker(
        tmp_path, port=0, accounts=directory.accounts, operator_credentials=directory.file_of(OPERATOR)
    ) as broker:
        own: dict[str, Any] = {
            "nats_credentials": str(directory.file_of(ACME)),
            "nats_tls_ca": str(ca),
            "retry_for_s": 2.0,
        }
        shown = Settings(nats_tls_cert=str(cert), nats_tls_key=str(key), **own)
        async with headrace.client.connect(broker.info.url, tenant="acme", settings=shown) as client:
            await client.bus.flush()
        with pytest.raises(BrokerUnavailableError):
            async with headrace.client.connect(broker.info.url, tenant="acme", settings=Settings(**own)):
                pass


def certificate(directory: Path) -> tuple[Path, Path, Path]:
    """A CA, and a certificate of it for the loopback address, with its key."""
    ca, ca_key, cert, key = (directory / name for name in ("ca.pem", "ca.key", "cert.pem", "key.pem"))
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    run([*made, "-subj", "/CN=Test CA", "-keyout", str(ca_key), "-out", str(ca)])
    run(
        [
            *made,
            "-subj",
            "/CN=broker",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-CA",
            str(ca),
            "-CAkey",
            str(ca_key),
            "-addext",
            "basicConstraints=CA:FALSE",
            "-keyout",
            str(key),
            "-out",
            str(cert),
        ]
    )
    return ca, cert, key


def run(argv: list[str]) -> None:
    subprocess.run(argv, check=True, capture_output=True, timeout=30)


async def test_a_monitor_makes_the_log_of_a_job_that_ended_small(tmp_path: Path, prefix: str) -> None:
    """By its own credential; a notice of an end that did not come does nothing."""
    async with secured_broker(tmp_path, prefix, [], models=("m",)) as broker:
        settings = broker.settings(MONITOR)
        async with (
            connect(broker.url, settings, name="monitor", inbox_prefix=service_inbox("monitor")) as bus,
            broker.operator() as operator,
            tidying(bus, after_s=0.05, every_s=0.05),
        ):
            log = JobLog(operator)

            async def append(job: str, kind: str, expected: int) -> int:
                event = (
                    events.ended("cancelled", job, attempt=1, offset=0, error=None, body_hash="h")
                    if kind == "end"
                    else events.requeued(job, attempt=2, offset=0, reason="drain", lost=None)
                )
                stored = await log.append("acme", event, expected=expected, ttl_s=600)
                return int(getattr(stored, "sequence"))  # noqa: B009

            async def num_left(job: str) -> int:
                stream = broker.names.log_stream(0)
                return len(await batch_get(operator, stream, broker.names.log("acme", job), from_sequence=1))

            await append("running", "requeued", await append("running", "requeued", 0))
            await log.announce_end("acme", "running")
            await append("over", "end", await append("over", "requeued", 0))

            async def is_small() -> bool:
                return await num_left("over") == 1

            await until(is_small)
            assert await num_left("running") == 2
        assert broker.violations() == []


async def test_a_router_makes_the_stream_of_a_configured_model_and_counts_what_tenants_use(
    tmp_path: Path, prefix: str
) -> None:
    async with (
        secured_broker(tmp_path, prefix, [ACME]) as broker,
        connect(broker.url, broker.settings(ROUTER), name="router", inbox_prefix=service_inbox("router")) as bus,
        broker.operator() as operator,
        asyncio.TaskGroup() as group,
    ):
        stop = asyncio.Event()
        group.create_task(run_router(bus, stop=stop))
        key = f"$KV.{broker.names.config_bucket}"
        for name, value in (
            ("tenants.acme", {"requests_per_minute": 100, "max_in_flight": 5}),
            ("models.fresh", {"queue_limit": 7}),
        ):
            await operator.store(f"{key}.{name}", json.dumps(value).encode(), headers={})

        async def is_queued() -> bool:
            reply = await client.answer(broker.names.infer("acme", "completions", "fresh"), b'{"prompt":"x"}')
            return reply is not None and (reply.headers or {}).get("Headrace-Event") == "accepted"

        async with bare(broker, ACME, inbox_prefix="_INBOX.acme") as client:
            await until(is_queued)
        stream = json.loads(await operator.api(f"STREAM.INFO.{broker.names.jobs_stream('fresh')}"))
        assert stream["config"]["max_msgs"] == 7
        usage = json.loads(await operator.api(f"STREAM.INFO.KV_{broker.names.usage_bucket}"))
        assert usage["state"]["messages"] == 1
        assert await pinged(operator, "headrace-router")
        stop.set()
        assert broker.violations() == []


async def pinged(operator: Bus, name: str) -> bool:
    """Whether a service answers under the services protocol."""
    reply = await operator.request(f"$SRV.PING.{name}")
    return bool(json.loads(reply.data)["name"] == name)


# the command


def provision(*arguments: str) -> str:
    """Run `headrace provision --secure …`; all that it prints."""
    result = CliRunner().invoke(command, ["provision", "--secure", *arguments], env={"HEADRACE_NATS_URL": None})
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_writes_what_nats_server_takes_and_prints_no_secret(tmp_path: Path) -> None:
    where = ["--state-dir", str(tmp_path / "state"), "--dir", str(tmp_path / "own")]
    output = provision(
        *where, "--tenant", "acme", "--worker", "w1", "--worker", "w2", "--model", "org/m", "--pool", "p"
    )
    output += provision(*where, "--tenant", "more", "--json")
    directory = SecureDirectory(tmp_path / "own")
    secrets = {file.name: file.read_text() for file in (directory.path / "credentials").iterdir()}
    assert secrets.keys() >= {"tenant-acme.nk", "tenant-more.nk", "worker-w1.nk", "worker-w2.nk", "operator.nk"}
    assert not any(secret in output for secret in secrets.values())
    run([str(find_nats_server()), "-c", str(directory.config), "-t"])
    assert "--signal reload=" in output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--secure", "--worker", "w1"],
        ["--secure", "--worker", "w1", "--model", "a", "--model", "b"],
        ["--secure", "--tls-verify"],
        ["--secure", "--tenant", "NOT A NAME"],
        ["--tenant", "acme"],
    ],
)
def test_what_makes_no_sense_is_wrong_usage(tmp_path: Path, arguments: list[str]) -> None:
    result = CliRunner().invoke(command, ["provision", "--state-dir", str(tmp_path), *arguments])
    assert result.exit_code == 2


async def test_up_secure_needs_nothing_more_of_its_owner(tmp_path: Path, prefix: str) -> None:
    """The owner's commands find the operator's credential; nobody else gets in."""
    lines: list[str] = []
    settings = Settings(prefix=prefix, state_dir=str(tmp_path), broker_port=0)
    plan = Plan(model="sim", engine="sim", num_workers=2, is_secure=True)
    async with running_stack(
        settings, plan, on_line=lambda _, line: lines.append(line), on_step=lambda _: None
    ) as stack:
        assert await stack.wait_ready(asyncio.Event(), num_workers=2)
        async with headrace.client.connect(settings=Settings(prefix=prefix, state_dir=str(tmp_path))) as client:
            assert (await client.complete(model="sim", prompt="hi", max_tokens=3)).usage is not None
        with pytest.raises(BrokerUnavailableError):
            async with headrace.client.connect(stack.url, settings=Settings(prefix=prefix, retry_for_s=0.5)):
                pass
        stack.add_worker()
        assert await stack.wait_ready(asyncio.Event(), num_workers=3)
    log = (tmp_path / "broker.log").read_text()
    assert "iolation" not in log
    secrets = [file.read_text() for file in (tmp_path / "secure" / "credentials").iterdir()]
    assert not any(secret in line for secret in secrets for line in (*lines, log))
    assert worker("up-3", "sim").name in {file.stem for file in (tmp_path / "secure" / "credentials").iterdir()}
