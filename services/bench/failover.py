"""`headrace bench failover`: workers killed and stopped in mid-stream, and how long their streams stood still."""

import asyncio
import signal
import time
from typing import Any, Final

import msgspec
from rich.console import RenderableType
from rich.text import Text

from headrace.bench.figures import Distribution, distribution, in_ms
from headrace.bench.ground import MODEL, Ground, Machine, ground, machine
from headrace.bench.tables import distributions
from headrace.bus.clock import parse_time
from headrace.bus.timeline import timeline
from headrace.cli.progress import Progress
from headrace.cli.takeover import Watched
from headrace.errors import HeadraceError
from headrace.settings import Settings

__all__ = ["KINDS", "FailoverKind", "FailoverResult", "measure_failover", "shown_failover"]

_NUM_WORKERS: Final = 2
_KILL_AFTER: Final = 5
_NUM_TOKENS: Final = 40
_JOIN_WITHIN_S: Final = 4.0
"""How long the streams last that wait for survivors to join."""


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """A way to lose a worker."""

    title: str
    signal: signal.Signals
    has_notices: bool


KINDS: Final = {
    "kill": Kind(title="SIGKILL, with notices", signal=signal.SIGKILL, has_notices=True),
    "kill-no-notices": Kind(title="SIGKILL, without notices", signal=signal.SIGKILL, has_notices=False),
    "hang": Kind(title="SIGSTOP", signal=signal.SIGSTOP, has_notices=True),
}


class FailoverKind(msgspec.Struct, frozen=True, kw_only=True):
    """What was found for one kind. All times are milliseconds; the samples are in the order they were taken in.

    `num_streams` were open, `num_moved` of them on lost workers; all of them ended whole. `to_claimed` is when the
    broker stored the `started` of the other worker, by its clock, which is this machine's; `to_started` when the client
    had it.
    """

    kind: str
    num_kills: int
    num_streams: int
    num_moved: int
    to_claimed: Distribution | None
    to_started: Distribution | None
    token_gap: Distribution | None
    to_claimed_ms: list[float]
    to_started_ms: list[float]
    token_gap_ms: list[float]


class FailoverResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `bench failover --json` prints."""

    machine: Machine
    tokens_per_second: int
    num_survivors: int
    kinds: list[FailoverKind]


async def measure_failover(
    settings: Settings,
    progress: Progress,
    *,
    kinds: list[str],
    num_kills: int,
    num_streams: int,
    pace: int,
    num_survivors: int = 0,
) -> FailoverResult:
    """Lose `num_kills` workers of each kind, with so many streams open, each of `pace` tokens a second.

    Two workers share the streams; with `num_survivors` all of them run on the one that is lost, and so many others,
    started after it, are idle. Raises HeadraceError for a damaged stream, or one that ended before its worker was lost.
    """
    where = machine()
    found = [
        await _measure_kind(
            settings, progress, KINDS[name], num_kills=num_kills, num_streams=num_streams, pace=pace,
            num_survivors=num_survivors,
        )
        for name in kinds
    ]  # fmt: skip
    return FailoverResult(machine=where, tokens_per_second=pace, num_survivors=num_survivors, kinds=found)


async def _measure_kind(
    settings: Settings,
    progress: Progress,
    kind: Kind,
    *,
    num_kills: int,
    num_streams: int,
    pace: int,
    num_survivors: int,
) -> FailoverKind:
    num_tokens = _NUM_TOKENS + int(pace * _JOIN_WITHIN_S if num_survivors else 0)
    num_before = 1 if num_survivors else _NUM_WORKERS
    to_claimed: list[float] = []
    to_started: list[float] = []
    gaps: list[float] = []
    num_moved = 0
    async with ground(
        settings,
        progress,
        options={"tokens_per_second": str(pace), "kv_tokens": "1000000", "max_concurrency": "256"},
        num_workers=num_before,
        max_concurrency=256,
        has_notices=kind.has_notices,
    ) as field:
        for number in range(1, num_kills + 1):
            progress.say(f"{kind.title}: {number} of {num_kills}")
            await field.workers_ready(num_before)
            streams, lost_at, lost_unix = await _lose_one(
                field, kind, num_streams, num_tokens=num_tokens, num_survivors=num_survivors
            )
            for stream in streams:
                if len(stream.starts) > 1 and stream.done is not None:
                    to_claimed += await _claimed_after(field, stream.done.job, lost_unix)
                    takeover = stream.starts[1]
                    num_moved += 1
                    to_started.append(takeover.at - lost_at)
                    gaps += [takeover.gap_s] if takeover.gap_s is not None else []
    return FailoverKind(
        kind=next(name for name, each in KINDS.items() if each is kind),
        num_kills=num_kills,
        num_streams=num_kills * num_streams,
        num_moved=num_moved,
        to_claimed=distribution(in_ms(to_claimed)),
        to_started=distribution(in_ms(to_started)),
        token_gap=distribution(in_ms(gaps)),
        to_claimed_ms=in_ms(to_claimed),
        to_started_ms=in_ms(to_started),
        token_gap_ms=in_ms(gaps),
    )


async def _claimed_after(field: Ground, job: str, lost_unix: float) -> list[float]:
    """Seconds from the loss to the claim that followed it; none where the log does not have it any more."""
    timed = await timeline(field.client.bus, field.client.tenant, job)
    stored = [parse_time(each.time) for each in timed if each.event.kind == "started"]
    return [at - lost_unix for at in stored if at is not None and at > lost_unix][:1]


async def _lose_one(
    field: Ground, kind: Kind, num_streams: int, *, num_tokens: int = _NUM_TOKENS, num_survivors: int = 0
) -> tuple[list[Watched], float, float]:
    """Open the streams, lose the worker of the first in mid-stream, read all to their end; as many workers as before
    are there again, or about to be.

    When it was lost comes by both clocks.
    """
    streams = [Watched(threshold=_KILL_AFTER) for _ in range(num_streams)]
    async with asyncio.TaskGroup() as group:
        for number, watched in enumerate(streams):
            group.create_task(_read(field, watched, number, num_tokens))
        for watched in streams:
            await watched.reached.wait()
        survivors = [field.stack.add_worker() for _ in range(num_survivors)]
        if survivors:
            await field.workers_ready(1 + num_survivors)
            if any(watched.done is not None for watched in streams):
                raise HeadraceError("a stream ended before the survivors were there; a lower --pace would help")
        victim = await field.stack.child_of(streams[0].starts[-1].worker)
        lost_at, lost_unix = time.monotonic(), time.time()
        victim.send_signal(kind.signal)
    if kind.signal is signal.SIGKILL:
        victim.kill()
    else:
        victim.send_signal(signal.SIGCONT)
    for spare in survivors[1:] if kind.signal is signal.SIGKILL else survivors:
        spare.stop.set()
        await spare.ended.wait()
    if kind.signal is signal.SIGKILL and not survivors:
        field.stack.add_worker()
    for watched in streams:
        if watched.done is None or watched.num_tokens != num_tokens:
            raise HeadraceError(f"a stream ended with {watched.num_tokens} of {num_tokens} tokens")
    return streams, lost_at, lost_unix


async def _read(field: Ground, watched: Watched, number: int, num_tokens: int) -> None:
    body: dict[str, Any] = {"prompt": f"stream {number}", "max_tokens": num_tokens, "ignore_eos": True}
    async with field.client.stream(model=MODEL, **body) as stream:
        await watched.read(aiter(stream))


def shown_failover(result: FailoverResult) -> list[RenderableType]:
    """The tables, and how to read them."""
    rows: list[tuple[str, Distribution | None]] = []
    for kind in result.kinds:
        title = KINDS[kind.kind].title
        rows += [(f"{title}: to `started` in the log", kind.to_claimed)]
        rows += [(f"{title}: to `started` at the client", kind.to_started), (f"{title}: token gap", kind.token_gap)]
    moved = sum(kind.num_moved for kind in result.kinds)
    total = sum(kind.num_streams for kind in result.kinds)
    each_ms = 1000 / result.tokens_per_second
    notes = (
        f"{moved} of {total} streams were on a lost worker; all {total} ended with every token once and in order.",
        f"A token gap includes the {each_ms:.0f} ms that one token takes anyway. Of fewer than 100 samples p99 is the "
        "largest, which one busy moment of this machine can make.",
        str(result.machine),
    )
    return [distributions("Failover, ms", rows), *(Text(note, style="dim") for note in notes)]
