"""The judgements of `headrace doctor`, each from the facts of a deployment with one thing wrong."""

import re
from typing import Any

import msgspec
import pytest

from headrace.bus.configuration import StoredEntry
from headrace.bus.consumers import Consumer
from headrace.bus.instancelist import Snapshot
from headrace.bus.survey import Account, Limits, Part, Replica
from headrace.doctor.facts import Facts, Known, SystemFacts, Unread
from headrace.doctor.finding import Check, Finding
from headrace.doctor.judge_broker import judge_unreachable
from headrace.doctor.judging import judge
from headrace.errors import BrokerDeniedError, BrokerTlsError, BrokerUnavailableError
from headrace.schemas.config import AliasConfig, AliasTarget, Config, ModelConfig, PoolConfig, PoolRule, TenantConfig
from headrace.schemas.instances import Device, FailedGeneration, GroupName, HostBeat, Slot, SlotName
from headrace.schemas.overview import GoneWorker, Overview
from headrace.schemas.replicas import Autoscale, ReplicaGroup
from headrace.schemas.workers import WorkerHealth
from headrace.settings import Settings
from tests.doctored import (
    MODEL,
    NAMES,
    beat,
    changed_stream,
    configured,
    consumer,
    healthy,
    severity_of,
    waiting,
)

DENIED = Unread(reason="the broker does not permit it", is_denied=True)
LOST = Unread(reason="no answer within 2 s")
JOBS = NAMES.jobs_stream(MODEL)
GROUP = ReplicaGroup(engine="sim", replicas=2, memory_mib=1024, uses="host")
NAME = GroupName(MODEL, GROUP.pool)


def replaced(facts: Facts, part: str, **changes: Any) -> Facts:
    return msgspec.structs.replace(facts, **{part: msgspec.structs.replace(getattr(facts, part), **changes)})


def finding(facts: Facts, check: Check) -> Finding:
    return next(each for each in judge(facts) if each.id == check)


def limited(**limits: Any) -> Known[Account]:
    return Known(Account(storage=500 << 20, memory=0, streams=9, consumers=10, limits=Limits(**limits)))


def declared(snapshot: Snapshot, group: ReplicaGroup = GROUP) -> Facts:
    facts = configured(healthy(), Config(models={MODEL: ModelConfig(instances=(group,))}))
    return msgspec.structs.replace(facts, instances=Known(snapshot))


def hosted(gib: int = 4, promised_gib: int = 0, **fields: Any) -> dict[str, HostBeat]:
    device = Device(name="host", kind="host", total_bytes=gib << 30, promised_bytes=promised_gib << 30)
    return {"a": HostBeat(host="a", epoch="e", devices=(device,), **fields)}


def leased(*states: Any, generation: str = GROUP.generation, reason: str = "") -> dict[SlotName, Slot]:
    return {
        SlotName(NAME, generation, index): Slot(host="a", epoch="e", state=state, reason=reason)
        for index, state in enumerate(states)
    }


def without_stream(facts: Facts, name: str) -> Facts:
    streams = tuple(
        msgspec.structs.replace(each, found=Known(None)) if each.name == name else each for each in facts.streams
    )
    return msgspec.structs.replace(facts, streams=streams)


def parted(*left_out: str, **metadata: dict[str, str]) -> Known[list[Part]]:
    found = healthy().parts
    assert isinstance(found, Known)
    parts = [each for each in found.value if each.name.removeprefix("headrace-") not in left_out]
    return Known(
        [
            msgspec.structs.replace(each, metadata=metadata.get(each.name.removeprefix("headrace-"), each.metadata))
            for each in parts
        ]
    )


def test_where_nothing_is_wrong_nothing_is_found() -> None:
    findings = judge(healthy())
    assert [each for each in findings if each.severity != "ok"] == []
    assert len(findings) > 15


