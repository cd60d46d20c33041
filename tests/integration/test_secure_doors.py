"""What a stranger, another tenant and a stolen worker get from a secured broker by hand, with a bare client: nothing.

A victim's stream runs all the while and is whole at the end.
"""

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from nats.aio.client import Client as BareClient
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

import headrace.client
from headrace.batch.sweeping import LEFT_ALONE_S, sweep
from headrace.bus.connection import connect
from headrace.bus.credentials import new_credential
from headrace.bus.members import GATEWAY, NOTICES, ROUTER, Member
from headrace.bus.objects import Objects
from headrace.client import Client, Delta, Done
from headrace.schemas.subjects import Names, QueueName
from tests.processes import part, serving
from tests.secured import ACME, RIVAL, Bare, SecuredBroker, bare, secured_broker, worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE, TWO = "one", "two"
THIEF, OTHER = worker("thief", ONE), worker("other", TWO)
JOB = "victim-job"
PREFIX = f"t{secrets.token_hex(4)}.v1"
NAMES = Names(PREFIX)
LOG = NAMES.log_stream(0)
JOBS_ONE, JOBS_TWO = NAMES.jobs_stream(ONE), NAMES.jobs_stream(TWO)
CONSUMER = QueueName().consumer
KV_WORKERS, KV_CONFIG = f"$KV.{NAMES.workers_bucket}", f"$KV.{NAMES.config_bucket}"


class Scene:
    """The broker, its parts at work, and the victim."""

    def __init__(self, broker: SecuredBroker, client: Client) -> None:
        self.broker = broker
        self.client = client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    """Router and a worker of one model; the other model's worker exists by name, and its queue is not served."""
    state_dir: Path = tmp_path_factory.mktemp("doors")
    own = worker("w1", ONE)
    members = [ACME, RIVAL, own, THIEF, OTHER]
    async with secured_broker(state_dir, PREFIX, members, models=(ONE, TWO)) as broker:

        def started(credentials: str, *arguments: str) -> contextlib.AbstractAsyncContextManager[object]:
            return part(
                *arguments, url=broker.url, prefix=PREFIX, state_dir=state_dir / "unused",
                HEADRACE_NATS_CREDENTIALS=credentials,
            )  # fmt: skip

        async with (
            started(broker.credentials(ROUTER), "serve", "router"),
            started(
                broker.credentials(own), "serve", "worker", "--engine", "sim", "--model", ONE, "--worker-id", "w1",
                "-o", "tokens_per_second=40",
            ),
            headrace.client.connect(broker.url, tenant="acme", settings=broker.settings(ACME)) as client,
        ):  # fmt: skip
            await serving(client, ONE)
            yield Scene(broker, client)


@contextlib.asynccontextmanager
async def stream_stays_whole(scene: Scene, num_tokens: int = 60) -> AsyncIterator[str]:
    """A victim's stream that runs during the block; it must bring every token once, and its own end."""
    job = f"{JOB}-{secrets.token_hex(4)}"
    is_running = asyncio.Event()

    async def read() -> None:
        offsets, text = [], []
        stream = scene.client.stream(model=ONE, prompt="mine", max_tokens=num_tokens, ignore_eos=True, job_id=job)
        async for event in stream:
            if isinstance(event, Delta):
                is_running.set()
                offsets.append(event.offset)
                text.append(event.text)
            if isinstance(event, Done):
                assert event.text == "".join(text)
        assert offsets == sorted(set(offsets))

    async with asyncio.TaskGroup() as group:
        group.create_task(read())
        await is_running.wait()
        yield job


# a stranger


