"""Golden bytes: what goes over the wire, literally. A test that fails here breaks a running deployment."""

from typing import Any

import msgspec
import pytest

from headrace.schemas import events, jobs, subjects, workers
from headrace.schemas.events import AcceptedBody, Event, Owner
from headrace.schemas.jobs import CancelRequest, Job, JobStatus, StatusRequest
from headrace.schemas.metrics import Family, Measured, Sample
from headrace.schemas.refusals import Refusal
from headrace.schemas.subjects import JobId, Names, QueueName, Tenant, model_to_token
from headrace.schemas.workers import Heartbeat, HeldRequest, WorkerHealth, WorkerNudge
from headrace.settings import Settings

OWNER = Owner(worker="w-1", epoch="e7", queue_sequence=42, beat=9, engine_run=2)
OTHER = Owner(worker="w-2", epoch="f")


def headers(kind: str, attempt: int, offset: int, **more: str) -> dict[str, str]:
    fixed = {
        "Headrace-Event": kind,
        "Headrace-Job": "j1",
        "Headrace-Attempt": str(attempt),
        "Headrace-Offset": str(offset),
    }
    return fixed | {f"Headrace-{name.replace('_', '-')}": value for name, value in more.items()}


W1: dict[str, str] = {"Worker": "w-1", "Epoch": "e7", "Engine_Run": "2"}
GOLDEN_EVENTS: list[tuple[Event, dict[str, str], bytes]] = [
    (
        events.accepted("j1", AcceptedBody(job="j1", sequence=42, position=3, eta_s=1.5, model="m"), body_hash="ab12"),
        headers("accepted", 1, 0, Hash="ab12"),
        b'{"job":"j1","sequence":42,"position":3,"eta_s":1.5,"model":"m"}',
    ),
    (
        events.started("j1", OWNER, attempt=2, offset=5, body_hash="ab12", model="m"),
        headers("started", 2, 5, **W1, Hash="ab12"),
        b'{"worker":"w-1","attempt":2,"model":"m","epoch":"e7","sequence":42,"beat":9,"engine_run":2}',
    ),
    (
        events.delta("j1", OWNER, attempt=2, offset=5, count=3, data=b'{"id":"chatcmpl-j1"}'),
        headers("delta", 2, 5, Count="3", **W1),
        b'{"id":"chatcmpl-j1"}',
    ),
    (
        events.requeued("j1", attempt=3, offset=8, reason="owner_lost", lost=OWNER, by=OTHER),
        headers("requeued", 3, 8, Worker="w-2", Epoch="f"),
        b'{"attempt":3,"reason":"owner_lost","lost":"w-1/e7/2"}',
    ),
    (
        events.requeued("j1", attempt=3, offset=8, reason="drained", lost=None, by=OWNER),
        headers("requeued", 3, 8, **W1),
        b'{"attempt":3,"reason":"drained"}',
    ),
    (
        events.requeued("j1", attempt=3, offset=0, reason="engine_died", lost=OWNER, by=OWNER, num_made=4),
        headers("requeued", 3, 0, **W1),
        b'{"attempt":3,"reason":"engine_died","lost":"w-1/e7/2/2","num_made":4}',
    ),
    (
        events.handed_over("j1", attempt=2, model="m-2", queue_sequence=9, body_hash="ab12", by=OWNER),
        headers("requeued", 2, 0, **W1, Hash="ab12"),
        b'{"attempt":2,"reason":"fallback","model":"m-2","sequence":9}',
    ),
    (
        events.done("j1", OWNER, attempt=3, offset=8, data=b'{"object":"chat.completion"}', body_hash="ab12"),
        headers("done", 3, 8, **W1, Hash="ab12"),
        b'{"object":"chat.completion"}',
    ),
    (
        events.ended(
            "failed",
            "j1",
            attempt=3,
            offset=8,
            error=Refusal(code="job_failed", message="gave up"),
            body_hash="ab12",
            owner=OWNER,
            is_dead=True,
        ),
        headers("failed", 3, 8, **W1, Hash="ab12", Dead="1"),
        b'{"error":{"message":"gave up","type":"server_error","code":"job_failed","param":null}}',
    ),
    (
        events.ended("cancelled", "j1", attempt=1, offset=0, error=None),
        headers("cancelled", 1, 0),
        b"{}",
    ),
    (
        events.ended(
            "expired", "j1", attempt=1, offset=0, error=Refusal(code="queue_timeout", message="too late", param="p")
        ),
        headers("expired", 1, 0),
        b'{"error":{"message":"too late","type":"server_error","code":"queue_timeout","param":"p"}}',
    ),
]
IDS = [f"{event.kind}-{number}" for number, (event, _, _) in enumerate(GOLDEN_EVENTS)]