FAILED = {(NAME, GROUP.generation): FailedGeneration(reason="no such file", failures=3, host="a")}
BROKEN: dict[str, tuple[Facts, Check, str]] = {
    "too old": (
        replaced(healthy(), "broker", version="2.10.29", numbers=(2, 10)),
        Check.BROKER_VERSION,
        "error: 2.10.29; Headrace needs 2.12",
    ),
    "without JetStream": (
        healthy(has_jetstream=False, account=LOST, streams=(), stream_names=LOST),
        Check.JETSTREAM,
        "error: without JetStream",
    ),
    "small messages": (replaced(healthy(), "broker", max_payload_bytes=262_144), Check.MAX_PAYLOAD, "warning: 245,760"),
    "tiny messages": (replaced(healthy(), "broker", max_payload_bytes=4096), Check.MAX_PAYLOAD, "error: more than 0 b"),
    "too few streams": (healthy(account=limited(max_streams=5)), Check.JETSTREAM_LIMITS, "error: may have 5 streams"),
    "little storage": (
        healthy(account=limited(max_storage=1 << 20)),
        Check.JETSTREAM_LIMITS,
        "error: 500.0 MiB of 1.0",
    ),
    "storage nearly full": (
        healthy(account=limited(max_storage=520 << 20)),
        Check.JETSTREAM_LIMITS,
        "warning: uses 500.0 MiB of 520.0 MiB storage",
    ),
    "consumers used up": (
        healthy(account=limited(max_consumers=10)),
        Check.JETSTREAM_LIMITS,
        "error: 10 of 10 consumers",
    ),
    "streams need a bound": (
        healthy(account=limited(max_bytes_required=True)),
        Check.JETSTREAM_LIMITS,
        "error: max_bytes",
    ),
    "no system account": (
        healthy(system=SystemFacts(is_set=False), parts=parted("monitor")),
        Check.SYSTEM_ACCOUNT,
        "warning: no system account is set",
    ),
    "a system account that does not work": (
        healthy(system=SystemFacts(is_set=True, trouble="refused")),
        Check.SYSTEM_ACCOUNT,
        "warning: does not work (refused)",
    ),
    "a monitor without a system account": (
        healthy(parts=parted(monitor={"prefix": NAMES.prefix, "notices": "no"})),
        Check.SYSTEM_ACCOUNT,
        "warning: 1 of 1 monitors",
    ),
    "a denied question": (healthy(num_dead=DENIED, beats=DENIED), Check.PERMISSIONS, "warning: workers, dead letters"),
    "no answer": (healthy(num_dead=LOST), Check.UNANSWERED, "error: dead letters"),
    "a clock that is off": (
        changed_stream(healthy(), JOBS, fields={"ahead_s": -9.0, "round_trip_s": 0.001}),
        Check.CLOCK,
        "warning: 9.000 s behind",
    ),
    "clocks of nodes apart": (
        changed_stream(healthy(), JOBS, fields={"ahead_s": 3.0, "leader": "n2", "round_trip_s": 0.003}),
        Check.NODE_CLOCKS,
        "warning: 2.999 s apart",
    ),
    "a router's clock ahead": (
        healthy(waiting=Known([waiting(router_ahead_s=5.0)])),
        Check.ROUTER_CLOCKS,
        "warning: 1 of 1 waiting requests were taken in by a clock that is 5.000 s ahead of",
    ),
    "a stream missing": (
        without_stream(healthy(), NAMES.dead_stream),
        Check.PROVISIONED,
        f"error: {NAMES.dead_stream}",
    ),
    "a setting that bounds": (
        changed_stream(healthy(), JOBS, max_msgs=5),
        Check.STREAM_SETTINGS,
        "warning: max_msgs is 5, should be 10000",
    ),
    "a setting that breaks": (
        changed_stream(healthy(), NAMES.log_stream(0), max_age=5),
        Check.STREAM_SETTINGS,
        "error: max_age is 5, should be 0",
    ),
    "a setting that is not there": (
        changed_stream(healthy(), NAMES.log_stream(0), republish=None),
        Check.STREAM_SETTINGS,
        "error: republish is not set, should be",
    ),
    "another deployment's stream": (
        changed_stream(healthy(), NAMES.dead_stream, subjects=["x"]),
        Check.STREAM_SETTINGS,
        "error: another deployment's",
    ),
    "no leader": (
        changed_stream(replaced(healthy(), "broker", cluster="C"), JOBS, fields={"leader": ""}),
        Check.STREAM_LEADER,
        "error: it has no leader",
    ),
    "a replica behind": (
        changed_stream(healthy(), JOBS, fields={"replicas": (Replica("n2", current=False, lag=7),)}),
        Check.STREAM_LEADER,
        f"warning: {JOBS} on n2 (7 behind)",
    ),
    "one replica on three nodes": (
        changed_stream(
            replaced(healthy(), "broker", cluster="C"),
            JOBS,
            fields={"replicas": (Replica("n2", current=True), Replica("n3", current=True))},
        ),
        Check.REPLICAS,
        "warning: one node only of the cluster C with 3 addresses",
    ),
    "a stranger's consumer": (
        healthy(consumers={MODEL: Known([consumer(), Consumer("theirs")])}),
        Check.FOREIGN_CONSUMER,
        "error: consumer theirs",
    ),
    "a stranger under a queue's name": (
        healthy(consumers={MODEL: Known([consumer(config={"filter_subject": "x.>"})])}),
        Check.FOREIGN_CONSUMER,
        "error: default_normal_default",
    ),
    "no router": (healthy(parts=parted("router")), Check.ROUTER, "error: no router"),
    "no monitor": (healthy(parts=parted("monitor")), Check.MONITOR, "error: no monitor"),
    "no gateway": (healthy(parts=parted("gateway")), Check.GATEWAY, "warning: no gateway"),
    "another deployment's router": (
        healthy(parts=parted(router={"prefix": "other.v1"})),
        Check.ROUTER,
        "error: no rout",
    ),
    "two versions": (
        healthy(parts=Known([*parted().value, Part("headrace-router", "r", "0.0.1")])),
        Check.VERSIONS,
        "warning: 0.0.1: router",
    ),
    "no worker": (healthy(beats=Known([])), Check.WORKERS, "warning: no worker lives"),
    "a worker that failed": (
        healthy(beats=Known([beat(state="Failed", reason="engine exited")])),
        Check.WORKER_STATE,
        "error: worker w1 .* is Failed: engine exited",
    ),
    "a worker that complains": (
        healthy(beats=Known([beat(reason="above the high water")])),
        Check.WORKER_STATE,
        "warning: above the high water",
    ),
    "no capacity": (healthy(beats=Known([beat(kv_capacity_tokens=0)])), Check.WORKER_CAPACITY, "error: no KV token"),
    "unknown capacity": (
        healthy(beats=Known([beat(kv_capacity_tokens=0, kv_capacity_source=None)])),
        Check.WORKER_CAPACITY,
        "warning: unknown KV capacity",
    ),
    "memory for few": (
        healthy(beats=Known([beat(max_concurrency=32, effective_concurrency=2)])),
        Check.WORKER_CONCURRENCY,
        "warning: w1 (2 of 32)",
    ),
    "rare beats": (
        healthy(beats=Known([beat(interval_s=1.0)])),
        Check.WORKER_HEARTBEAT,
        "warning: every 1 s, lives 2 s",
    ),
    "a silent worker": (healthy(beats=Known([beat(age_s=1.9)])), Check.WORKER_SILENT, "warning: w1 (1.9 s)"),
    "a lost worker": (
        healthy(
            overview=Known(Overview(workers=(), queues=(), gone=(GoneWorker(id="w9", ending="expired", age_s=3),)))
        ),
        Check.WORKER_LOST,
        "warning: w9 (3 s ago)",
    ),
    "nobody serves": (
        healthy(beats=Known([])),
        Check.QUEUE_UNSERVED,
        "error: model m, pool default: 3 requests, the oldest for 7 s",
    ),
    "only failed ones serve": (
        healthy(beats=Known([beat(state="Failed")])),
        Check.QUEUE_UNSERVED,
        "error: of workers there are: Failed",
    ),
    "one is starting": (
        healthy(beats=Known([beat(state="Starting")])),
        Check.QUEUE_UNSERVED,
        "warning: no worker serves",
    ),
    "another pool's worker": (healthy(beats=Known([beat(pool="gold")])), Check.QUEUE_UNSERVED, "error: pool default"),
    "a paused queue": (
        healthy(consumers={MODEL: Known([consumer(paused=True, pause_remaining=60 * 10**9)])}),
        Check.QUEUE_PAUSED,
        "error: another 60 s, with 3 requests waiting",
    ),
    "a paused model": (
        configured(healthy(), Config(models={MODEL: ModelConfig(paused=True)})),
        Check.QUEUE_PAUSED,
        "warning: model m is paused, with 3 requests waiting",
    ),
    "no host agent": (declared(Snapshot()), Check.HOSTS, "error: no host agent that starts workers: 2 workers"),
    "all host agents leave": (declared(Snapshot(hosts=hosted(is_draining=True))), Check.HOSTS, "error: draining: a"),
    "no host agent for what follows the load": (
        declared(Snapshot(), msgspec.structs.replace(GROUP, replicas=0, autoscale=Autoscale(min_replicas=0))),
        Check.HOSTS,
        "warning: 0 workers wanted, of m",
    ),
    "a generation that does not come up": (
        declared(Snapshot(hosts=hosted(), failed=FAILED)),
        Check.GENERATION_FAILED,
        "error: on host a .* no such file; none is ready",
    ),
    "a generation that does not come up beside the old one": (
        declared(Snapshot(hosts=hosted(), failed=FAILED, slots=leased("Ready", generation="old"))),
        Check.GENERATION_FAILED,
        "warning: no such file; 1 from before go on",
    ),
    "no room on any host": (
        declared(Snapshot(hosts=hosted(promised_gib=4))),
        Check.WORKERS_MISSING,
        "error: 0 of 2 workers of model m, pool default are ready: no host has room for one more: 1024 MiB",
    ),
    "no room beside the old ones": (
        declared(Snapshot(hosts=hosted(promised_gib=4), slots=leased("Ready", "Ready", generation="old"))),
        Check.WORKERS_MISSING,
        "warning: 0 of 2 workers .* 2 as declared before: no host has room",
    ),
    "no GPU on any host": (
        declared(Snapshot(hosts=hosted()), ReplicaGroup(engine="sim")),
        Check.WORKERS_MISSING,
        "error: no host has a GPU, .* `--uses host`",
    ),
    "a worker that fails": (
        declared(Snapshot(hosts=hosted(), slots=leased("Ready") | leased("Ready", "Failed", reason="out of memory"))),
        Check.WORKERS_MISSING,
        "warning: 1 of 2 .* out of memory (host a)",
    ),
    "workers that are starting": (
        declared(Snapshot(hosts=hosted(), slots=leased("Starting", "Claimed"))),
        Check.WORKERS_MISSING,
        "warning: 0 of 2 .* they are starting",
    ),
    "an empty paused queue": (
        healthy(
            consumers={MODEL: Known([consumer("gold_low_x", paused=True, pause_remaining=10**9)])},
        ),
        Check.QUEUE_PAUSED,
        "warning: gold_low_x .* 0 requests",
    ),
    "a queue nearly full": (
        changed_stream(healthy(), JOBS, fields={"num_messages": 9_500}),
        Check.QUEUE_FULL,
        "warning: 9,500 of at most 10,000",
    ),
    "about to expire": (healthy(waiting=Known([waiting(), waiting(3.0)])), Check.EXPIRING, "warning: the next in 3 s"),
    "overdue": (healthy(waiting=Known([waiting(-30.0)])), Check.EXPIRING, "error: 1 request past their time"),
    "dead letters": (healthy(num_dead=Known(2)), Check.DEAD_LETTERS, "warning: 2 dead letters"),
    "a key that cannot be read": (
        healthy(entries=Known({"tenants.x": StoredEntry("tenants.x", 1, None, "tenants.x is not JSON")})),
        Check.CONFIG_KEY,
        "error: tenants.x is not JSON",
    ),
    "an alias to nobody": (
        configured(healthy(), Config(aliases={"a": AliasConfig(targets=(AliasTarget(model="gone"),))})),
        Check.ALIAS_TARGET,
        "warning: a → gone",
    ),
    "a fallback to nobody": (
        configured(healthy(), Config(models={MODEL: ModelConfig(fallback="gone")})),
        Check.FALLBACK,
        "warning: m → gone",
    ),
    "a pool without workers": (
        configured(
            healthy(),
            Config(models={MODEL: ModelConfig(pools=(PoolConfig(name="gold"),), rules=(PoolRule(pool="gold"),))}),
        ),
        Check.POOL,
        "warning: rules of model m .* gold",
    ),
    "a tenant's pool that is none": (
        configured(healthy(), Config(tenants={"acme": TenantConfig(pool="gone")})),
        Check.POOL,
        "warning: acme (gone)",
    ),
    "a tenant's model that is none": (
        configured(healthy(), Config(tenants={"acme": TenantConfig(models=(MODEL, "gone"))})),
        Check.TENANT_MODEL,
        "warning: acme (gone)",
    ),
    "a queue limit above the stream's": (
        configured(healthy(), Config(models={MODEL: ModelConfig(queue_limit=20_000)})),
        Check.LIMITS,
        "warning: queue_limit of 20000, its stream takes 10000",
    ),
    "a tenant's limit that nothing reaches": (
        configured(healthy(), Config(tenants={"acme": TenantConfig(max_in_flight=50_000)})),
        Check.LIMITS,
        "warning: 50000 requests in flight",
    ),
    "a tenant's tokens too few for one request": (
        configured(healthy(), Config(tenants={"acme": TenantConfig(tokens_per_minute=1000)})),
        Check.LIMITS,
        "warning: 1000 tokens a minute",
    ),
    "more consumers than a stream may have": (
        configured(
            healthy(),
            Config(
                tenants={f"t{number}": TenantConfig() for number in range(70)},
                models={MODEL: ModelConfig(pools=tuple(PoolConfig(name=f"p{number}") for number in range(5)))},
            ),
        ),
        Check.LIMITS,
        "warning: 1152 consumers",
    ),
}


