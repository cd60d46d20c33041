"""What a monitor takes for the load of a group of replicas, and when it acts on it."""

from typing import Any

from headrace.monitor.groupload import group_load
from headrace.monitor.quiet import Quiet
from headrace.schemas.instances import GroupName, Scale
from headrace.schemas.replicas import Autoscale, ReplicaGroup
from headrace.schemas.subjects import Lane, QueueName
from headrace.schemas.workers import Heartbeat, HeldRequest

NAME = GroupName("m", "fast")
GROUP = ReplicaGroup(engine="sim", pool="fast", replicas=0, autoscale=Autoscale(min_replicas=0, max_replicas=4))
MESSAGES = {
    QueueName("fast", "high", "a"): 2,
    QueueName("fast", "normal", "b"): 5,
    QueueName("fast", "low", "b"): 10,
    QueueName("other", "high", "a"): 100,
}


def beat(worker: str = "w", **fields: Any) -> Heartbeat:
    return Heartbeat(**{"worker": worker, "epoch": "e", "state": "Ready", "model": "m", "pool": "fast", **fields})


def held(sequence: int, lane: Lane = "normal") -> HeldRequest:
    consumer = QueueName("fast", lane, "b").consumer
    return HeldRequest(consumer=consumer, sequence=sequence, tenant="b", job=str(sequence), attempt=1)


def test_without_a_replica_all_waits_and_what_was_measured_is_remembered() -> None:
    scale = Scale(replicas=0, seconds_per_job=3.0, slots=8)
    load = group_load(GROUP, NAME, scale=scale, messages=MESSAGES, beats=[])
    assert (load.wanted, load.num_ready) == (0, 0)
    assert (load.num_queued, load.num_ahead, load.num_running) == (17, 7, 0)
    assert (load.seconds_per_job, load.slots) == (3.0, 8)
    unknown = group_load(GROUP, NAME, scale=None, messages={}, beats=[])
    assert (unknown.seconds_per_job, unknown.slots, unknown.num_queued) == (None, None, 0)


def test_what_is_on_its_way_to_a_free_slot_runs() -> None:
    beats = [beat(max_concurrency=4, running=1, held=(held(1),)), beat("x", pool="other", max_concurrency=64)]
    load = group_load(GROUP, NAME, scale=Scale(replicas=2), messages=MESSAGES, beats=beats)
    assert (load.wanted, load.num_ready, load.slots) == (2, 1, 4)
    assert (load.num_queued, load.num_ahead, load.num_running) == (13, 3, 4)


def test_what_a_worker_holds_and_cannot_run_waits_before_all_others() -> None:
    full = beat(max_concurrency=2, running=2, waiting=1, held=(held(1), held(2), held(3)))
    load = group_load(GROUP, NAME, scale=Scale(replicas=1), messages=MESSAGES, beats=[full])
    assert (load.num_queued, load.num_ahead, load.num_running) == (15, 5, 2)


def test_a_jobs_time_is_that_at_which_all_together_work() -> None:
    beats = [
        beat("a", max_concurrency=8, effective_concurrency=2, seconds_per_job=1.0),
        beat("b", max_concurrency=4, seconds_per_job=4.0, state="Busy"),
        beat("c", max_concurrency=3),
        beat("d", max_concurrency=99, state="Draining", running=5),
        beat("e", max_concurrency=99, state="Starting"),
    ]
    load = group_load(GROUP, NAME, scale=Scale(replicas=3, seconds_per_job=9.0), messages={}, beats=beats)
    assert (load.num_ready, load.slots, load.seconds_per_job) == (3, 3.0, 2.0)
    assert load.num_running == 0


def test_a_monitor_acts_only_when_all_was_well_for_a_while() -> None:
    quiet = Quiet(span_s=4.0, every_s=1.0, now=0.0)
    assert [quiet.may_act(now, is_well=True) for now in (1.0, 2.0, 3.0, 4.0, 5.0)] == [False, False, False, True, True]
    assert [quiet.may_act(now, is_well=now != 6.0) for now in (6.0, 7.0, 9.0, 10.0)] == [False, False, False, True]
    quiet.begin(10.5)
    assert [quiet.may_act(now, is_well=True) for now in (11.0, 14.0, 14.5)] == [False, False, True]
    assert not quiet.may_act(20.0, is_well=True), "it was stopped itself, and its view is as old"


def test_what_a_monitor_does_itself_is_no_lag() -> None:
    quiet = Quiet(span_s=4.0, every_s=1.0, now=0.0)
    may_act = []
    for now in (4.0, 8.0, 12.0):  # each look takes three seconds
        may_act.append(quiet.may_act(now - 3.0, is_well=True))
        quiet.note_asked(now)
    assert may_act == [False, True, True]
