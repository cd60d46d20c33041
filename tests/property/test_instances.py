"""Names, generations and numbers of replicas."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.discipline.replicas import wanted_replicas
from headrace.schemas.config import ModelConfig
from headrace.schemas.instances import GroupName, Scale, SlotName
from headrace.schemas.replicas import Autoscale, ReplicaGroup
from headrace.schemas.subjects import is_model_name

models = st.text(min_size=1, max_size=30).filter(is_model_name)
pools = st.from_regex(r"[a-z0-9-]{1,40}", fullmatch=True)
groups = st.builds(GroupName, models, pools)
slots = st.builds(SlotName, groups, st.from_regex(r"[0-9a-f]{8}", fullmatch=True), st.integers(0, 999))


@given(slots)
def test_a_slot_is_read_from_its_key(slot: SlotName) -> None:
    assert SlotName.of_key(slot.key) == slot
    assert not set(slot.key) & set(" *>\t\n")


@given(groups)
def test_a_group_is_read_from_its_key(group: GroupName) -> None:
    assert GroupName.of_scale_key(group.scale_key) == group


@pytest.mark.parametrize(
    "key", ["", "slots", "slots.m.p.g", "slots.m.p.g.-1", "slots.m.p.g.²", "slots.m.P!.g.1", "hosts.a"]
)
def test_other_keys_name_no_slot(key: str) -> None:
    assert SlotName.of_key(key) is None


def test_a_generation_is_how_a_worker_is_started_and_not_how_many_there_are() -> None:
    group = ReplicaGroup(engine="sim", replicas=1)
    more = msgspec.structs.replace(group, replicas=5, autoscale=Autoscale(max_replicas=9))
    assert more.generation == group.generation
    for change in ({"args": ("-o", "x=1")}, {"engine": "llama"}, {"memory_mib": 1}, {"uses": "host"}, {"restarts": 1}):
        assert msgspec.structs.replace(group, **change).generation != group.generation


@given(st.integers(0, 50), st.none() | st.integers(0, 50), st.integers(0, 50), st.integers(1, 50))
def test_an_autoscaled_number_is_within_its_bounds(configured: int, decided: int | None, low: int, span: int) -> None:
    bounds = Autoscale(min_replicas=low, max_replicas=low + span)
    scale = Scale(replicas=decided) if decided is not None else None
    fixed = ReplicaGroup(engine="sim", replicas=configured)
    scaled = msgspec.structs.replace(fixed, autoscale=bounds)
    assert wanted_replicas(fixed, scale) == configured
    assert low <= wanted_replicas(scaled, scale) <= low + span


@pytest.mark.parametrize(
    ("instances", "says"),
    [
        ((ReplicaGroup(engine="sim", pool="fast"),), "instances name the pool 'fast'"),
        ((ReplicaGroup(engine="sim"), ReplicaGroup(engine="llama")), "twice"),
    ],
)
def test_a_pool_has_one_group_at_most(instances: tuple[ReplicaGroup, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ModelConfig(instances=instances)


def test_bounds_that_no_number_meets_are_refused() -> None:
    with pytest.raises(ValueError, match="min_replicas is 3"):
        Autoscale(min_replicas=3, max_replicas=2)