def test_every_kind_of_event_has_golden_bytes() -> None:
    assert {event.kind for event, _, _ in GOLDEN_EVENTS} == events.EVENT_KINDS


@pytest.mark.parametrize(("event", "golden_headers", "golden_data"), GOLDEN_EVENTS, ids=IDS)
def test_event_on_the_wire(event: Event, golden_headers: dict[str, str], golden_data: bytes) -> None:
    assert event.headers() == golden_headers
    assert event.data == golden_data


@pytest.mark.parametrize(("event", "golden_headers", "golden_data"), GOLDEN_EVENTS, ids=IDS)
def test_event_comes_back(event: Event, golden_headers: dict[str, str], golden_data: bytes) -> None:
    read = events.decode(golden_headers, golden_data, sequence=7, last_sequence=6)
    assert read is not None
    assert (read.sequence, read.last_sequence) == (7, 6)
    owner = event.owner
    if owner is not None and event.kind != "started":
        # Only `started` says all of its owner.
        owner = Owner(worker=owner.worker, epoch=owner.epoch, engine_run=owner.engine_run)
    assert read == msgspec.structs.replace(event, owner=owner, sequence=7, last_sequence=6)
    assert read.error() == event.error()
    assert event.owner is None or event.is_same_append(read)


@pytest.mark.parametrize(
    ("kind", "data", "expected"),
    [
        ("accepted", b'{"job":"j1","sequence":42}', {"queue_sequence": 42}),
        ("started", b'{"worker":"w-1","attempt":1}', {"owner": Owner(worker="w-1", epoch="")}),
        ("requeued", b'{"attempt":2,"reason":"lost"}', {"attempt": 2, "reason": "lost", "lost": None}),
        ("delta", b"", {"count": 0, "offset": 0}),
        ("done", b"{}", {"attempt": 1}),
        ("failed", b'{"error":{"message":"m","type":"t","code":"internal"}}', {"is_dead": False}),
        ("cancelled", b"{}", {"body_hash": ""}),
        ("expired", b"{}", {"owner": None}),
    ],
)
def test_least_an_old_writer_said_still_decodes(kind: str, data: bytes, expected: dict[str, Any]) -> None:
    read = events.decode({"Headrace-Event": kind, "Headrace-Job": "j1"}, data, sequence=1, last_sequence=None)
    assert read is not None
    assert {name: getattr(read, name) for name in expected} == expected


def test_fields_of_a_newer_writer_are_passed_over() -> None:
    later = {"Headrace-Event": "started", "Headrace-Job": "j1", "Headrace-Colour": "blue"}
    read = events.decode(later, b'{"worker":"w","attempt":2,"colour":"blue"}', sequence=1, last_sequence=None)
    assert read is not None
    assert read.owner is not None


@pytest.mark.parametrize(
    ("headers", "data"),
    [
        (None, b"{}"),
        ({}, b"{}"),
        ({"Headrace-Event": "error", "Headrace-Job": "j"}, b"{}"),
        ({"Headrace-Event": "Done", "Headrace-Job": "j"}, b"{}"),
        ({"Headrace-Event": "done"}, b"{}"),
        ({"Headrace-Event": "done", "Headrace-Job": "j", "Headrace-Attempt": "x"}, b"{}"),
        ({"Headrace-Event": "delta", "Headrace-Job": "j", "Headrace-Offset": "1.5"}, b"{}"),
        ({"Headrace-Event": "delta", "Headrace-Job": "j", "Headrace-Count": "9" * 5000}, b"{}"),
        ({"Headrace-Event": "started", "Headrace-Job": "j"}, b""),
        ({"Headrace-Event": "started", "Headrace-Job": "j"}, b'{"worker":7,"attempt":1}'),
        ({"Headrace-Event": "started", "Headrace-Job": "j"}, b'{"x":' + b"[" * 100_000),
        ({"Headrace-Event": "accepted", "Headrace-Job": "j"}, b'"\xff"'),
        ({"Headrace-Event": "requeued", "Headrace-Job": "j"}, b"[]"),
    ],
)
def test_what_is_no_event_is_none(headers: dict[str, str] | None, data: bytes) -> None:
    assert events.decode(headers, data, sequence=1, last_sequence=None) is None


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b'{"error":{}}', b'{"x":' + b"[" * 100_000])
def test_error_of_a_strange_body_is_none(data: bytes) -> None:
    assert Event(kind="failed", job="j1", data=data).error() is None


