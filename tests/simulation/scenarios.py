"""Scenarios as Hypothesis draws them, and the verdict over one."""

from hypothesis import strategies as st

from tests.simulation.broker import Faults
from tests.simulation.schedule import Action, Scenario, Violation
from tests.simulation.world import World, play

__all__ = ["require_no_problem", "scenarios"]

_NUM_JOBS = 4
_MAX_ACTIONS = 24

_gaps = st.sampled_from((0.0, 0.0, 0.005, 0.05, 0.3, 1.0))
_lines = st.sampled_from((0, 0, 1, 1, 2, 3, 5, 8))
_lasting = st.sampled_from((0.05, 0.3, 1.0, 2.5, 5.0))
_jobs = st.integers(0, _NUM_JOBS - 1)
_parts = st.one_of(st.integers(10, 9 + _NUM_JOBS), st.integers(0, 6))


def _actions(kinds: str, who: st.SearchStrategy[int], much: st.SearchStrategy[float]) -> st.SearchStrategy[Action]:
    return st.builds(Action, kind=st.sampled_from(kinds.split()), after_s=_gaps, who=who, much=much, after_lines=_lines)


_submits = _actions("submit", _jobs, st.sampled_from((0.5, 0.25, 0.15, 0.9)))
_questions = _actions("cancel status", _jobs, st.just(0.0))
_crashes = _actions("kill hang slow outage drain leader", _parts, _lasting)
_engines = _actions("fail fail busy die stall", _parts, st.just(0.0))
_times = _actions("redeliver redeliver expire", _parts, st.just(0.0))


def _probability(most: float) -> st.SearchStrategy[float]:
    return st.sampled_from((0.0, 0.0, most / 4, most))


_faults = st.builds(
    Faults,
    delay_s=st.sampled_from((0.0003, 0.002, 0.02, 0.1)),
    lost_request=_probability(0.05),
    lost_answer=_probability(0.08),
    lost_publish=_probability(0.15),
    stale_log=_probability(0.3),
    stale_beats=_probability(0.2),
)


def scenarios() -> st.SearchStrategy[Scenario]:
    """Small deployments with some requests and a few things that go wrong."""
    actions = st.lists(
        st.one_of(_submits, _questions, _crashes, _crashes, _engines, _times), min_size=1, max_size=_MAX_ACTIONS
    )
    return st.builds(
        Scenario,
        seed=st.integers(0, 2**32),
        actions=st.tuples(_submits, actions).map(lambda drawn: (drawn[0], *drawn[1])),
        faults=_faults,
        num_workers=st.integers(1, 3),
        num_fallback_workers=st.sampled_from((0, 0, 1, 2)),
        num_routers=st.integers(1, 2),
        num_monitors=st.integers(1, 2),
        num_tokens=st.sampled_from((1, 4, 10, 20)),
        token_s=st.sampled_from((0.005, 0.1, 0.3, 0.6)),
        max_concurrency=st.sampled_from((1, 2, 4)),
        queue_limit=st.sampled_from((100, 1, 2)),
        has_notices=st.booleans(),
        stutters=st.sampled_from((0.0, 0.5, 3.0)),
    )


def require_no_problem(scenario: Scenario) -> World:
    """Play it. Raises Violation with what was broken and the trace that led there."""
    world = play(scenario)
    if world.check.problems:
        first = next(number for number, line in enumerate(world.broker.trace) if "***" in line)
        trace = "\n".join(world.broker.trace[: first + 1])
        raise Violation(f"{world.check.problems[0]}\n{scenario!r}\n{trace}")
    return world
