"""What a run depends on: the deployment, its faults, and the actions in their order."""

import msgspec

from tests.simulation.broker import Faults

__all__ = ["FALLBACK", "MODEL", "OWNERS", "TENANT", "Action", "Scenario", "Violation"]

MODEL = "m"
FALLBACK = "f"
TENANT = "default"
OWNERS = 10
"""From here on `Action.who` names the owner of a job."""


class Action(msgspec.Struct, frozen=True):
    """One thing that happens, `after_s` seconds and `after_lines` lines of the trace after the one before it.

    `who` is a job, or which part it strikes: from 10 on, the worker that runs job `who - 10` by the log.
    """

    kind: str
    after_s: float = 0.0
    who: int = 0
    much: float = 0.0
    after_lines: int = 0


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """All a run depends on."""

    seed: int = 0
    actions: tuple[Action, ...] = ()
    faults: Faults = msgspec.field(default_factory=Faults)
    num_workers: int = 2
    num_fallback_workers: int = 0
    """Workers of the model that requests name as their fallback; none is named without any."""
    num_routers: int = 1
    num_monitors: int = 1
    num_tokens: int = 4
    token_s: float = 0.05
    max_concurrency: int = 2
    queue_limit: int = 100
    has_notices: bool = False
    poison: int | None = None
    """A job that every engine dies of, in its prefill."""
    stutters: float = 0.0
    """Short hangs of random processes, per second."""


class Violation(AssertionError):
    """A rule of the protocol was broken."""