JOB = Job(
    tenant=Tenant("default"),
    job=JobId("j1"),
    op="chat",
    model="org/m-3.1",
    body=b'{"messages":[]}',
    body_hash="ab12",
    accepted_at=1700000000.25,
    queue_timeout_s=60,
    deadline_s=600,
    need_tokens=128,
)
JOB_HEADERS = {
    "Headrace-Tenant": "default",
    "Headrace-Job": "j1",
    "Headrace-Op": "chat",
    "Headrace-Model": "org=2Fm-3=2E1",
    "Headrace-Hash": "ab12",
    "Headrace-Accepted-At": "1700000000.250000",
    "Headrace-Queue-Timeout": "60.000",
    "Headrace-Deadline": "600.000",
    "Headrace-Need": "128",
}


def test_queue_message_on_the_wire() -> None:
    assert JOB.headers() == JOB_HEADERS
    with_fallback = msgspec.structs.replace(JOB, fallback="m-2.0")
    assert with_fallback.headers() == JOB_HEADERS | {"Headrace-Fallback": "m-2=2E0"}


def test_queue_message_comes_back() -> None:
    assert jobs.decode_job(JOB_HEADERS | {"Nats-Msg-Id": "default.j1", "traceparent": "00-…"}, JOB.body) == JOB
    with_fallback = msgspec.structs.replace(JOB, fallback="m-2.0")
    assert jobs.decode_job(with_fallback.headers(), JOB.body) == with_fallback
    handed_over = msgspec.structs.replace(JOB, handed_from="m-1.0")
    assert jobs.decode_job(handed_over.headers(), JOB.body) == handed_over
    assert JOB.queue_until == 1700000060.25
    assert JOB.deadline_at == 1700000600.25


@pytest.mark.parametrize("name", sorted(JOB_HEADERS))
def test_queue_message_without_a_header_is_no_job(name: str) -> None:
    assert jobs.decode_job({key: value for key, value in JOB_HEADERS.items() if key != name}, b"{}") is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"Headrace-Op": "images"},
        {"Headrace-Tenant": "a.b"},
        {"Headrace-Job": "a b"},
        {"Headrace-Model": "org/m"},
        {"Headrace-Need": "1.5"},
        {"Headrace-Deadline": "soon"},
        {"Headrace-Deadline": "nan"},
        {"Headrace-Queue-Timeout": "inf"},
        {"Headrace-Accepted-At": "-inf"},
        {"Headrace-Fallback": "=zz"},
        {"Headrace-Fallback-Pool": "A B"},
        {"Headrace-Handed-From": "=zz"},
    ],
)
def test_queue_message_with_a_strange_header_is_no_job(wrong: dict[str, str]) -> None:
    assert jobs.decode_job(JOB_HEADERS | wrong, b"{}") is None
    assert jobs.decode_job(None, b"{}") is None


def test_body_hash() -> None:
    assert jobs.body_hash("chat", "m", b"{}") == "16502fa715767c62d76546b07b4a1971"
    assert jobs.body_hash("chat", "m", b"{} ") != jobs.body_hash("chat", "m", b"{}")
    assert jobs.body_hash("cha", "tm", b"{}") != jobs.body_hash("chat", "m", b"{}")


