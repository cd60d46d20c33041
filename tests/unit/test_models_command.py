"""`headrace models` without a broker: what is said of workers, what follows from a change, and how far it is."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bus.configuration import StoredEntry
from headrace.bus.instancelist import Snapshot
from headrace.cli.model_alias import parse_target, shares
from headrace.cli.model_entries import KnownModels, near
from headrace.cli.model_list import ListedPool, listed
from headrace.cli.model_options import check_args
from headrace.cli.model_report import changed, consequences, differences, print_changes
from headrace.cli.rollout import rollout_of
from headrace.discipline.fit import no_room
from headrace.errors import ConfigError, HeadraceError
from headrace.schemas.config import AliasConfig, AliasTarget, ModelConfig, PoolConfig
from headrace.schemas.config_text import Entry, key_of
from headrace.schemas.instances import Device, FailedGeneration, GroupName, HostBeat, Scale, Slot, SlotName, SlotState
from headrace.schemas.replicas import Autoscale, ReplicaGroup
from headrace.schemas.subjects import QueueName
from headrace.schemas.workers import Heartbeat, HeldRequest, WorkerState
from tests.unit.test_cli import run

NAME = GroupName("m", "default")
GROUP = ReplicaGroup(engine="sim", replicas=3)
NEXT = msgspec.structs.replace(GROUP, args=("--max-concurrency", "8"))
DEVICE = Device(name="GPU-1", kind="gpu", total_bytes=1 << 34)
HOSTS = {"h": HostBeat(host="h", epoch="e", devices=(DEVICE,))}
BOUNDS = Autoscale(min_replicas=1, max_replicas=4)


def leases(group: ReplicaGroup, *states: SlotState, name: GroupName = NAME, reason: str = "") -> dict[SlotName, Slot]:
    return {
        SlotName(name, group.generation, index): Slot(
            host="h", epoch="e", worker=f"w-{group.generation}-{index}", state=state, reason=reason
        )
        for index, state in enumerate(states)
    }


def known(models: dict[str, Entry], *streams: str, aliases: dict[str, Entry] | None = None) -> KnownModels:
    keys = {key_of("models", name): entry for name, entry in models.items()}
    keys |= {key_of("aliases", name): entry for name, entry in (aliases or {}).items()}
    return KnownModels({key: StoredEntry(key, 1, entry) for key, entry in keys.items()}, frozenset(streams))


def beat(worker: str, *, state: WorkerState = "Ready", pool: str = "default", **more: Any) -> Heartbeat:
    return Heartbeat(worker=worker, epoch="e", state=state, model="m", pool=pool, engine="sim", **more)


# flags of workers


@pytest.mark.parametrize(
    "args",
    [(), ("--max-concurrency", "8"), ("-o", "tokens_per_second=5"), ("--memory-reserve", "1GiB", "--keeps-memory")],
)
def test_flags_of_a_worker_are_taken(args: tuple[str, ...]) -> None:
    check_args("sim", args)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--pool", "x"), "--args has --pool"),
        (("--model=m",), "--args has --model"),
        (("--engine", "sim"), "--args has --engine"),
        (("--worker-id", "w"), "the host agent gives each worker its own"),
        (("--log-format", "json"), "--args has --log-format"),
        (("--nats-url", "nats://elsewhere:1"), "their host agent's broker"),
        (("--prefix=q",), "--args has --prefix"),
        (("--state-dir", "d"), "--args has --state-dir"),
        (("--help",), "serve worker --help"),
        (("--max-concurrency", "0"), "--max-concurrency"),
        (("--max-concurrency",), "--max-concurrency"),
        (("--max-concurency", "1"), "--max-concurrency"),
        (("-o", "nothing"), "not key=value"),
        (("stray",), "stray"),
    ],
)
def test_flags_that_a_worker_would_not_take_are_refused_with_their_name(args: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        check_args("sim", args)
    assert str(refused.value).startswith("--args")


@pytest.mark.parametrize(
    "argv",
    [
        ("add", "m"),
        ("add", "m", "--engine", "nonsense"),
        ("add", "a\nb", "--engine", "sim"),
        ("add", "m", "--engine", "sim", "--args", "'"),
        ("add", "m", "--engine", "sim", "--args", "--pool x"),
        ("add", "m", "--engine", "sim", "--memory", "1 GB"),
        ("add", "m", "--engine", "sim", "--pool", "No!"),
        ("add", "m", "--engine", "sim", "--target-wait", "3"),
        ("set", "m"),
        ("set", "m", "--no-autoscale", "--max-replicas", "3"),
        ("set", "m", "--replicas", "many"),
        ("set", "m", "--replicas", "1", "--timeout", "0"),
        ("alias", "a", "m", "--remove"),
        ("alias", "a", "m=-1"),
        ("alias", "a", "m=0"),
        ("alias", "a", "m", "m"),
        ("alias", "a\nb", "m"),
        ("remove", "m", "--all", "--pool", "x"),
    ],
    ids=" ".join,
)
def test_wrong_usage_needs_no_broker(argv: tuple[str, ...], tmp_path: Any) -> None:
    result = run("models", *argv, HEADRACE_STATE_DIR=str(tmp_path / "state"))
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output


# what follows from a change


def test_a_change_of_number_restarts_nobody() -> None:
    more = msgspec.structs.replace(GROUP, replicas=5)
    assert consequences(NAME, GROUP, more, Snapshot(hosts=HOSTS)) == ["number only, 3 → 5: no worker is restarted"]
    assert differences(GROUP, more) == [("replicas", "3", "5")]


def test_another_generation_replaces_those_that_run() -> None:
    snapshot = Snapshot(hosts=HOSTS, slots=leases(GROUP, "Ready", "Ready", "Ready"))
    (line,) = consequences(NAME, GROUP, NEXT, snapshot)
    assert line == f"3 workers are replaced one by one: generation {GROUP.generation} → {NEXT.generation}"
    begun = Snapshot(hosts=HOSTS, slots=snapshot.slots | leases(NEXT, "Claimed"))
    assert consequences(NAME, GROUP, NEXT, begun) == [line]
    (one,) = consequences(NAME, GROUP, NEXT, Snapshot(hosts=HOSTS, slots=leases(GROUP, "Ready")))
    assert one.startswith("1 worker is replaced: generation")
    (line,) = consequences(NAME, NEXT, GROUP, snapshot)
    assert line.startswith("3 workers are as declared now already")
    (line,) = consequences(NAME, GROUP, NEXT, Snapshot(hosts=HOSTS))
    assert line.startswith("no worker runs now")
    assert differences(GROUP, NEXT) == [("args", "none", "--max-concurrency 8")]


def test_what_hinders_is_said() -> None:
    failed = {(NAME, NEXT.generation): FailedGeneration(reason="out of memory", failures=3)}
    lines = consequences(NAME, GROUP, NEXT, Snapshot(failed=failed), is_paused=True)
    assert any("out of memory" in line and "headrace models retry" in line for line in lines)
    assert any("no host agent runs" in line for line in lines)
    assert any("paused" in line for line in lines)
    assert consequences(NAME, GROUP, GROUP, Snapshot(failed=failed), is_paused=True) == []


def test_bounds_say_what_the_number_is_now() -> None:
    scaled = msgspec.structs.replace(GROUP, autoscale=BOUNDS)
    lines = consequences(NAME, GROUP, scaled, Snapshot(hosts=HOSTS, scales={NAME: Scale(replicas=9)}))
    assert lines == [
        "number only, 3 → 4: no worker is restarted",
        "the number follows the load between 1 and 4; now 4",
    ]
    assert ("max-replicas", "-", "4") in differences(GROUP, scaled)
    assert ("max-replicas", "4", "-") in differences(scaled, GROUP)


def test_a_new_group_is_told_by_what_is_not_the_default() -> None:
    change = changed("m", "default", ModelConfig(), ModelConfig(instances=(NEXT,)), Snapshot(hosts=HOSTS))
    assert (change.before, change.generation_before, change.generation) == (None, None, NEXT.generation)
    assert change.follows == (f"3 workers are started: generation {NEXT.generation}",)
    assert differences(None, NEXT) == [
        ("engine", "-", "sim"),
        ("replicas", "-", "3"),
        ("args", "-", "--max-concurrency 8"),
    ]


def test_a_key_in_the_flags_is_on_no_screen(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("-o", "url=http://h:1", "-o", "api_key=sk-1234", "--max-concurrency", "8")
    keyed = ReplicaGroup(engine="openai", args=args)
    print_changes([changed("m", "default", ModelConfig(), ModelConfig(instances=(keyed,)), Snapshot())], as_json=False)
    shown = capsys.readouterr().out
    assert "sk-1234" not in shown
    assert "-o api_key=… --max-concurrency 8" in shown


# how far it is


@pytest.mark.parametrize(
    ("slots", "is_done", "says"),
    [
        ({}, False, "0 of 3 ready"),
        (leases(GROUP, "Ready", "Ready"), False, "1 not yet placed on a host"),
        (leases(GROUP, "Ready", "Ready", "Starting"), False, "2 of 3 ready"),
        (leases(GROUP, "Ready", "Ready", "Ready"), True, "3 of 3 ready"),
        (leases(GROUP, "Ready", "Ready", "Ready", "Draining"), False, "1 to go"),
        (leases(GROUP, "Ready", "Ready", "Ready") | leases(NEXT, "Draining"), False, "1 to go"),
        (leases(GROUP, "Failed", reason="no such file"), False, "no such file (host h)"),
        (leases(GROUP, "Ready", "Ready", "Ready", name=GroupName("m", "other")), False, "0 of 3 ready"),
    ],
)
def test_a_rollout_is_done_when_those_that_are_wanted_are_there_and_no_others(
    slots: dict[SlotName, Slot], is_done: bool, says: str
) -> None:
    rollout = rollout_of(NAME, GROUP, Snapshot(slots=slots, hosts=HOSTS))
    assert rollout.is_done == is_done
    assert says in str(rollout)


def test_a_group_that_no_host_has_room_for_says_so() -> None:
    wide = msgspec.structs.replace(GROUP, memory_mib=1 << 20)
    assert str(rollout_of(NAME, wide, Snapshot(hosts=HOSTS))).endswith(
        "3 not yet placed on a host: no host has room for one more: 1048576 MiB of a GPU"
    )
    assert consequences(NAME, GROUP, wide, Snapshot(hosts=HOSTS))[-1].startswith("no host has room for one more")
    on_hosts = msgspec.structs.replace(GROUP, uses="host")
    assert (
        no_room(on_hosts, HOSTS) == "no host lends the machine's memory, and a worker needs a host's memory of its own"
    )
    without = {"h": msgspec.structs.replace(HOSTS["h"], devices=())}
    assert "no host has a GPU" in no_room(GROUP, without)
    assert "`--uses host`" in no_room(GROUP, without)
    draining = {"h": msgspec.structs.replace(HOSTS["h"], is_draining=True)}
    assert no_room(GROUP, HOSTS) == no_room(wide, {}) == no_room(wide, draining) == ""


def test_a_group_scaled_to_nothing_is_done_without_a_host() -> None:
    none = msgspec.structs.replace(GROUP, autoscale=Autoscale(min_replicas=0, max_replicas=4))
    snapshot = Snapshot(scales={NAME: Scale(replicas=0)})
    assert rollout_of(NAME, none, snapshot).is_done
    assert "no host agent runs" in str(rollout_of(NAME, GROUP, snapshot))


# the list


def only(pools: list[ListedPool], pool: str = "default") -> ListedPool:
    (found,) = (each for each in pools if each.pool == pool)
    return found


def test_a_model_is_listed_with_its_workers_whoever_started_them() -> None:
    slots = leases(GROUP, "Ready", "Starting")
    beats = [
        beat(f"w-{GROUP.generation}-0"),
        beat(f"w-{GROUP.generation}-1", state="Starting"),
        beat("by-hand", state="Busy"),
        beat("elsewhere", pool="long"),
    ]
    pools = listed(known({"m": ModelConfig(instances=(GROUP,))}), beats, Snapshot(slots=slots), {})
    assert [each.pool for each in pools] == ["default", "long"]
    first = only(pools)
    assert (first.wanted, first.leased, first.ready, first.undeclared) == (3, 2, 2, 1)
    assert [slot.state for slot in first.slots] == ["Ready", "Starting"]
    other = only(pools, "long")
    assert (other.engine, other.wanted, other.leased, other.ready, other.undeclared) == ("sim", None, 0, 1, 1)


def test_requests_are_those_of_the_pool_and_run_if_a_worker_holds_them() -> None:
    queue, long = QueueName(), QueueName("long", "low", "acme")
    held = HeldRequest(consumer=queue.consumer, sequence=1, tenant="t", job="j", attempt=1)
    counts = {"m": {queue: 3, QueueName(lane="high"): 1, long: 2}}
    pools = listed(known({}, "m"), [beat("w", held=(held,))], Snapshot(), counts)
    assert (only(pools).queued, only(pools).running) == (3, 1)
    assert (only(pools, "long").queued, only(pools, "long").running) == (2, 0)


def test_what_is_only_known_or_only_configured_is_listed_too() -> None:
    entry = ModelConfig(paused=True, pools=(PoolConfig(name="long"),))
    pools = listed(known({"a": entry}, "b"), [], Snapshot(), {})
    assert [(each.model, each.pool, each.paused) for each in pools] == [("a", "long", True), ("b", "default", False)]


def test_bounds_failures_and_aliases_are_listed() -> None:
    group = msgspec.structs.replace(GROUP, autoscale=BOUNDS)
    failed = {
        (NAME, group.generation): FailedGeneration(reason="no memory", failures=3, host="h"),
        (NAME, "00000000"): FailedGeneration(reason="long ago", failures=1),
    }
    chat = AliasConfig(targets=(AliasTarget(model="m", weight=9), AliasTarget(model="n", version="2", weight=1)))
    config = known({"m": ModelConfig(instances=(group,))}, "n@2", aliases={"chat": chat})
    scales = {NAME: Scale(replicas=2, reason="queue")}
    pools = listed(config, [], Snapshot(failed=failed, scales=scales), {})
    first, second = pools
    assert first.wanted == 2
    assert first.autoscale is not None
    assert (first.autoscale.min_replicas, first.autoscale.max_replicas, first.autoscale.reason) == (1, 4, "queue")
    assert first.failed is not None
    assert (first.failed.reason, first.failed.host, first.failed.failures) == ("no memory", "h", 3)
    assert [(each.alias, each.share) for each in first.aliases] == [("chat", 0.9)]
    assert (second.model, [(each.alias, each.share) for each in second.aliases]) == ("n@2", [("chat", 0.1)])


def test_what_keeps_hosts_from_taking_more_is_listed() -> None:
    config = known({"m": ModelConfig(instances=(msgspec.structs.replace(GROUP, memory_mib=1 << 20),))})
    assert "headrace serve host" in only(listed(config, [], Snapshot(), {})).hindrance
    assert "no host has room" in only(listed(config, [], Snapshot(hosts=HOSTS), {})).hindrance
    config = known({"m": ModelConfig(instances=(GROUP,))})
    leased = leases(GROUP, "Ready", "Ready", "Starting")
    assert only(listed(config, [], Snapshot(hosts=HOSTS), {})).hindrance == ""
    assert only(listed(config, [], Snapshot(slots=leased), {})).hindrance == ""


# names


def test_a_misspelt_model_is_told_what_is_near() -> None:
    config = known(
        {"smollm2-135m": ModelConfig()},
        "mistral",
        aliases={"chat": AliasConfig(targets=(AliasTarget(model="mistral"),))},
    )
    with pytest.raises(HeadraceError, match="did you mean smollm2-135m"):
        config.require("smolm2-135m")
    with pytest.raises(HeadraceError, match="there are: mistral, smollm2-135m"):
        config.require("x")
    with pytest.raises(HeadraceError, match=r"alias: name the model that is meant \(mistral\)"):
        config.require("chat")
    assert config.require("mistral") == ModelConfig()
    assert near("x", []) == "there are: none"
    assert near("x", [f"m{number}" for number in range(30)]).endswith("and 10 more")


def test_an_entry_that_cannot_be_read_is_not_overwritten() -> None:
    key = key_of("models", "m")
    config = KnownModels({key: StoredEntry(key, 1, None, "models.m is bad")}, frozenset("m"))
    with pytest.raises(HeadraceError, match="m is bad"):
        config.require("m")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("m", {"model": "m"}),
        ("m=3", {"model": "m", "weight": 3.0}),
        ("org/m@2=0.5", {"model": "org/m", "version": "2", "weight": 0.5}),
        ("m=x", {"model": "m=x"}),
        ("m=x=1", {"model": "m=x", "weight": 1.0}),
        ("=1", {"model": "=1"}),
        ("m@", {"model": "m@"}),
    ],
)
def test_a_target_is_a_model_a_version_and_a_weight(text: str, values: dict[str, Any]) -> None:
    assert parse_target(text) == values


@given(st.lists(st.floats(0.01, 1000), min_size=1, max_size=16))
def test_shares_add_up(weights: list[float]) -> None:
    targets = tuple(AliasTarget(model=f"m{number}", weight=weight) for number, weight in enumerate(weights))
    found = shares(AliasConfig(targets=targets))
    assert sum(found.values()) == pytest.approx(1, abs=0.001 * len(weights))
    assert all(0 <= share <= 1 for share in found.values())