@pytest.mark.parametrize("how", ["nothing", "password", "token", "own nkey"])
async def test_a_stranger_is_not_let_in(scene: Scene, how: str) -> None:
    async def ignore(error: Exception) -> None:
        pass

    arguments: dict[str, Any] = {
        "nothing": {},
        "password": {"user": "router", "password": "router"},
        "token": {"token": "secret"},
        "own nkey": {"nkeys_seed_str": new_credential(os.urandom(32))[0]},
    }[how]
    client = BareClient()
    try:
        with pytest.raises(NatsError):
            await client.connect(
                scene.broker.url, allow_reconnect=False, error_cb=ignore, connect_timeout=2, **arguments
            )
    finally:
        await client.close()


# another tenant

NOT_TO_HEAR = [
    ">", "*", "_INBOX.>", "_INBOX.*.*", "_INBOX.acme.>", f"_INBOX.acme.{JOB}", "_INBOX._svc.>", "_INBOX.*.>",
    f"{PREFIX}.>", f"{PREFIX}.log.>", f"{PREFIX}.log.0.rival.*", f"{PREFIX}.infer.>", f"{PREFIX}.infer.acme.>",
    f"{PREFIX}.infer.rival.>", f"{PREFIX}.cancel.>", f"{PREFIX}.status.acme.*", f"{PREFIX}.jobs.>",
    f"{PREFIX}.wake.>", f"{PREFIX}.ended.>", f"{PREFIX}.dead.>", f"{PREFIX}.ctl.>", f"{PREFIX}.tokenize.>",
    f"{PREFIX}.monitor.state", f"{PREFIX}.metrics", "$KV.>", f"{KV_WORKERS}.>", f"{KV_CONFIG}.>", "$JS.>", "$JS.API.>",
    "$JS.EVENT.ADVISORY.>", "$JS.ACK.>", "$SRV.>", "$SRV.PING", "$SYS.>", "$SYS.ACCOUNT.>",
]  # fmt: skip


async def test_a_tenant_hears_nothing_but_its_own_inboxes(scene: Scene) -> None:
    """SEC-2: inboxes, logs, requests, heartbeats, configuration, the system's: no subscription is taken."""
    async with bare(scene.broker, RIVAL, inbox_prefix="_INBOX.rival") as client:
        for subject in NOT_TO_HEAR:
            assert await client.is_deaf(subject), subject
        assert not await client.is_deaf("_INBOX.rival.mine")


async def test_a_tenant_cannot_take_requests_from_the_routers(scene: Scene) -> None:
    async with bare(scene.broker, RIVAL, inbox_prefix="_INBOX.rival") as client:
        await client.client.subscribe(NAMES.infer_filter(), queue="router")
        await client.client.flush()
        assert await client.is_deaf(NAMES.cancel("*", "*"))
        assert any("infer" in words for words in client.refused)


JS_CALLS = [
    "INFO", "ACCOUNT.INFO", "STREAM.NAMES", "STREAM.LIST", f"STREAM.INFO.{LOG}", f"STREAM.INFO.{JOBS_ONE}",
    f"DIRECT.GET.{LOG}", f"DIRECT.GET.{LOG}.{NAMES.log('acme', JOB)}", f"DIRECT.GET.{LOG}.{NAMES.log('rival', JOB)}",
    f"STREAM.MSG.GET.{LOG}", f"STREAM.MSG.GET.{JOBS_ONE}", f"STREAM.MSG.DELETE.{JOBS_ONE}", f"STREAM.PURGE.{JOBS_ONE}",
    f"STREAM.PURGE.{LOG}", f"STREAM.DELETE.{JOBS_ONE}", f"STREAM.DELETE.{LOG}", f"STREAM.UPDATE.{LOG}",
    "STREAM.CREATE.MINE", f"STREAM.SNAPSHOT.{LOG}", f"STREAM.LEADER.STEPDOWN.{LOG}", f"CONSUMER.NAMES.{JOBS_ONE}",
    f"CONSUMER.LIST.{JOBS_ONE}", f"CONSUMER.INFO.{JOBS_ONE}.{CONSUMER}", f"CONSUMER.MSG.NEXT.{JOBS_ONE}.{CONSUMER}",
    f"CONSUMER.CREATE.{LOG}", f"CONSUMER.CREATE.{LOG}.mine", f"CONSUMER.CREATE.{LOG}.mine.{NAMES.log('acme', '*')}",
    f"CONSUMER.DURABLE.CREATE.{LOG}.mine", f"CONSUMER.DELETE.{JOBS_ONE}.{CONSUMER}",
    f"CONSUMER.PAUSE.{JOBS_ONE}.{CONSUMER}", f"DIRECT.GET.KV_{NAMES.config_bucket}",
    f"DIRECT.GET.KV_{NAMES.workers_bucket}",
]  # fmt: skip