@pytest.mark.parametrize("trouble", BROKEN)
def test_one_trouble_is_found_with_its_figures_and_what_to_do(trouble: str) -> None:
    facts, check, told = BROKEN[trouble]
    severity, _, words = told.partition(": ")
    matching = [each for each in judge(facts) if each.id == check and each.severity == severity]
    assert any(re.search(re.escape(words).replace(r"\.\*", ".*"), each.found) for each in matching), judge(facts)
    assert all(each.remedy for each in matching)


def test_every_check_of_a_deployment_is_broken_by_one_of_these() -> None:
    of_this_machine = {Check.SETTINGS, Check.SECRETS, Check.STATE_DIR, Check.DISK, Check.OPEN_FILES}
    of_no_connection = {Check.BROKER, Check.CREDENTIAL, Check.TLS}
    assert {check for _, check, _ in BROKEN.values()} == set(Check) - of_this_machine - of_no_connection


def test_workers_that_are_as_declared_are_well() -> None:
    facts = declared(Snapshot(hosts=hosted(promised_gib=4), slots=leased("Ready", "Ready")))
    assert [each for each in judge(facts) if each.severity != "ok"] == []
    assert finding(facts, Check.HOSTS).found == "1 host agent (a) for 2 workers wanted, of m"
    assert finding(facts, Check.WORKERS_MISSING).found == "2 workers wanted of hosts, all ready"


