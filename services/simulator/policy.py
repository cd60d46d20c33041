"""What a policy decides: which engine computes a request, and when it is given to it."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Protocol

import msgspec

from headrace.simulator.clock import Clock
from headrace.simulator.engine import Engine
from headrace.simulator.requests import Request

__all__ = ["Ground", "Policy", "PolicyOptions"]


class PolicyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What can be set of the policies; times in seconds.

    `fixed_concurrency` is the limit per worker of the policy of that name. The rest is ours: weights by tenant, times
    as the services have them (`dispatch_s` from publish to fetch), how many requests a worker holds that do not fit,
    and how many hashes of prefixes its heartbeat carries.
    """

    fixed_concurrency: int = 32
    weights: Mapping[str, float] = {}
    ageing_s: float = 10.0
    dispatch_s: float = 0.0007
    hint_wait_s: float = 0.002
    heartbeat_s: float = 0.5
    beat_gap_s: float = 0.02
    neighbours_s: float = 0.1
    resync_s: float = 0.150
    max_held: int = 4
    max_recent: int = 256


class Ground(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy works with. Its randomness is its own, so policies meet the same trace whatever they draw."""

    clock: Clock
    engines: Sequence[Engine]
    random: Random
    options: PolicyOptions


class Policy(Protocol):
    """Gets every arrival once, and is told of every end; it calls `Engine.submit` once for each request."""

    def arrive(self, request: Request) -> None:
        """It arrived, now."""

    def finished(self, engine: Engine, request: Request) -> None:
        """It ended on this engine, now."""