NOT_TO_SAY = [
    *(f"$JS.API.{call}" for call in JS_CALLS),
    f"$JS.ACK.{JOBS_ONE}.{CONSUMER}.1.1.1.0.0",
    NAMES.infer("acme", "chat", ONE), NAMES.cancel("acme", JOB), NAMES.status("acme", JOB), NAMES.log("acme", JOB),
    NAMES.log("rival", JOB), NAMES.ended("acme", JOB), NAMES.jobs(ONE, QueueName()), NAMES.wake(ONE, QueueName()),
    NAMES.ctl("w1"), NAMES.dead("acme", ONE, JOB), NAMES.tokenize(ONE), NAMES.monitor_state(), NAMES.metrics(),
    NAMES.job_inbox("acme", JOB), "_INBOX._svc.router.x.y", f"{KV_WORKERS}.w1", f"{KV_CONFIG}.tenants.rival",
    f"{KV_CONFIG}.models.{ONE}", f"$KV.{NAMES.usage_bucket}.acme", "$SRV.PING", "$SRV.INFO.headrace-router",
    "$SYS.REQ.SERVER.PING", "$SYS.REQ.USER.INFO", "$SYS.REQ.ACCOUNT.HEADRACE.CONNZ",
]  # fmt: skip


async def test_a_tenant_says_nothing_but_its_own_requests(scene: Scene) -> None:
    """SEC-2: forged chunks, cancels and acks, JetStream's whole API, configuration, heartbeats: all refused."""
    async with bare(scene.broker, RIVAL, inbox_prefix="_INBOX.rival") as client, stream_stays_whole(scene) as job:
        for subject in (*NOT_TO_SAY, NAMES.job_inbox("acme", job), NAMES.cancel("acme", job)):
            assert await client.is_refused(subject, b"{}"), subject
            assert await client.is_refused(subject, b"{}", reply="_INBOX.rival.answer"), subject


async def test_a_tenant_finds_no_job_of_another(scene: Scene) -> None:
    """Its own subjects, with another's job id, and with the sequence of another's queue message."""
    async with bare(scene.broker, RIVAL, inbox_prefix="_INBOX.rival") as client, stream_stays_whole(scene) as job:
        sequence = await queue_sequence(scene, job)
        for subject, body in (
            (NAMES.status("rival", job), {}),
            (NAMES.cancel("rival", job), {}),
            (NAMES.cancel("rival", job), {"sequence": sequence, "model": ONE}),
        ):
            answer = await client.answer(subject, json.dumps(body).encode())
            assert answer is not None
            assert json.loads(answer.data)["error"]["code"] == "job_not_found"
        last = await client.answer(NAMES.status("rival", job), b'{"last_event":true}')
        assert last is not None
        assert (last.headers or {}).get("Status") == "404"
        inbox = await client.client.subscribe("_INBOX.rival.log")
        await client.client.publish(NAMES.status("rival", job), b'{"events_from":1}', reply="_INBOX.rival.log")
        assert ((await inbox.next_msg(timeout=5)).headers or {}).get("Status") in ("204", "404")


async def queue_sequence(scene: Scene, job: str) -> int:
    async with scene.broker.operator() as bus:
        data = await bus.api(f"STREAM.INFO.{JOBS_ONE}")
    state = json.loads(data)["state"]
    assert state["messages"] == 1, job
    return int(state["last_seq"])