def test_what_no_host_runs_is_started_by_no_other_command() -> None:
    facts = msgspec.structs.replace(declared(Snapshot(hosts=hosted())), beats=Known([]))
    assert "serve worker" not in finding(facts, Check.QUEUE_UNSERVED).remedy + finding(facts, Check.WORKERS).remedy


def test_a_worker_that_is_left_out_is_to_be_started_again_and_another_helps_itself() -> None:
    out = beat(state="Failed", reason="left out", health=WorkerHealth(is_left_out=True))
    assert "headrace drain w1 and start it again" in finding(healthy(beats=Known([out])), Check.WORKER_STATE).remedy
    failed = beat(state="Failed", reason="it died", health=WorkerHealth())
    assert "by itself" in finding(healthy(beats=Known([failed])), Check.WORKER_STATE).remedy


def test_workers_of_a_paused_model_are_not_sick() -> None:
    facts = healthy(beats=Known([beat(reason="the model is paused")]))
    facts = configured(facts, Config(models={MODEL: ModelConfig(paused=True)}))
    assert severity_of(judge(facts), Check.WORKER_STATE) is None


def test_a_pool_that_lends_serves_too() -> None:
    pools = (PoolConfig(name="gold", lends_to=("default",)),)
    facts = configured(healthy(beats=Known([beat(pool="gold")])), Config(models={MODEL: ModelConfig(pools=pools)}))
    assert severity_of(judge(facts), Check.QUEUE_UNSERVED) == "ok"


