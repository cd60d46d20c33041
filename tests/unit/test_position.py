"""Position and ETA: what the discipline would start first, and how long that takes."""

import pytest

from headrace.discipline.position import eta_s, num_startable, position, retry_after_s, waiting_of
from headrace.schemas.subjects import QueueName
from headrace.schemas.workers import Heartbeat, HeldRequest

NORMAL = QueueName()
HIGH = QueueName(lane="high")
LOW = QueueName(lane="low")
OTHER = QueueName(queue="other")
ELSEWHERE = QueueName(pool="batch", lane="high")


def beat(**fields: object) -> Heartbeat:
    return Heartbeat(worker="w", epoch="e", state="Ready", model="m", **fields)  # type: ignore[arg-type]


def held(consumer: str, sequence: int) -> HeldRequest:
    return HeldRequest(consumer=consumer, sequence=sequence, tenant="default", job="j", attempt=1)


def test_what_workers_hold_does_not_wait() -> None:
    workers = [beat(held=(held(NORMAL.consumer, 1), held(NORMAL.consumer, 2), held("no-consumer", 3)))]
    assert waiting_of({NORMAL: 5, HIGH: 1}, workers) == {NORMAL: 3, HIGH: 1}
    assert waiting_of({NORMAL: 1}, workers) == {NORMAL: 0}


def test_higher_lanes_go_first_and_lower_ones_and_other_pools_do_not_count() -> None:
    waiting = {NORMAL: 4, HIGH: 3, LOW: 50, ELSEWHERE: 9}
    assert position(waiting, NORMAL, num_ahead=4) == 7
    assert position(waiting, HIGH, num_ahead=0) == 0
    assert position(waiting, LOW, num_ahead=2) == 9


def test_queues_of_a_lane_take_turns() -> None:
    assert position({NORMAL: 50, OTHER: 5}, OTHER, num_ahead=4) == 9
    assert position({NORMAL: 2, OTHER: 5}, OTHER, num_ahead=4) == 6


@pytest.mark.parametrize(
    ("num_before", "expected"),
    [(0, 0.0), (1, 0.0), (2, 0.5), (5, 2.0)],
)
def test_eta_is_zero_with_room_and_follows_the_measured_rate_without(num_before: int, expected: float) -> None:
    workers = [beat(max_concurrency=4, running=2, seconds_per_job=2.0)]
    assert eta_s(num_before, workers) == expected


def test_eta_is_unknown_before_anything_was_measured() -> None:
    assert eta_s(0, []) is None
    assert eta_s(3, [beat(max_concurrency=1, running=1)]) is None


def test_eta_is_unknown_while_the_model_is_paused_whatever_is_free() -> None:
    assert eta_s(0, [beat(max_concurrency=4, seconds_per_job=1.0)], is_paused=True) is None


@pytest.mark.parametrize(("eta", "seconds"), [(None, 1), (0.0, 1), (0.2, 1), (1.0, 1), (1.1, 2)])
def test_retry_after_is_a_whole_number_of_at_least_one(eta: float | None, seconds: int) -> None:
    assert retry_after_s(eta) == seconds


def test_what_could_start_now_is_bound_by_slots_and_by_memory() -> None:
    assert num_startable([beat(max_concurrency=4, running=1), beat(max_concurrency=2, running=2)], 100) == 3
    assert num_startable([beat(max_concurrency=64, kv_capacity_tokens=1000, kv_reserved_tokens=350)], 300) == 2
    assert num_startable([beat(max_concurrency=64, kv_capacity_tokens=1000, kv_reserved_tokens=1000)], 1) == 0


def test_nothing_starts_at_once_where_something_waits_for_memory() -> None:
    assert num_startable([beat(max_concurrency=64, kv_capacity_tokens=1000, waiting=1)], 100) == 0
