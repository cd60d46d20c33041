"""Golden bytes of what autoscalers decide: host agents and other monitors, older or newer, read them."""

import msgspec

from headrace.schemas.instances import GroupName, Scale
from headrace.schemas.replicas import Autoscale, ReplicaGroup

SCALE = Scale(
    replicas=2,
    reason="3 wait",
    decided_at=5.0,
    up_at=5.0,
    down_at=1.5,
    idle_since=6.0,
    seconds_per_job=2.5,
    slots=4.0,
)
GOLDEN = (
    b'{"replicas":2,"reason":"3 wait","decided_at":5.0,"up_at":5.0,"down_at":1.5,"idle_since":6.0,'
    b'"seconds_per_job":2.5,"slots":4.0}'
)


def test_a_decision_has_its_bytes_and_its_key() -> None:
    assert msgspec.json.encode(SCALE) == GOLDEN
    assert msgspec.json.decode(GOLDEN, type=Scale) == SCALE
    assert GroupName("org/m-3.1", "fast").scale_key == "scale.org=2Fm-3=2E1.fast"


def test_the_oldest_and_newer_decisions_are_read() -> None:
    assert msgspec.json.decode(b'{"replicas":1}', type=Scale) == Scale(replicas=1)
    assert msgspec.json.decode(b'{"replicas":1,"later":[1]}', type=Scale) == Scale(replicas=1)


def test_a_configured_group_is_read_as_people_write_it() -> None:
    text = b'{"engine":"vllm","autoscale":{"min_replicas":0,"max_replicas":4,"target_wait_s":5}}'
    bounds = Autoscale(min_replicas=0, max_replicas=4, target_wait_s=5)
    assert msgspec.json.decode(text, type=ReplicaGroup) == ReplicaGroup(engine="vllm", autoscale=bounds)