def test_an_alias_with_the_weight_0_or_to_a_configured_model_is_well() -> None:
    targets = (AliasTarget(model=MODEL), AliasTarget(model="gone", weight=0), AliasTarget(model="planned"))
    config = Config(models={"planned": ModelConfig()}, aliases={"a": AliasConfig(targets=targets)})
    assert severity_of(judge(configured(healthy(), config)), Check.ALIAS_TARGET) is None


def test_monitors_with_a_system_account_make_up_for_this_machine_without() -> None:
    assert severity_of(judge(healthy(system=SystemFacts(is_set=False))), Check.SYSTEM_ACCOUNT) == "ok"


def test_limits_of_a_tier_go_by_the_replicas_that_are_set() -> None:
    tiers = {"R1": {"limits": {"max_streams": 100}}, "R3": {"streams": 9, "limits": {"max_streams": 4}}}
    account = msgspec.convert({"tiers": tiers}, Account)
    assert severity_of(judge(healthy(account=Known(account))), Check.JETSTREAM_LIMITS) == "ok"
    settings = Settings(state_dir="unused", replicas=3)
    assert severity_of(judge(healthy(account=Known(account), settings=settings)), Check.JETSTREAM_LIMITS) == "error"


def test_what_is_not_known_is_not_judged() -> None:
    found = {each.id for each in judge(healthy(beats=LOST, parts=LOST, overview=LOST, entries=LOST, waiting=LOST))}
    assert Check.UNANSWERED in found
    assert found.isdisjoint(
        {Check.ROUTER, Check.MONITOR, Check.WORKERS, Check.QUEUE_UNSERVED, Check.CONFIG_KEY, Check.EXPIRING}
    )


