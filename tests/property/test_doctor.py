"""Whatever is known of a deployment: findings are told once, in order, with a remedy, and nothing unknown is judged."""

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bus.survey import Account, Beat, Limits, Part, Replica
from headrace.doctor.facts import Facts, Known, SystemFacts, Unread
from headrace.doctor.finding import SEVERITIES, Check, Finding
from headrace.doctor.judging import judge
from headrace.schemas.config import AliasConfig, AliasTarget, Config, ModelConfig, PoolConfig, PoolRule, TenantConfig
from headrace.schemas.overview import GoneWorker, Overview, QueueOverview
from tests.doctored import MODEL, beat, changed_stream, configured, consumer, healthy, queue, waiting

unread = st.builds(Unread, reason=st.sampled_from(["no answer", "status 503"]), is_denied=st.booleans())
names = st.sampled_from(["default", "gold", "gone"])
models = st.sampled_from([MODEL, "other", "gone"])
sizes = st.integers(-1, 1 << 40)
counts = st.integers(0, 20)


def known(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(unread, st.builds(Known, values))


beats: st.SearchStrategy[Beat] = st.builds(
    beat,
    st.sampled_from(["w1", "w2"]),
    age_s=st.floats(0, 100),
    ttl_s=st.none() | st.floats(1, 60),
    state=st.sampled_from(["Starting", "Ready", "Busy", "Draining", "Failed"]),
    model=models,
    pool=names,
    reason=st.sampled_from(["", "too hot"]),
    kv_capacity_tokens=st.integers(0, 1 << 20),
    kv_capacity_source=st.sampled_from([None, "engine", "memory"]),
    effective_concurrency=st.none() | st.integers(0, 64),
    max_concurrency=st.integers(1, 64),
    interval_s=st.floats(0.05, 60),
)
queues: st.SearchStrategy[QueueOverview] = st.builds(
    queue, counts, model=models, pool=names, oldest_age_s=st.none() | st.floats(0, 1e6)
)
gone = st.builds(
    GoneWorker, id=names, ending=st.sampled_from(["left", "expired", "tombstoned"]), age_s=st.floats(0, 60)
)
parts = st.builds(
    Part,
    st.sampled_from(["headrace-router", "headrace-monitor", "headrace-gateway", "headrace-worker", "else"]),
    names,
    st.sampled_from(["0.1.0", "9.9.9"]),
    st.none() | st.dictionaries(st.sampled_from(["prefix", "notices", "worker"]), st.sampled_from(["no", "yes", "w1"])),
)
accounts = st.builds(
    Account,
    sizes,
    sizes,
    counts,
    counts,
    st.builds(Limits, sizes, sizes, st.integers(-1, 20), st.integers(-1, 20), st.booleans()),
)
configs = st.builds(
    Config,
    tenants=st.dictionaries(
        names,
        st.builds(
            TenantConfig,
            pool=st.none() | names,
            models=st.none() | st.tuples(models),
            max_in_flight=st.none() | st.integers(1, 100_000),
            tokens_per_minute=st.none() | st.integers(1, 100_000),
        ),
    ),
    models=st.dictionaries(
        models,
        st.builds(
            ModelConfig,
            pools=st.just((PoolConfig(name="gold", lends_to=("default",)),)),
            rules=st.just(()) | st.just((PoolRule(pool="gold"),)),
            queue_limit=st.none() | st.integers(1, 100_000),
            fallback=st.none() | models,
        ),
    ),
    aliases=st.dictionaries(names, st.builds(AliasConfig, targets=st.tuples(st.builds(AliasTarget, model=models)))),
)


@st.composite
def facts(draw: st.DrawFn) -> Facts:
    """Everything about a deployment that may be so, and any part of it unknown."""
    found = configured(healthy(), draw(configs))
    for stream in found.streams:
        if draw(st.booleans()):
            found = changed_stream(
                found,
                stream.name,
                num_replicas=draw(st.sampled_from([1, 3])),
                max_age=draw(st.sampled_from([0, 5])),
                max_msgs=draw(st.integers(-1, 10)),
                fields={
                    "num_messages": draw(counts),
                    "leader": draw(st.sampled_from(["", "n1", "n2"])),
                    "replicas": draw(st.sampled_from([(), (Replica("n3", current=True),), (Replica("n2", lag=3),)])),
                    "ahead_s": draw(st.none() | st.floats(-1e6, 1e6)),
                },
            )
    streams = tuple(
        msgspec.structs.replace(stream, found=draw(st.just(stream.found) | st.just(Known(None)) | unread))
        for stream in found.streams
    )
    paused = consumer("gold_low_x", paused=True, pause_remaining=draw(st.integers(0, 10**12)))
    strange = consumer("strange")
    return msgspec.structs.replace(
        found,
        streams=draw(st.sampled_from([streams, ()])),
        broker=msgspec.structs.replace(
            found.broker,
            cluster=draw(st.sampled_from(["", "C"])),
            numbers=draw(st.tuples(st.integers(1, 3), st.integers(0, 20))),
            max_payload_bytes=draw(st.integers(0, 1 << 24)),
        ),
        account=draw(known(accounts)),
        has_jetstream=draw(st.booleans()),
        system=SystemFacts(is_set=draw(st.booleans()), trouble=draw(st.sampled_from(["", "refused"]))),
        stream_names=draw(known(st.just([stream.name for stream in streams]))),
        consumers={
            MODEL: draw(
                known(st.lists(st.sampled_from([consumer(), paused, strange]), unique_by=lambda each: each.name))
            )
        },
        parts=draw(known(st.lists(parts, max_size=5))),
        beats=draw(known(st.lists(beats, max_size=2, unique_by=lambda each: each.beat.worker))),
        overview=draw(
            known(
                st.builds(
                    Overview, workers=st.just(()), queues=st.lists(queues, max_size=2).map(tuple), gone=st.tuples(gone)
                )
            )
        ),
        entries=draw(st.just(found.entries) | unread),
        waiting=draw(
            known(
                st.lists(
                    st.builds(waiting, st.floats(-1e6, 1e6), router_ahead_s=st.none() | st.floats(-1e6, 1e6)),
                    max_size=3,
                )
            )
        ),
        num_dead=draw(known(counts)),
    )


@settings(max_examples=50)
@given(facts())
def test_whatever_is_known_each_finding_can_be_told(known_facts: Facts) -> None:
    findings = judge(known_facts)
    assert len({msgspec.json.encode(each) for each in findings}) == len(findings)
    ranks = [(SEVERITIES.index(each.severity), list(Check).index(each.id)) for each in findings]
    assert ranks == sorted(ranks)
    for each in findings:
        assert each.found
        assert each.found.isprintable()
        assert bool(each.remedy) is (each.severity != "ok")
        assert msgspec.json.decode(msgspec.json.encode(each), type=Finding) == each


@settings(max_examples=50)
@given(facts())
def test_a_check_that_is_well_is_said_once_and_not_beside_its_trouble(known_facts: Facts) -> None:
    findings = judge(known_facts)
    well = [each.id for each in findings if each.severity == "ok"]
    assert len(set(well)) == len(well)
    in_part = {Check.WORKERS}
    assert {each.id for each in findings if each.severity != "ok"}.isdisjoint(set(well) - in_part)


@settings(max_examples=50)
@given(facts())
def test_nothing_is_said_of_what_is_not_known(known_facts: Facts) -> None:
    found = {each.id for each in judge(known_facts)}
    for part, silent in (
        (known_facts.parts, {Check.ROUTER, Check.MONITOR, Check.GATEWAY, Check.VERSIONS}),
        (known_facts.beats, {Check.WORKERS, Check.WORKER_STATE, Check.WORKER_CAPACITY, Check.WORKER_SILENT}),
        (known_facts.overview, {Check.QUEUE_UNSERVED, Check.WORKER_LOST}),
        (known_facts.entries, {Check.CONFIG_KEY, Check.LIMITS, Check.ALIAS_TARGET}),
        (known_facts.waiting, {Check.EXPIRING, Check.ROUTER_CLOCKS}),
        (known_facts.num_dead, {Check.DEAD_LETTERS}),
        (known_facts.account, {Check.JETSTREAM_LIMITS}),
    ):
        if isinstance(part, Unread):
            assert found.isdisjoint(silent)


@settings(max_examples=50)
@given(facts())
def test_what_gets_better_adds_no_error(known_facts: Facts) -> None:
    """A worker that comes and serves everything makes no finding worse than there was."""
    if not isinstance(known_facts.beats, Known):
        return
    more = [beat(f"new{number}", model=model, pool=pool) for number, (model, pool) in enumerate(_ALL)]
    after = msgspec.structs.replace(known_facts, beats=Known([*known_facts.beats.value, *more]))
    assert _errors(after) <= _errors(known_facts)


_ALL = [(model, pool) for model in (MODEL, "other", "gone") for pool in ("default", "gold", "gone")]


def _errors(known_facts: Facts) -> set[Check]:
    return {each.id for each in judge(known_facts) if each.severity == "error"}
