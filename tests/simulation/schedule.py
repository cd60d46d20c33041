"""What a run depends on: the deployment, its faults, and the actions in their order."""

import msgspec

from headrace.schemas.subjects import DEFAULT_POOL
from tests.simulation.broker import Faults

__all__ = ["FALLBACK", "MODEL", "OWNERS", "TENANT", "Action", "Ask", "Scenario", "Violation"]

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


class Ask(msgspec.Struct, frozen=True):
    """What a job asks for: `size` are the tokens of its prompt, whose KV tokens it needs beside those of its answer.

    All of them are `token`. Jobs with the same one have a beginning in common: whole blocks where it has many digits.
    """

    tenant: str = TENANT
    lane: str = "normal"
    size: int = 3
    pool: str = DEFAULT_POOL
    token: int = 1


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
    asks: tuple[Ask, ...] = ()
    """By the number of the job; those beyond ask for the least."""
    kv_tokens: tuple[int, ...] = ()
    """Capacities of the workers; none tells one where there are none."""
    pools: tuple[str, ...] = ()
    """Of the workers; the default where there are none. Others lend to it."""
    max_idle_s: float | None = None
    """How long a request may wait beside a worker that could run it; None: that is not looked at."""
    counts_any: bool = False
    """Whether it counts beside whom it waits: no, if nothing fails that would begin the count anew."""
    max_listed_s: float | None = None
    """How long what a worker held that is dead or hangs may stay with it, if one of its beats listed it."""
    max_lost_s: float | None = None
    """The same for anything that is in flight and with nobody."""
    queue_limit: int = 100
    has_notices: bool = False
    poison: int | None = None
    """A job that every engine dies of, in its prefill."""
    stutters: float = 0.0
    """Short hangs of random processes, per second."""

    def ask(self, job: str) -> Ask:
        """What a job, named `j` and its number, asks for."""
        number = int(job[1:])
        return self.asks[number] if number < len(self.asks) else Ask()

    def need_tokens(self, job: str) -> int:
        """KV tokens of a job to its last token."""
        return self.ask(job).size + self.num_tokens - 1


class Violation(AssertionError):
    """A rule of the protocol was broken."""
