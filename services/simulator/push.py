"""The baselines that push: a router gives each request to an engine as it arrives, and the engine queues it."""

from collections import Counter
from typing import Final

from headrace.simulator.engine import Engine
from headrace.simulator.policy import Ground
from headrace.simulator.requests import Request

__all__ = ["BALANCED", "LeastRequests", "RoundRobin", "Scoring"]

BALANCED: Final = (1.0, 1.0, 1.0)
"""Weights with which the scoring router did best of those tried on the simulator's scenarios."""


class RoundRobin:
    """Each engine in its turn: the default of most proxies."""

    def __init__(self, ground: Ground) -> None:
        self._engines = ground.engines
        self._turn = 0

    def arrive(self, request: Request) -> None:
        """To the next engine."""
        self._engines[self._turn].submit(request)
        self._turn = (self._turn + 1) % len(self._engines)

    def finished(self, engine: Engine, request: Request) -> None:
        """Nothing to do."""


class LeastRequests:
    """The engine with the fewest requests in flight, of several one at random (Envoy, nginx `least_conn`, HAProxy)."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground

    def arrive(self, request: Request) -> None:
        """To the engine with the fewest."""
        random = self._ground.random
        min(self._ground.engines, key=lambda each: (each.num_running + len(each.waiting), random.random())).submit(
            request
        )

    def finished(self, engine: Engine, request: Request) -> None:
        """Nothing to do: engines tell how many they have."""


class Scoring:
    """The engine with the best weighted score of prefix match, waiting requests and free memory.

    The scorers and default weights (3, 2, 2) of the Gateway API Inference Extension and llm-d: prefix = matched share
    of the prompt; queue = 1 for the shortest queue to 0 for the longest; memory = 1 − usage. Ties are broken at
    random. It knows more than the real one: caches and loads as they are at that moment, where the real one remembers
    what it sent and reads metrics some milliseconds old.
    """

    def __init__(self, ground: Ground, *, weights: tuple[float, float, float] = (3.0, 2.0, 2.0)) -> None:
        self._ground = ground
        self._prefix_weight, self._queue_weight, self._memory_weight = weights
        self._in_flight: dict[str, Counter[str]] = {engine.name: Counter() for engine in ground.engines}

    def arrive(self, request: Request) -> None:
        """To the engine with the best score."""
        lengths = [len(engine.waiting) for engine in self._ground.engines]
        shortest, longest = min(lengths), max(lengths)
        random = self._ground.random

        def score(engine: Engine) -> tuple[float, float]:
            queue = (longest - len(engine.waiting)) / (longest - shortest) if longest > shortest else 1.0
            memory = 1 - engine.used_tokens / engine.model.kv_tokens
            prefix = self._match(engine, request)
            total = self._prefix_weight * prefix + self._queue_weight * queue + self._memory_weight * memory
            return total, random.random()

        best = max(self._ground.engines, key=score)
        self._in_flight[best.name][request.arrival.prefix] += 1
        best.submit(request)

    def finished(self, engine: Engine, request: Request) -> None:
        """Its prefix is no longer sure to be cached there."""
        self._in_flight[engine.name][request.arrival.prefix] -= 1

    def _match(self, engine: Engine, request: Request) -> float:
        arrival = request.arrival
        if not arrival.prefix:
            return 0.0
        if self._in_flight[engine.name][arrival.prefix]:
            return arrival.prefix_tokens / arrival.prompt_tokens
        cached = engine.kv.cached_tokens(request.index, arrival.prefix, arrival.prefix_tokens, arrival.prompt_tokens)
        return cached / arrival.prompt_tokens