def test_where_nothing_is_provisioned_the_other_prefixes_are_named_and_no_more_is_said() -> None:
    facts = healthy(stream_names=Known(["OTHER_V1_LOG_0"]), beats=LOST, overview=LOST, entries=LOST, num_dead=LOST)
    for stream in facts.streams:
        facts = without_stream(facts, stream.name)
    findings = judge(facts)
    assert "OTHER_V1" in finding(facts, Check.PROVISIONED).found
    assert finding(facts, Check.PROVISIONED).remedy == "headrace provision"
    assert {each.id for each in findings}.isdisjoint({Check.UNANSWERED, Check.WORKERS, Check.CONFIG_KEY})


def test_many_troubled_workers_are_told_in_bounds() -> None:
    beats = [beat(f"w{number}", state="Failed", reason="x") for number in range(300)]
    findings = [each for each in judge(healthy(beats=Known(beats))) if each.id == Check.WORKER_STATE]
    assert len(findings) == 21
    assert "280 more workers" in findings[-1].found


@pytest.mark.parametrize(
    ("error", "check"),
    [
        (BrokerUnavailableError("gone"), Check.BROKER),
        (BrokerDeniedError("unknown"), Check.CREDENTIAL),
        (BrokerTlsError("certificate"), Check.TLS),
    ],
)
def test_why_there_is_no_connection(error: BrokerUnavailableError, check: Check) -> None:
    found = judge_unreachable(error)
    assert (found.id, found.severity, found.found) == (check, "error", str(error))
    assert found.remedy
