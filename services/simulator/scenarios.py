"""The traffic to play: named mixes of tenants, lanes, lengths and shared prefixes, made into a trace from a seed."""

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Final

import msgspec

from headrace.schemas.subjects import DEFAULT_LANE, Lane
from headrace.simulator.lengths import LENGTHS, LengthMix, Lengths, sampled_limit
from headrace.simulator.model import EngineModel, seconds_per_request
from headrace.simulator.processes import Bursts, Steps, modulated, poisson, stepped
from headrace.simulator.traces import Arrival

__all__ = ["SCENARIOS", "Prefixes", "Scenario", "Source", "make_trace"]

_SAMPLE: Final = 4000


class Prefixes(msgspec.Struct, frozen=True):
    """`number` shared prefixes of `tokens` each; the k-th most popular one has weight k^−zipf."""

    number: int
    tokens: int
    zipf: float = 1.0


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One stream of requests. `share` is its part of the scenario's load (work, not requests).

    With `prefixes`, the sampled prompt length is what comes after the prefix.
    """

    lengths: LengthMix
    share: float = 1.0
    tenant: str = "default"
    lane: Lane = DEFAULT_LANE
    bursts: Bursts | None = None
    steps: Steps | None = None
    prefixes: Prefixes | None = None


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Sources together, the load they are meant for, and the engine they are played on unless told otherwise."""

    about: str
    sources: tuple[Source, ...]
    load: float = 0.7
    model: EngineModel = EngineModel()


SCENARIOS: Final[Mapping[str, Scenario]] = MappingProxyType(
    {
        "two-tenants": Scenario(
            about="a light tenant with steady short chats beside a heavy one that comes in bursts",
            sources=(
                Source(tenant="light", share=0.1, lengths=LENGTHS["chat"]),
                Source(tenant="heavy", share=0.9, lengths=LENGTHS["conversation"], bursts=Bursts()),
            ),
        ),
        "prefixes": Scenario(
            about="80 shared prefixes (long system prompts, tools, documents) of 4,000 tokens, Zipf popularity",
            sources=(
                Source(
                    lengths=LengthMix(Lengths(120, 0.8, most=1000), Lengths(129, 0.9, most=512)),
                    prefixes=Prefixes(80, 4000),
                ),
            ),
            model=EngineModel(kv_tokens=196_608, max_concurrency=32),
        ),
        "lanes": Scenario(
            about="a high lane near saturation over a normal and a low one",
            sources=(
                Source(lane="high", share=0.75, lengths=LENGTHS["chat"]),
                Source(lane="normal", share=0.2, lengths=LENGTHS["conversation"]),
                Source(lane="low", share=0.05, lengths=LENGTHS["conversation"]),
            ),
            load=0.85,
        ),
        "long-prompts": Scenario(
            about="bursts of long documents of one tenant over steady short chats of another",
            sources=(
                Source(tenant="chats", share=0.4, lengths=LENGTHS["chat"]),
                Source(tenant="documents", share=0.6, lengths=LENGTHS["long"], bursts=Bursts(20, 50, 5)),
            ),
        ),
        "from-zero": Scenario(
            about="nothing, a burst of three engines' work, a trickle, a higher burst, nothing; conversations",
            sources=(
                Source(
                    lengths=LENGTHS["conversation"],
                    steps=Steps(((30, 0), (270, 3), (870, 0.3), (930, 6), (1170, 0.5))),
                ),
            ),
            load=0.7,
        ),
        "steady": Scenario(
            about="conversations of one tenant, Poisson arrivals",
            sources=(Source(lengths=LENGTHS["conversation"]),),
        ),
    }
)
"""By the names that the command line knows."""


def make_trace(
    scenario: Scenario, *, num_workers: int, model: EngineModel, load: float, duration_s: float, seed: int
) -> list[Arrival]:
    """The scenario's arrivals in order of time; the same for the same arguments.

    Lengths and times come from separate streams of randomness, so a higher load only brings the same requests closer
    together. A load of 1 is what the engines could do if everything went ideally (`seconds_per_request`).
    """
    streams = []
    for number, source in enumerate(scenario.sources):
        sample = list(itertools.islice(_requests(source, Random(f"{seed} sample {number}")), _SAMPLE))
        rate = load * source.share * num_workers / seconds_per_request(model, sample)
        times = Random(f"{seed} times {number}")
        streams.append(
            _timed(_times(source, rate, duration_s, times), _requests(source, Random(f"{seed} requests {number}")))
        )
    return list(heapq.merge(*streams, key=lambda arrival: arrival.time_s))


def _times(source: Source, rate: float, duration_s: float, random: Random) -> Iterator[float]:
    if source.steps:
        return stepped(rate, source.steps, duration_s, random)
    return modulated(rate, source.bursts, duration_s, random) if source.bursts else poisson(rate, duration_s, random)


def _timed(times: Iterator[float], requests: Iterator[Arrival]) -> Iterator[Arrival]:
    for time_s, request in zip(times, requests, strict=False):
        yield msgspec.structs.replace(request, time_s=time_s)


def _requests(source: Source, random: Random) -> Iterator[Arrival]:
    """Requests of a source without end, all at time 0."""
    weights = _zipf(source.prefixes) if source.prefixes else ()
    while True:
        output_tokens = source.lengths.output.sample(random)
        prompt_tokens = source.lengths.prompt.sample(random)
        prefix, prefix_tokens = "", 0
        if source.prefixes:
            (rank,) = random.choices(range(source.prefixes.number), cum_weights=weights)
            prefix, prefix_tokens = f"{source.tenant}-{rank}", source.prefixes.tokens
        yield Arrival(
            time_s=0.0,
            prompt_tokens=prefix_tokens + prompt_tokens,
            output_tokens=output_tokens,
            max_tokens=sampled_limit(output_tokens, random),
            tenant=source.tenant,
            lane=source.lane,
            prefix=prefix,
            prefix_tokens=prefix_tokens,
        )


def _zipf(prefixes: Prefixes) -> Sequence[float]:
    return list(itertools.accumulate(rank**-prefixes.zipf for rank in range(1, prefixes.number + 1)))
