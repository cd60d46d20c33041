"""What the design promises, judged by what was seen of a run: pure."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from headrace.bench.figures import Distribution, distribution, in_ms
from headrace.bench.mixedload import Sent

__all__ = ["Fault", "Load", "Look", "Promise", "Run", "judge", "loads"]

_HUNG_WITHIN_S = 2.5
"""Two seconds, as promised, and what a busy machine adds at the reader."""
_KILLED_WITHIN_S = 0.25
"""Tens of milliseconds on a machine of its own; all parts, the engines and the readers share this one."""
_REFUSED_WITHIN_S = 1.0


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was done to the deployment: `kind`, to whom, and when on the readers' clock.

    `workers` are those that were lost by it.
    """

    kind: str
    who: str
    at: float
    workers: tuple[str, ...] = ()


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the workers: seconds since the start; ready ones of each model; the fullest's share of its memory."""

    at_s: float
    ready: Mapping[str, int]
    wanted: Mapping[str, int]
    num_workers: int
    fullest: float


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """All that was seen. `terminals` counts the terminal events in the log of each accepted job."""

    sent: Sequence[Sent]
    terminals: Mapping[str, int]
    faults: Sequence[Fault]
    looks: Sequence[Look]


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """One promise of the design, whether it held, and the figures that say so."""

    number: int
    text: str
    holds: bool
    figures: str


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of request: how many were sent, how they ended, how long until they started and had a first token."""

    kind: str
    num_sent: int
    ends: dict[str, int]
    wait_ms: Distribution | None
    first_token_ms: Distribution | None


def loads(run: Run) -> list[Load]:
    """What became of each kind, in the order of their names."""
    found = []
    for kind in sorted({sent.kind.name for sent in run.sent}):
        mine = [sent for sent in run.sent if sent.kind.name == kind]
        found.append(
            Load(
                kind=kind,
                num_sent=len(mine),
                ends=dict(sorted(Counter(sent.end for sent in mine).items())),
                wait_ms=distribution(in_ms(each.wait_s for each in mine if each.wait_s is not None)),
                first_token_ms=distribution(
                    in_ms(each.first_token_s for each in mine if each.first_token_s is not None)
                ),
            )
        )
    return found


def judge(run: Run) -> list[Promise]:
    """Promises 1 to 5 of the design; the sixth, that one process is enough to start, is not seen here."""
    return [_one_end(run), _each_token_once(run), _memory(run), _takeover(run), _nobody_waits(run)]


def _one_end(run: Run) -> Promise:
    accepted = [sent for sent in run.sent if not sent.is_refused]
    wrong = [sent.job for sent in accepted if run.terminals.get(sent.job) != 1 or not sent.end]
    ends = Counter(sent.end for sent in accepted)
    shown = ", ".join(f"{number} {end}" for end, number in ends.most_common())
    return Promise(
        number=1,
        text="An accepted request ends in exactly one terminal event.",
        holds=bool(accepted) and not wrong,
        figures=f"{len(accepted)} accepted ({shown}); {len(wrong)} with none or several terminal events in their log"
        + _named(wrong),
    )


def _each_token_once(run: Run) -> Promise:
    damaged = [f"{sent.job}: {sent.damage}" for sent in run.sent if sent.damage]
    whole = [sent for sent in run.sent if sent.end == "done" and not sent.damage]
    moved = sum(len(sent.watched.starts) > 1 for sent in run.sent)
    num_tokens = sum(sent.watched.num_tokens for sent in whole)
    return Promise(
        number=2,
        text="Every token comes once and in order, whichever workers die, hang or come back.",
        holds=bool(whole) and not damaged,
        figures=f"{len(whole)} whole answers of {num_tokens} tokens, {moved} of them by more than one attempt; "
        f"{len(damaged)} damaged" + _named(damaged),
    )


def _memory(run: Run) -> Promise:
    fullest = max((look.fullest for look in run.looks), default=0.0)
    return Promise(
        number=3,
        text="A worker never holds more than its KV-cache memory can carry to the last token.",
        holds=bool(run.looks) and fullest <= 1.0,
        figures=f"{len(run.looks)} looks at all workers; the fullest had promised {100 * fullest:.0f} % of its memory",
    )


def _takeover(run: Run) -> Promise:
    killed, hung = _moves(run, "worker killed"), _moves(run, "worker stopped")
    at_once = [move for move in killed if move.seconds <= _KILLED_WITHIN_S]
    overtaken = [move.job for move in killed if move.num_overtaking]
    late = [move.job for move in hung if move.seconds > _HUNG_WITHIN_S]  # the summaries' model has room
    return Promise(
        number=4,
        text="A killed worker's streams go on elsewhere within tens of milliseconds where there is room, and before "
        "anything that was still queued where there is not; a hung one's within two seconds.",
        holds=bool(killed) and bool(hung) and not overtaken and not late,
        figures=f"killed: {_spread(killed)}, {len(at_once)} of them within {1000 * _KILLED_WITHIN_S:.0f} ms, the "
        f"others waited for room, {len(overtaken)} of them while a queued one of their lane was started; "
        f"stopped: {_spread(hung)}" + _named(overtaken + late),
    )


def _nobody_waits(run: Run) -> Promise:
    accepted = [sent for sent in run.sent if not sent.is_refused]
    placed = [sent for sent in accepted if sent.position is not None]
    late = [
        sent.job
        for sent in accepted
        if sent.ended_at is None or sent.ended_at - sent.sent_at > sent.kind.deadline_s + 2.0
    ]
    refused = [sent for sent in run.sent if sent.is_refused and sent.end == "queue_full"]
    slow = max((sent.answered_at - sent.sent_at for sent in refused if sent.answered_at is not None), default=0.0)
    helpless = [sent.job for sent in refused if sent.retry_after_s is None]
    return Promise(
        number=5,
        text="Nobody waits for ever: each request has a deadline, a position and an ETA, and a full queue says so at "
        "once.",
        holds=len(placed) == len(accepted) > 0
        and not late
        and not helpless
        and bool(refused)
        and slow <= _REFUSED_WITHIN_S,
        figures=f"{len(placed)} of {len(accepted)} accepted ones were told a position, "
        f"{sum(sent.eta_s is not None for sent in placed)} an ETA too (none is known before the first job has ended); "
        f"{len(late)} ended after their deadline; {len(refused)} were refused by a full queue, each with a time to "
        f"come back and within {1000 * slow:.0f} ms" + _named(late + helpless),
    )


class _Move(msgspec.Struct, frozen=True):
    """A stream that lost its worker: seconds until its next start, and the queued ones that came in between."""

    job: str
    seconds: float
    num_overtaking: int


def _moves(run: Run, kind: str) -> list[_Move]:
    """Of each stream that ran where the fault struck. Within `_KILLED_WITHIN_S` nothing counts as overtaking: what was
    fetched before the loss was known may still start.
    """
    return [
        _Move(sent.job, after.at - fault.at, _overtaking(run, sent, fault.at + _KILLED_WITHIN_S, after.at))
        for fault in run.faults
        if fault.kind == kind
        for sent in run.sent
        for before, after in itertools.pairwise(sent.watched.starts)
        if before.worker in fault.workers and before.at <= fault.at < after.at
    ]


def _overtaking(run: Run, moved: Sent, since: float, until: float) -> int:
    """Requests of the same model and lane that were started for the first time in between."""
    return sum(
        other.kind.model == moved.kind.model
        and other.kind.lane == moved.kind.lane
        and bool(other.watched.starts)
        and since < other.watched.starts[0].at < until
        for other in run.sent
    )


def _spread(moves: list[_Move]) -> str:
    found = distribution(in_ms(move.seconds for move in moves))
    if found is None:
        return "no stream was moved"
    return f"{found.n} streams, p50 {found.p50:.0f} ms, max {found.max:.0f} ms"


def _named(jobs: list[str]) -> str:
    return f" ({', '.join(jobs[:3])}{', …' if len(jobs) > 3 else ''})" if jobs else ""