REPLIES = [
    f"_INBOX.acme.{JOB}", "_INBOX.acme", "_INBOX.acme.x.y", "_INBOX.default.x", "_INBOX.other", NAMES.log("acme", JOB),
    NAMES.infer("acme", "chat", ONE), f"{KV_WORKERS}.w1", "_INBOX._svc.worker.w1.x",
]  # fmt: skip


async def test_what_a_tenant_names_as_its_reply_is_no_door(scene: Scene) -> None:
    """NATS does not check it, so routers do: for requests, status, cancel, and what the broker is told to send."""
    heard: list[str] = []
    async with (
        bare(scene.broker, ACME, inbox_prefix="_INBOX.acme") as victim,
        bare(scene.broker, Member(role="tenant", tenant="default"), inbox_prefix="_INBOX.default") as everybody,
        bare(scene.broker, RIVAL, inbox_prefix="_INBOX.rival") as client,
    ):

        async def on_message(message: object) -> None:
            heard.append(str(message))

        await victim.client.subscribe("_INBOX.acme.>", cb=on_message)
        await everybody.client.subscribe("_INBOX.default.>", cb=on_message)
        for listener in (victim, everybody):
            await listener.client.flush()
        job = await own_job(client)
        for subject, body in (
            (NAMES.infer("rival", "completions", ONE), b'{"prompt":"forged","max_tokens":2}'),
            (NAMES.infer("rival", "completions", ONE), b"not json"),
            (NAMES.infer("rival", "completions", "no-such-model"), b'{"prompt":"x"}'),
            (f"{PREFIX}.infer.rival.chat.no=token", b'{"prompt":"x"}'),
            (f"{PREFIX}.infer.rival.*.>", b'{"prompt":"x"}'),
            (NAMES.status("rival", job), b""),
            (NAMES.status("rival", job), b'{"events_from":1}'),
            (NAMES.status("rival", job), b'{"last_event":true}'),
            (NAMES.status("rival", "no/job"), b""),
            (NAMES.cancel("rival", job), b""),
            (NAMES.cancel("rival", job), b"not json"),
        ):
            for reply in REPLIES:
                await client.client.publish(subject, body, reply=reply)
        assert (await client.answer(NAMES.status("rival", job))) is not None  # routers have had all of it
        for listener in (victim, everybody):
            await listener.client.flush()
        assert heard == []


async def own_job(client: Bare) -> str:
    """A job of the rival's that ended."""
    inbox = await client.client.subscribe("_INBOX.rival.own")
    subject = NAMES.infer("rival", "completions", ONE)
    await client.client.publish(subject, b'{"prompt":"own","max_tokens":2}', reply="_INBOX.rival.own")
    while True:
        message = await inbox.next_msg(timeout=10)
        if (message.headers or {}).get("Headrace-Event") == "done":
            await inbox.unsubscribe()
            return str((message.headers or {})["Headrace-Job"])


# a worker's credential

