"""Small random traces under every policy: nothing is lost, doubled, over-committed or left beside free room."""

import itertools
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas.subjects import LANES
from headrace.simulator.model import EngineModel
from headrace.simulator.policy import PolicyOptions
from headrace.simulator.report import summarize
from headrace.simulator.requests import Request
from headrace.simulator.simulation import POLICIES, Outcome, simulate
from headrace.simulator.traces import Arrival

MODEL = EngineModel(
    kv_tokens=640, max_concurrency=4, max_step_tokens=64, weights_s=0.01, token_s=0.0005, context_token_s=1e-5
)
MAX_IDLE_S = 0.3


@st.composite
def arrivals_of(draw: st.DrawFn, *, max_prompt: int = 700, is_uniform: bool = False) -> list[Arrival]:
    arrivals, time_s = [], 0.0
    for _ in range(draw(st.integers(1, 30))):
        time_s += draw(st.sampled_from([0.0, 0.0, 0.0005, 0.05, 0.7, 12.0]))
        prompt = 100 if is_uniform else draw(st.integers(1, max_prompt))
        output = draw(st.integers(1, 60))
        prefix = draw(st.sampled_from(["", "a", "b"]))
        arrivals.append(
            Arrival(
                time_s=time_s,
                prompt_tokens=prompt,
                output_tokens=output,
                max_tokens=60 if is_uniform else output + draw(st.integers(0, 60)),
                tenant=draw(st.sampled_from(["x", "y"])),
                lane=draw(st.sampled_from(LANES)),
                prefix=prefix,
                prefix_tokens=max(1, prompt // 2) if prefix else 0,
            )
        )
    return arrivals


def play(arrivals: Sequence[Arrival], policy: str, num_workers: int) -> Outcome:
    ended: list[int] = []
    options = PolicyOptions(fixed_concurrency=3, weights={"x": 2.0})
    outcome = simulate(
        arrivals, policy, num_workers=num_workers, model=MODEL, options=options, on_progress=ended.append
    )
    assert ended == list(range(1, len(outcome.requests) + 1))
    return outcome


def moments(request: Request) -> list[float]:
    found = [request.arrival.time_s, request.started_s, request.first_token_s, request.finished_s]
    assert None not in found
    return [each for each in found if each is not None]


@pytest.mark.parametrize("policy", POLICIES)
@given(arrivals=arrivals_of(), num_workers=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_every_arrival_ends_once_in_the_order_of_its_life(
    policy: str, arrivals: list[Arrival], num_workers: int
) -> None:
    outcome = play(arrivals, policy, num_workers)
    assert [each.arrival for each in outcome.requests] == [
        each for each in arrivals if MODEL.need_tokens(each) <= MODEL.kv_tokens
    ]
    assert len(outcome.refused) + len(outcome.requests) == len(arrivals)
    for request in outcome.requests:
        assert moments(request) == sorted(moments(request))
        assert request.num_generated == request.arrival.output_tokens
        assert request.cached_tokens <= request.arrival.prefix_tokens
    assert 0 <= outcome.used_ratio <= 1
    report = summarize(policy, outcome, weights={"x": 2.0})
    assert report.fairness is None or 0 < report.fairness <= 1 + 1e-9
    again = play(arrivals, policy, num_workers)
    assert [moments(each) for each in again.requests] == [moments(each) for each in outcome.requests]


@given(arrivals=arrivals_of(), num_workers=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_ours_never_promises_more_than_there_is(arrivals: list[Arrival], num_workers: int) -> None:
    outcome = play(arrivals, "headrace", num_workers)
    assert outcome.num_preemptions == 0
    changes: defaultdict[str | None, list[tuple[float, int, int]]] = defaultdict(list)
    for request in outcome.requests:
        _, started_s, _, finished_s = moments(request)
        changes[request.worker] += [(started_s, 1, request.need_tokens), (finished_s, -1, -request.need_tokens)]
    for of_worker in changes.values():
        tokens, running = 0, 0
        for _, number, need in sorted(of_worker):
            tokens, running = tokens + need, running + number
            assert tokens <= MODEL.kv_tokens
            assert running <= MODEL.max_concurrency


@given(arrivals=arrivals_of(), num_workers=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_a_queue_is_fetched_first_in_first_out(arrivals: list[Arrival], num_workers: int) -> None:
    queues = defaultdict(list)
    for request in play(arrivals, "headrace", num_workers).requests:
        if request.num_delivered == 1:
            queues[request.queue].append(request.fetched_s or 0.0)
    for fetched in queues.values():
        assert fetched == sorted(fetched)


@given(arrivals=arrivals_of(is_uniform=True), num_workers=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_nobody_waits_beside_a_worker_that_could_run_it(arrivals: list[Arrival], num_workers: int) -> None:
    """Requests of one size, of which four fit into a worker."""
    fit = MODEL.kv_tokens // MODEL.need_tokens(arrivals[0])
    assert fit == 4
    requests = play(arrivals, "headrace", num_workers).requests
    for name in (f"w{number}" for number in range(num_workers)):
        changes = sorted(
            change
            for request in requests
            if request.worker == name
            for change in ((request.fetched_s or 0.0, 1), (request.finished_s or 0.0, -1))
        )
        running = 0
        for (time_s, change), (until_s, _) in itertools.pairwise([(0.0, 0), *changes, (1e9, 0)]):
            running += change
            if running < fit and until_s - time_s > MAX_IDLE_S:
                for request in requests:
                    since_s = max(time_s, request.arrival.time_s)
                    assert min(until_s, request.fetched_s or 0.0) - since_s <= MAX_IDLE_S