GOLDEN_BEAT = (
    b'{"worker":"w-1","epoch":"e7","state":"Ready","model":"m","version":"","engine":"","pool":"default","host":"",'
    b'"pid":0,"port":null,"gpu":null,"memory_total_bytes":null,"memory_free_bytes":null,"memory_reserved_bytes":null,'
    b'"kv_capacity_tokens":0,"kv_reserved_tokens":0,"block_size":1,"max_model_len":null,"max_concurrency":1,'
    b'"running":0,"waiting":0,"supports_streaming":true,"interval_s":0.5,"tokens_per_second":null,'
    b'"seconds_per_job":null,"reason":"","held":[{"consumer":"default_normal_default","sequence":42,'
    b'"tenant":"default","job":"j1","attempt":2}],"is_tombstone":false}'
)
BEAT = Heartbeat(
    worker="w-1",
    epoch="e7",
    state="Ready",
    model="m",
    held=(HeldRequest(consumer="default_normal_default", sequence=42, tenant="default", job="j1", attempt=2),),
)


def test_heartbeat_on_the_wire() -> None:
    """What was said once is said for ever; more may be said beside it."""
    said: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(BEAT))
    assert said | msgspec.json.decode(GOLDEN_BEAT) == said
    assert workers.decode_heartbeat(GOLDEN_BEAT) == BEAT


def test_health_in_a_heartbeat_on_the_wire() -> None:
    health = WorkerHealth(engine_run=2, finished=9, failed=1, seconds_per_token=0.02, num_paces=8, restarts=1)
    said: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(BEAT, health=health)))
    golden = (
        b'{"engine_run":2,"finished":9,"failed":1,"seconds_per_token":0.02,"num_paces":8,"ttft_s":null,'
        b'"num_firsts":0,"load":null,"restarts":1,"last_restart":"","is_left_out":false}'
    )
    assert said["health"] | msgspec.json.decode(golden) == said["health"]
    assert msgspec.json.decode(golden, type=WorkerHealth) == health


def test_a_nudge_to_start_the_engine_again_on_the_wire() -> None:
    nudge = WorkerNudge(kind="restart", ailment="slow", reason="slow: 0.4 s", epoch="e7", engine_run=2)
    golden = b'{"kind":"restart","ailment":"slow","reason":"slow: 0.4 s","epoch":"e7","engine_run":2}'
    said: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(nudge))
    assert said | msgspec.json.decode(golden) == said
    assert msgspec.json.decode(golden, type=WorkerNudge) == nudge


def test_least_an_old_heartbeat_said_still_decodes() -> None:
    old = workers.decode_heartbeat(b'{"worker":"w","epoch":"e","state":"Busy","model":"m","later":[1]}')
    assert old == Heartbeat(worker="w", epoch="e", state="Busy", model="m")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"null",
        b"\xff",
        b'{"worker":"w","epoch":"e","state":"Asleep","model":"m"}',
        b'{"x":' + b"[" * 100_000,
    ],
)
def test_what_is_no_heartbeat_is_none(data: bytes) -> None:
    assert workers.decode_heartbeat(data) is None


def test_status_and_cancel_on_the_wire() -> None:
    status = JobStatus(job="j1", state="running", attempt=2, num_tokens=5, worker="w-1")
    assert msgspec.json.encode(status) == (
        b'{"job":"j1","state":"running","attempt":2,"num_tokens":5,"worker":"w-1","position":null,"eta_s":null,'
        b'"error":null,"paused":false}'
    )
    assert msgspec.json.decode(b'{"sequence":4}', type=CancelRequest) == CancelRequest(sequence=4)
    assert msgspec.json.decode(b"{}", type=CancelRequest) == CancelRequest()
    assert msgspec.json.encode(StatusRequest(events_from=7)) == b'{"events_from":7,"last_event":false}'
    assert msgspec.json.decode(b'{"last_event":true}', type=StatusRequest) == StatusRequest(last_event=True)
    assert msgspec.json.decode(b"{}", type=StatusRequest) == StatusRequest()