NOT_FOR_A_WORKER = [
    *(
        f"$JS.API.{call}"
        for call in (
            f"CONSUMER.MSG.NEXT.{JOBS_TWO}.{CONSUMER}", f"DIRECT.GET.{JOBS_TWO}", f"STREAM.MSG.GET.{JOBS_TWO}",
            f"STREAM.MSG.GET.{JOBS_ONE}", f"STREAM.MSG.GET.{LOG}", f"STREAM.INFO.{JOBS_TWO}",
            f"CONSUMER.CREATE.{JOBS_TWO}.{CONSUMER}.{NAMES.jobs(TWO, QueueName())}", f"CONSUMER.CREATE.{JOBS_TWO}",
            f"CONSUMER.CREATE.{JOBS_ONE}", f"CONSUMER.CREATE.{JOBS_ONE}.mine", f"CONSUMER.DURABLE.CREATE.{JOBS_ONE}.m",
            f"CONSUMER.CREATE.{JOBS_ONE}.x_normal_y.{NAMES.jobs(ONE, QueueName('x', 'normal', 'y'))}",
            f"CONSUMER.CREATE.{LOG}.mine.{NAMES.log('acme', JOB)}", f"CONSUMER.DELETE.{JOBS_ONE}.{CONSUMER}",
            f"CONSUMER.LIST.{JOBS_TWO}", f"STREAM.DELETE.{JOBS_ONE}", f"STREAM.DELETE.{LOG}",
            f"STREAM.PURGE.{JOBS_ONE}", f"STREAM.PURGE.{LOG}",
            f"STREAM.UPDATE.{JOBS_ONE}", f"STREAM.CREATE.{JOBS_ONE}", "STREAM.CREATE.MINE",
            f"STREAM.MSG.DELETE.{JOBS_ONE}", f"STREAM.MSG.DELETE.{LOG}", f"STREAM.MSG.DELETE.KV_{NAMES.workers_bucket}",
            "STREAM.NAMES", "ACCOUNT.INFO",
        )
    ),
    f"$JS.ACK.{JOBS_TWO}.{CONSUMER}.1.1.1.0.0", f"{KV_WORKERS}.other", f"{KV_WORKERS}.w1", f"{KV_CONFIG}.models.{ONE}",
    f"{KV_CONFIG}.tenants.acme", f"$KV.{NAMES.usage_bucket}.acme", NAMES.infer("acme", "chat", ONE),
    NAMES.cancel("acme", JOB), NAMES.status("acme", JOB), NAMES.dead("acme", TWO, JOB),
    NAMES.wake(TWO, QueueName()), NAMES.wake(ONE, QueueName("x", "normal", "y")), NAMES.tokenize(ONE),
    NAMES.job_inbox("acme", JOB), "_INBOX._svc.worker.other.x", "_INBOX._svc.router.x.y", "$SRV.PING",
    "$SYS.REQ.SERVER.PING",
]  # fmt: skip

NOT_FOR_A_WORKER_TO_HEAR = [
    ">", "_INBOX.>", "_INBOX.acme.>", "_INBOX.*.*", "_INBOX._svc.>", "_INBOX._svc.worker.>",
    "_INBOX._svc.worker.other.>",
    "_INBOX._svc.router.>", f"{PREFIX}.>", f"{PREFIX}.infer.>", f"{PREFIX}.log.>", NAMES.jobs_filter(ONE),
    NAMES.jobs_filter(TWO), NAMES.wake_filter(TWO), NAMES.wake_pool(ONE, "x"), NAMES.ctl("other"), NAMES.ctl("*"),
    NAMES.tokenize(TWO), "$JS.>", f"$KV.{NAMES.usage_bucket}.>", "$SYS.>",
]  # fmt: skip


async def test_a_worker_keeps_to_its_model_and_its_own_key(scene: Scene) -> None:
    async with bare(scene.broker, THIEF, inbox_prefix="_INBOX._svc.worker.thief") as client:
        async with stream_stays_whole(scene):
            for subject in NOT_FOR_A_WORKER:
                assert await client.is_refused(subject, b"{}"), subject
            for subject in NOT_FOR_A_WORKER_TO_HEAR:
                assert await client.is_deaf(subject), subject
        assert not await client.is_refused(f"{KV_WORKERS}.thief", b"{}", headers={"Nats-TTL": "1"})


