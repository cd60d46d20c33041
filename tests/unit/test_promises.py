"""Promises are judged by what was seen: each is broken by what breaks it, and by nothing being seen of it."""

from typing import Any

import msgspec
import pytest

from headrace.bench.mixedload import KINDS, Sent, planned
from headrace.bench.promises import Fault, Look, Run, judge, loads
from headrace.bench.simulatedhosts import place, simulate_hosts
from headrace.bench.threehosts import HOSTS_GIB, MODELS
from headrace.cli.takeover import Start, Watched

CHAT, SUMMARY, BATCH = KINDS


def start(worker: str, attempt: int, at: float) -> Start:
    return Start(worker=worker, attempt=attempt, at=at, num_tokens=0, last_token_at=None)


def sent(job: str, *starts: Start, kind: Any = CHAT, **changes: Any) -> Sent:
    watched = Watched(threshold=1)
    watched.starts = list(starts)
    watched.num_tokens = 8
    fields: dict[str, Any] = {
        "end": "done",
        "sent_at": 0.0,
        "answered_at": 0.01,
        "position": 0,
        "ended_at": 9.0,
    } | changes
    return Sent(kind=kind, tokens=8, watched=watched, job=job, **fields)


def good_run() -> Run:
    return Run(
        sent=[
            sent("killed", start("w1", 1, 1.0), start("w2", 2, 5.05)),
            sent("stopped", start("w3", 1, 1.0), start("w4", 2, 7.5), kind=SUMMARY),
            sent("late", start("w2", 1, 8.0)),
            sent("full", end="queue_full", is_refused=True, retry_after_s=3, position=None),
        ],
        terminals={"killed": 1, "stopped": 1, "late": 1},
        faults=[
            Fault(kind="worker killed", who="w1", at=5.0, workers=("w1",)),
            Fault(kind="worker stopped", who="w3", at=6.0, workers=("w3",)),
        ],
        looks=[Look(at_s=0.0, ready={"small": 2}, wanted={"small": 2}, num_workers=2, fullest=0.5)],
    )


def broken(run: Run) -> list[int]:
    return [promise.number for promise in judge(run) if not promise.holds]


def test_a_good_run_breaks_nothing() -> None:
    assert broken(good_run()) == []


def test_of_nothing_seen_nothing_is_claimed() -> None:
    assert broken(Run(sent=[], terminals={}, faults=[], looks=[])) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("job", "changes", "number"),
    [
        ("killed", {"damage": "token 3 came after 1 tokens"}, 2),
        ("killed", {"position": None}, 5),
        ("killed", {"ended_at": 500.0}, 5),
        ("full", {"retry_after_s": None}, 5),
        ("full", {"answered_at": 3.0}, 5),
    ],
)
def test_what_one_request_met_breaks_a_promise(job: str, changes: dict[str, Any], number: int) -> None:
    run = good_run()
    for each in run.sent:
        if each.job == job:
            for name, value in changes.items():
                setattr(each, name, value)
    assert broken(run) == [number]


def test_two_ends_and_a_worker_too_full_break_theirs() -> None:
    run = good_run()
    assert broken(msgspec.structs.replace(run, terminals={**run.terminals, "late": 2})) == [1]
    too_full = msgspec.structs.replace(run.looks[0], fullest=1.01)
    assert broken(msgspec.structs.replace(run, looks=[too_full])) == [3]


def test_an_interrupted_stream_may_wait_for_room_but_not_behind_a_queued_one() -> None:
    run = good_run()
    run.sent[0].watched.starts[1] = start("w2", 2, 6.5)
    assert broken(run) == []
    run.sent[2].watched.starts = [start("w2", 1, 6.0)]
    assert broken(run) == [4]


def test_a_stopped_workers_stream_goes_on_within_two_seconds() -> None:
    run = good_run()
    run.sent[1].watched.starts[1] = start("w4", 2, 9.0)
    assert broken(run) == [4]


def test_loads_are_counted_by_kind() -> None:
    found = {load.kind: load for load in loads(good_run())}
    assert found["chat"].ends == {"done": 2, "queue_full": 1}
    assert found["summary"].wait_ms is not None


def test_the_same_seed_plans_the_same_requests() -> None:
    one, other = planned(60, seed=3), planned(60, seed=3)
    assert [(at, each.kind.name, each.tokens) for at, each in one] == [
        (at, each.kind.name, each.tokens) for at, each in other
    ]
    assert sum(each.kind is BATCH for _, each in one) == BATCH.at_start


def test_hosts_hold_what_they_place() -> None:
    placed = place(HOSTS_GIB, MODELS)
    for host, gib in HOSTS_GIB.items():
        need = sum(
            placed[model].on(host) * (group.memory_mib or 0) for model in placed for group in MODELS[model].instances
        )
        assert need <= gib * 1024
    assert {model: placed[model].total() for model in placed} == {"small": 4, "large": 2}


def test_simulated_hosts_keep_the_promises() -> None:
    run = simulate_hosts(HOSTS_GIB, MODELS, duration_s=20, seed=1)
    assert all(promise.holds for promise in run.promises)
    assert {each.kind for each in run.kinds} == {kind.name for kind in KINDS}
