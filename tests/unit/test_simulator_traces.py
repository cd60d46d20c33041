"""Traces of the simulator: made from a seed, written, read back, refused."""

import itertools
import json
from random import Random

import pytest

from headrace.simulator import traces
from headrace.simulator.lengths import LENGTHS, sampled_limit
from headrace.simulator.model import EngineModel, seconds_per_request
from headrace.simulator.processes import Bursts, modulated, poisson
from headrace.simulator.scenarios import SCENARIOS, make_trace
from headrace.simulator.traces import Arrival, TraceError, read_trace, trace_lines

GOOD = '{"time_s": 1, "prompt_tokens": 10, "output_tokens": 5}'


def trace_of(name: str, *, load: float = 0.5, seed: int = 1, duration_s: float = 60.0) -> list[Arrival]:
    scenario = SCENARIOS[name]
    return make_trace(scenario, num_workers=4, model=scenario.model, load=load, duration_s=duration_s, seed=seed)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_is_the_same_for_the_same_seed(name: str) -> None:
    assert trace_of(name) == trace_of(name)
    assert trace_of(name) != trace_of(name, seed=2)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_trace_is_in_order_and_reads_back(name: str) -> None:
    trace = trace_of(name)
    assert len(trace) > 20
    assert read_trace(trace_lines(trace)) == trace
    assert all(first.time_s <= second.time_s for first, second in itertools.pairwise(trace))


def test_a_higher_load_brings_the_same_requests_closer_together() -> None:
    def sizes(load: float) -> list[tuple[int, int, str]]:
        return [(each.prompt_tokens, each.output_tokens, each.prefix) for each in trace_of("prefixes", load=load)]

    low, high = sizes(0.4), sizes(0.8)
    assert high[: len(low)] == low
    assert len(high) == pytest.approx(2 * len(low), rel=0.15)


def test_a_load_of_one_is_as_much_work_as_ideal_engines_do() -> None:
    trace = trace_of("steady", load=1.0, duration_s=1000.0)
    assert len(trace) * seconds_per_request(EngineModel(), trace) == pytest.approx(4 * 1000, rel=0.05)


def test_the_popularity_of_prefixes_falls_with_their_rank() -> None:
    named = [each.prefix for each in trace_of("prefixes", load=1.0, duration_s=300.0)]
    assert named.count("default-0") > 1.5 * named.count("default-1") > 2 * named.count("default-9") > 0
    assert len(set(named)) == 80


def test_lengths_have_the_published_medians() -> None:
    random = Random(1)
    mix = LENGTHS["conversation"]
    assert sorted(mix.prompt.sample(random) for _ in range(4001))[2000] == pytest.approx(1020, rel=0.05)
    assert sorted(mix.output.sample(random) for _ in range(4001))[2000] == pytest.approx(129, rel=0.05)
    assert all(sampled_limit(number, random) >= number for number in (1, 64, 65, 4096, 5000))


def test_processes_keep_their_mean_rate() -> None:
    assert len(list(poisson(20, 1000, Random(1)))) == pytest.approx(20_000, rel=0.03)
    assert len(list(modulated(20, Bursts(8, 9, 3), 10_000, Random(1)))) == pytest.approx(200_000, rel=0.05)
    assert list(poisson(0, 10, Random(1))) == []


def test_bursts_are_bursts() -> None:
    times = list(modulated(10, Bursts(10, 45, 10), 2000, Random(1)))
    per_second = [0] * 2000
    for time_s in times:
        per_second[int(time_s)] += 1
    assert max(per_second) > 30
    assert sorted(per_second)[1000] < 8


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ('{"time_s": 1}', "missing required field `prompt_tokens`"),
        ('{"time_s": -1, "prompt_tokens": 1, "output_tokens": 1}', "$.time_s"),
        ('{"time_s": 1, "prompt_tokens": 0, "output_tokens": 1}', "$.prompt_tokens"),
        ('{"time_s": 1, "prompt_tokens": 1, "output_tokens": 1, "colour": 1}', "unknown field `colour`"),
        ('{"time_s": 1, "prompt_tokens": 1, "output_tokens": 1, "lane": "fast"}', "'fast'"),
        ('{"time_s": 1, "prompt_tokens": 1, "output_tokens": 1, "tenant": "A b"}', "tenant 'A b'"),
        ('{"time_s": 1, "prompt_tokens": 1, "output_tokens": 9, "max_tokens": 8}', "above max_tokens 8"),
        ('{"time_s": 1, "prompt_tokens": 1, "output_tokens": 1, "prefix": "a"}', "come together"),
        ('{"time_s": 1, "prompt_tokens": 1, "output_tokens": 1, "prefix_tokens": 1}', "come together"),
        ('{"time_s": 1, "prompt_tokens": 1, "output_tokens": 1, "prefix": "a", "prefix_tokens": 2}', "above prompt"),
        ('{"time_s": 0.5, "prompt_tokens": 1, "output_tokens": 1}', "lies before 1"),
        ('{"time_s": 1, "prompt_tokens": 1, "output_tokens": 1, "tenant": "\ud800"}', "line 3"),
    ],
)
def test_a_bad_line_is_named(line: str, what: str) -> None:
    with pytest.raises(TraceError, match=r"^line 3: ") as caught:
        read_trace([GOOD, "", line])
    assert what in str(caught.value)


def test_no_trace_is_empty_or_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceError, match="no arrivals"):
        read_trace(["", " \n"])
    monkeypatch.setattr(traces, "MAX_ARRIVALS", 2)
    with pytest.raises(TraceError, match="line 3: more than 2 arrivals"):
        read_trace([GOOD] * 3)


def test_what_is_default_is_not_written() -> None:
    (line,) = trace_lines([Arrival(time_s=1.0, prompt_tokens=10, output_tokens=5)])
    assert json.loads(line) == json.loads(GOOD)