async def test_a_workers_consumer_is_what_its_subject_says(scene: Scene) -> None:
    """The filter in the call's subject is permitted, and the broker holds the body to it."""
    subject = f"$JS.API.CONSUMER.CREATE.{JOBS_ONE}.mine.{NAMES.jobs(ONE, QueueName(queue='q'))}"
    for filters in ({"filter_subject": NAMES.jobs_filter(ONE)}, {"filter_subjects": [NAMES.jobs_filter(ONE)]}, {}):
        body = {"stream_name": JOBS_ONE, "config": {"name": "mine", "ack_policy": "explicit", **filters}}
        async with bare(scene.broker, THIEF, inbox_prefix="_INBOX._svc.worker.thief") as client:
            answer = await client.answer(subject, json.dumps(body).encode())
        assert answer is not None
        assert "error" in json.loads(answer.data), filters
    other = {"stream_name": JOBS_TWO, "config": {"name": "mine", "filter_subject": NAMES.jobs(ONE, QueueName())}}
    async with bare(scene.broker, THIEF, inbox_prefix="_INBOX._svc.worker.thief") as client:
        answer = await client.answer(subject, json.dumps(other).encode())
    assert answer is not None
    assert "error" in json.loads(answer.data)


# the others' credentials


async def test_the_gateway_reads_neither_queue_nor_log(scene: Scene) -> None:
    async with bare(scene.broker, GATEWAY, inbox_prefix="_INBOX._svc.gateway") as client:
        for call in JS_CALLS:
            if call in ("INFO", "STREAM.NAMES", f"STREAM.INFO.{LOG}", f"DIRECT.GET.KV_{NAMES.config_bucket}"):
                continue
            assert await client.is_refused(f"$JS.API.{call}", b"{}"), call
        for subject in (NAMES.log("acme", JOB), f"{KV_CONFIG}.tenants.a", f"{KV_WORKERS}.w1", "_INBOX.acme.x"):
            assert await client.is_refused(subject, b"{}"), subject
        for subject in (">", "_INBOX.>", "_INBOX._svc.router.>", f"{PREFIX}.infer.>"):
            assert await client.is_deaf(subject), subject


async def test_the_gateway_may_remove_what_dead_ones_left_of_files(scene: Scene) -> None:
    settings = scene.broker.settings(GATEWAY, request_timeout_s=5)
    async with connect(scene.broker.url, settings, name="test", inbox_prefix="_INBOX._svc.gateway") as bus:
        objects = Objects(bus, bus.names.files_store)
        dead, untold = (objects.writer(f"acme/file-{name}", ttl_s=60) for name in ("dead", "untold"))
        await dead.write(bytes(1 << 20))
        await untold.write(bytes(1 << 20))
        await untold.commit()
        assert await sweep(bus, now=bus.clock.now() + 2 * LEFT_ALONE_S) == 2
        assert await objects.nuids() == set()


async def test_a_star_that_lets_a_subscription_in_lets_no_message_of_a_service_through(scene: Scene) -> None:
    heard: list[str] = []
    async with (
        bare(scene.broker, GATEWAY, inbox_prefix="_INBOX._svc.gateway") as client,
        scene.broker.operator() as bus,
    ):

        async def on_message(message: Msg) -> None:
            heard.append(message.subject)

        await client.client.subscribe("_INBOX._svc.>", cb=on_message)
        await client.client.subscribe("_INBOX.*.>", cb=on_message)
        await client.client.flush()
        await bus.api("INFO")
        own = await client.answer(NAMES.status("acme", "none"))
        assert own is not None
        await client.client.flush()
    assert all(subject.startswith("_INBOX._svc.gateway.") for subject in heard)


async def test_the_monitors_system_user_only_listens(scene: Scene) -> None:
    async with bare(scene.broker, NOTICES) as client:
        for subject in ("$SYS.REQ.SERVER.PING", "$SYS.REQ.SERVER.PING.CONNZ", "$SYS.REQ.CLAIMS.LIST", "anything"):
            assert await client.is_refused(subject), subject
        for subject in (">", "$SYS.>", "$SYS.SERVER.>", "$SYS.ACCOUNT.*.CONNECT", "_INBOX.>"):
            assert await client.is_deaf(subject), subject
        assert not await client.is_deaf("$SYS.ACCOUNT.*.DISCONNECT")
