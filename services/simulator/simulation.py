"""One trace under one policy: what happened to each request, and to the engines."""

import functools
from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Final

import msgspec

from headrace.simulator.clock import Clock
from headrace.simulator.engine import Engine
from headrace.simulator.fixed import FixedConcurrency
from headrace.simulator.model import EngineModel
from headrace.simulator.policy import Ground, Policy, PolicyOptions
from headrace.simulator.pull import Pull
from headrace.simulator.push import BALANCED, LeastRequests, RoundRobin, Scoring
from headrace.simulator.requests import Request
from headrace.simulator.traces import Arrival

__all__ = ["POLICIES", "Outcome", "feed", "simulate"]

POLICIES: Final[Mapping[str, Callable[[Ground], Policy]]] = MappingProxyType(
    {
        "headrace": Pull,
        "round-robin": RoundRobin,
        "least-requests": LeastRequests,
        "fixed-concurrency": FixedConcurrency,
        "scoring": Scoring,
        "scoring-balanced": functools.partial(Scoring, weights=BALANCED),
    }
)
"""Ours and those it is compared with."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What is left when the last request has ended.

    `refused` are arrivals that no engine could hold even alone; they go to no policy. `used_ratio` is the memory held
    by running requests, as a mean over time and engines.
    """

    requests: Sequence[Request]
    refused: Sequence[Arrival]
    end_s: float
    used_ratio: float
    num_preemptions: int


def simulate(
    arrivals: Sequence[Arrival],
    policy: str,
    *,
    num_workers: int,
    model: EngineModel,
    options: PolicyOptions,
    seed: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Play the trace until every request has ended; `on_progress` hears of each end, with the number ended so far."""
    clock = Clock()
    num_ended = 0

    def on_finished(engine: Engine, request: Request) -> None:
        nonlocal num_ended
        num_ended += 1
        if on_progress is not None:
            on_progress(num_ended)
        chosen.finished(engine, request)

    engines = [Engine(f"w{number}", model, clock, on_finished=on_finished) for number in range(num_workers)]
    chosen = POLICIES[policy](Ground(clock=clock, engines=engines, random=Random(f"{seed} policy"), options=options))
    requests: list[Request] = []
    refused: list[Arrival] = []
    for arrival in arrivals:
        need = model.need_tokens(arrival)
        if need > model.kv_tokens:
            refused.append(arrival)
        else:
            requests.append(Request(len(requests), arrival, need))
    feed(clock, chosen, requests)
    clock.run()
    end_s = max((request.finished_s or 0.0 for request in requests), default=0.0)
    used_token_s = sum(engine.used_token_s for engine in engines)
    return Outcome(
        requests=requests,
        refused=refused,
        end_s=end_s,
        used_ratio=used_token_s / (end_s * num_workers * model.kv_tokens) if end_s else 0.0,
        num_preemptions=sum(engine.num_preemptions for engine in engines),
    )


def feed(clock: Clock, policy: Policy, requests: Sequence[Request]) -> None:
    """Arrivals one after the other, so that the heap stays small."""

    def arrive(index: int) -> None:
        if index + 1 < len(requests):
            clock.at(requests[index + 1].arrival.time_s, lambda: arrive(index + 1))
        policy.arrive(requests[index])

    if requests:
        clock.at(requests[0].arrival.time_s, lambda: arrive(0))
