"""What a simulation comes to: latencies by tenant and lane, cache hits, memory, throughput, fairness."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from headrace.schemas.subjects import LANES, Lane
from headrace.simulator.fairness import jain_index
from headrace.simulator.requests import Request
from headrace.simulator.simulation import Outcome

__all__ = ["ClassReport", "Report", "Spread", "spread", "summarize"]


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles by nearest rank: each is one of the samples."""

    p50: float
    p99: float
    max: float


class ClassReport(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one tenant in one lane. Seconds from arrival: to the first computing, and to the first token."""

    tenant: str
    lane: Lane
    num_requests: int
    queue_wait_s: Spread
    ttft_s: Spread


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one trace.

    Latencies and hits are of the requests that arrived after the warm-up; the rest is of the whole run, to its last
    token. `hit_ratio` is the cached part of the shared prefixes' tokens, None where nothing is shared; `fairness`
    Jain's index, None with one tenant; both ratios are 0 to 1.
    """

    policy: str
    num_done: int
    num_refused: int
    end_s: float
    output_tokens_per_s: float
    hit_ratio: float | None
    used_ratio: float
    num_preemptions: int
    fairness: float | None
    ttft_s: Spread | None
    classes: tuple[ClassReport, ...]


def spread(samples: Iterable[float]) -> Spread | None:
    """Of the samples, in their unit; None of none."""
    ordered = sorted(samples)
    if not ordered:
        return None
    return Spread(p50=_nearest_rank(ordered, 0.5), p99=_nearest_rank(ordered, 0.99), max=ordered[-1])


def summarize(policy: str, outcome: Outcome, *, weights: Mapping[str, float], warmup_s: float = 0.0) -> Report:
    """The figures of an outcome in which every request has ended."""
    warm = [request for request in outcome.requests if request.arrival.time_s >= warmup_s]
    num_prefix_tokens = sum(request.arrival.prefix_tokens for request in warm)
    num_output_tokens = sum(request.arrival.output_tokens for request in outcome.requests)
    classes: defaultdict[tuple[str, Lane], list[Request]] = defaultdict(list)
    for request in warm:
        classes[request.arrival.tenant, request.arrival.lane].append(request)
    return Report(
        policy=policy,
        num_done=len(outcome.requests),
        num_refused=len(outcome.refused),
        end_s=outcome.end_s,
        output_tokens_per_s=num_output_tokens / outcome.end_s if outcome.end_s else 0.0,
        hit_ratio=sum(request.cached_tokens for request in warm) / num_prefix_tokens if num_prefix_tokens else None,
        used_ratio=outcome.used_ratio,
        num_preemptions=outcome.num_preemptions,
        fairness=jain_index(outcome.requests, weights=weights),
        ttft_s=spread(map(_ttft_s, warm)),
        classes=tuple(
            _class_report(tenant, lane, classes[tenant, lane])
            for tenant, lane in sorted(classes, key=lambda key: (key[0], LANES.index(key[1])))
        ),
    )


def _class_report(tenant: str, lane: Lane, requests: Sequence[Request]) -> ClassReport:
    wait_s, ttft_s = spread(map(_wait_s, requests)), spread(map(_ttft_s, requests))
    assert wait_s is not None
    assert ttft_s is not None
    return ClassReport(tenant=tenant, lane=lane, num_requests=len(requests), queue_wait_s=wait_s, ttft_s=ttft_s)


def _wait_s(request: Request) -> float:
    assert request.started_s is not None
    return request.started_s - request.arrival.time_s


def _ttft_s(request: Request) -> float:
    assert request.first_token_s is not None
    return request.first_token_s - request.arrival.time_s


def _nearest_rank(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