def test_names_of_the_contract() -> None:
    names = Names()
    assert names.prefix == "headrace.v1"
    assert model_to_token("org/m-3.1") == "org=2Fm-3=2E1"
    queue = QueueName()
    assert (queue.pool, queue.lane, queue.queue) == ("default", "normal", "default")
    assert queue.consumer == "default_normal_default"
    assert subjects.LANES == ("high", "normal", "low")
    assert subjects.DEFAULT_TENANT == "default"
    assert names.jobs_stream("org/m-3.1") == "HEADRACE_V1_JOBS_org=2Fm-3=2E1"
    assert names.log_stream(0) == "HEADRACE_V1_LOG_0"
    assert names.dead_stream == "HEADRACE_V1_DEAD"
    assert names.workers_bucket == "HEADRACE_V1_workers"
    assert names.config_bucket == "HEADRACE_V1_config"
    assert names.usage_bucket == "HEADRACE_V1_usage"
    assert names.infer("default", "chat", "smollm2-135m") == "headrace.v1.infer.default.chat.smollm2-135m"
    assert names.jobs("m", queue) == "headrace.v1.jobs.m.default.normal.default"
    assert names.wake("m", QueueName("batch", "low", "acme")) == "headrace.v1.wake.m.batch.low.acme"
    assert names.log("default", "j1") == "headrace.v1.log.0.default.j1"
    assert names.dead("default", "m", "j1") == "headrace.v1.dead.default.m.j1"
    assert names.cancel("default", "j1") == "headrace.v1.cancel.default.j1"
    assert names.status("default", "j1") == "headrace.v1.status.default.j1"
    assert names.ctl("w-1") == "headrace.v1.ctl.w-1"
    assert names.job_inbox("default", "j1") == "_INBOX.default.j1"
    assert names.message_id("default", "j1") == "default.j1"
    assert names.message_id("default", "j1", is_handed_over=True) == "default.j1.handed-over"
    assert subjects.SERVICE_INBOX_PREFIX == "_INBOX._svc"
    assert Names(prefix="a-b.c").upper == "A-B_C"
    assert Names(num_shards=16).log("default", "j1") == "headrace.v1.log.10.default.j1"


def test_what_a_part_counted() -> None:
    family = Family("headrace_x", "counter", "Meaning.", (Sample("headrace_x_total", {"model": "m"}, 2.0),))
    told = Measured(service="worker", process="w1", origin="host-7", families=(family,))
    data = (
        b'{"service":"worker","process":"w1","origin":"host-7",'
        b'"families":[["headrace_x","counter","Meaning.",[["headrace_x_total",{"model":"m"},2.0]]]]}'
    )
    assert msgspec.json.encode(told) == data
    assert msgspec.json.decode(data, type=Measured) == told


def test_headers_of_the_contract() -> None:
    assert [
        subjects.HDR_ID,
        subjects.HDR_PRIORITY,
        subjects.HDR_POOL,
        subjects.HDR_QUEUE_TIMEOUT,
        subjects.HDR_DEADLINE,
        subjects.HDR_FALLBACK,
        subjects.HDR_EVENT,
        subjects.HDR_JOB,
        subjects.HDR_ATTEMPT,
        subjects.HDR_OFFSET,
        subjects.HDR_RETRY_AFTER,
    ] == [
        "Headrace-Id",
        "Headrace-Priority",
        "Headrace-Pool",
        "Headrace-Queue-Timeout",
        "Headrace-Deadline",
        "Headrace-Fallback",
        "Headrace-Event",
        "Headrace-Job",
        "Headrace-Attempt",
        "Headrace-Offset",
        "Retry-After",
    ]


def test_defaults_of_the_contract() -> None:
    settings = Settings(state_dir="s")
    assert (settings.nats_url, settings.nats_system_url, settings.worker_id) == (None, None, None)
    assert settings.prefix == "headrace.v1"
    assert (settings.heartbeat_s, settings.worker_ttl_s, settings.ack_wait_s) == (0.5, 2, 10)
    assert (settings.max_attempts, settings.stall_s, settings.ageing_s) == (3, 30, 10)
    assert (settings.queue_timeout_s, settings.deadline_s, settings.queue_limit) == (60, 600, 10_000)
    assert (settings.grace_s, settings.default_max_tokens) == (30, 1024)
    assert (settings.http_port, settings.monitor_port) == (8080, 8081)
    assert settings.log_retention_s == 3600


@pytest.mark.parametrize("state", ["Starting", "Ready", "Busy", "Draining", "Failed"])
def test_worker_states_of_the_contract(state: str) -> None:
    data = msgspec.json.encode({"worker": "w", "epoch": "e", "state": state, "model": "m"})
    assert workers.decode_heartbeat(data) is not None
