"""`headrace drain` and `headrace evict`: taking one worker out, in good order or at once."""

import asyncio
import time
from typing import Final

import click
import msgspec
from rich.text import Text

from headrace.bus.connection import Bus, Stored
from headrace.bus.heartbeats import WorkersBucket
from headrace.bus.overview import list_models
from headrace.cli.options import connected, with_settings
from headrace.cli.progress import Progress
from headrace.cli.render import console, table
from headrace.errors import ConfigError, HeadraceError
from headrace.logs import configure_logging
from headrace.monitor.eviction import Evictor
from headrace.schemas.subjects import is_worker_id
from headrace.schemas.workers import Heartbeat, HeldRequest, WorkerNudge
from headrace.settings import Settings

__all__ = ["drain", "evict"]

_LOOK_S: Final = 0.1
_NUDGE_EVERY_S: Final = 1.0
_MARGIN_S: Final = 15.0
"""What draining may take beyond the grace period: handing back, and the engine's end."""

_MAX_TRIES: Final = 20
_TOMBSTONE_TTL_S: Final = 3600.0
_BEATS_TO_COME_BACK: Final = 1.5
_MAX_REASON_CHARS: Final = 200


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """What `drain --json` prints; `epoch` names the life of the worker that has ended, `wall_s` what it took."""

    worker: str
    epoch: str
    wall_s: float


class Evicted(msgspec.Struct, frozen=True, kw_only=True):
    """What `evict --json` prints: the requests the worker held and whether it lives and has registered anew."""

    worker: str
    epoch: str
    held: tuple[HeldRequest, ...]
    num_handed_back: int
    is_back: bool


@click.command()
@click.argument("worker")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), metavar="S",
    help=f"How long to wait for it to leave; default: HEADRACE_GRACE_S and {_MARGIN_S:g} s more.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@with_settings
def drain(settings: Settings, worker: str, timeout_s: float | None, as_json: bool) -> None:
    """Tell a worker to drain, and wait until it has left.

    It fetches nothing more, finishes what it can within its own grace period, hands the rest back to the queues, and
    exits 0; whatever keeps it running (`headrace up`, systemd, …) may start it again. Ctrl-C only ends the waiting.
    """
    _check(worker)
    if timeout_s is None:
        timeout_s = settings.grace_s + _MARGIN_S
    drained = asyncio.run(_drain(settings, worker, timeout_s))
    click.echo(msgspec.json.encode(drained).decode() if as_json else f"worker {worker} has drained and left")


@click.command()
@click.argument("worker")
@click.option("--reason", default="evicted by command", show_default=True, metavar="TEXT", help="Said to its owner.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@with_settings
def evict(settings: Settings, worker: str, reason: str, as_json: bool) -> None:
    """Declare a worker dead and hand over what it holds, now.

    Its requests go back to the head of their queues and continue elsewhere after the last token, as if it had been
    killed; each counts a fault. A worker that lives learns it at its next beat, drops what it had, and registers anew:
    to be rid of it, drain it or stop its process.
    """
    _check(worker)
    if len(reason) > _MAX_REASON_CHARS or not reason.isprintable():
        raise ConfigError(f"--reason: at most {_MAX_REASON_CHARS} printable characters")
    configure_logging("evict", "error", json=False)
    evicted = asyncio.run(_evict(settings, worker, reason))
    if as_json:
        click.echo(msgspec.json.encode(evicted).decode())
    else:
        _print(evicted)


async def _drain(settings: Settings, worker: str, timeout_s: float) -> Drained:
    begun_at = time.monotonic()
    async with connected(settings) as bus:
        beat = await _living(bus, worker)
        last = beat
        nudge = msgspec.json.encode(WorkerNudge(kind="drain"))
        bucket, until, nudged_at = WorkersBucket(bus), time.monotonic() + timeout_s, -float("inf")
        with Progress() as progress:
            while True:
                now = time.monotonic()
                if last.state != "Draining" and now - nudged_at >= _NUDGE_EVERY_S:  # a nudge may be lost
                    await bus.publish(bus.names.ctl(worker), nudge)
                    nudged_at = now
                progress.say(f"{worker} is {last.state}, {len(last.held)} requests left")
                seen = await bucket.get(worker)
                if seen is None or seen.has_left or (seen.beat is not None and seen.beat.epoch != beat.epoch):
                    return Drained(worker=worker, epoch=beat.epoch, wall_s=round(time.monotonic() - begun_at, 3))
                if seen.beat is None or seen.beat.is_tombstone:
                    raise HeadraceError(f"worker {worker} died while draining; its requests are handed over")
                last = seen.beat
                if now >= until:
                    raise HeadraceError(
                        f"worker {worker} has not left within {timeout_s:g} s: it is {last.state} and holds "
                        f"{len(last.held)} requests; it goes on draining"
                    )
                await asyncio.sleep(_LOOK_S)


async def _evict(settings: Settings, worker: str, reason: str) -> Evicted:
    async with connected(settings) as bus:
        await _living(bus, worker)
        bucket, evictor = WorkersBucket(bus), Evictor(bus)
        last = await _declare_dead(bucket, worker, reason)
        await bus.publish(bus.names.ctl(worker), msgspec.json.encode(WorkerNudge(kind="evicted")))
        # One that lives must let go first: woken for what it still lists, it would fetch it and take no notice.
        is_back = await _comes_back(bucket, last, within_s=_BEATS_TO_COME_BACK * last.interval_s)
        await evictor.hand_over(last)
    return Evicted(
        worker=worker,
        epoch=last.epoch,
        held=last.held,
        num_handed_back=evictor.num_handed_back,
        is_back=is_back,
    )


async def _declare_dead(bucket: WorkersBucket, worker: str, reason: str) -> Heartbeat:
    """Write the tombstone over its last beat, which is returned. Raises HeadraceError where it is gone already."""
    for _ in range(_MAX_TRIES):  # it may beat between our look and our word
        seen = await bucket.get(worker)
        if seen is None or seen.beat is None or seen.beat.is_tombstone:
            raise HeadraceError(f"worker {worker} is gone: it left, died, or was evicted by somebody else just now")
        tombstone = msgspec.structs.replace(seen.beat, is_tombstone=True, reason=reason)
        result = await bucket.put(tombstone, expected_revision=seen.revision, ttl_s=_TOMBSTONE_TTL_S)
        if isinstance(result, Stored):
            return seen.beat
    raise HeadraceError(f"worker {worker} is not evicted: the broker refused {_MAX_TRIES} times")


async def _living(bus: Bus, worker: str) -> Heartbeat:
    """Its last beat. Raises HeadraceError where no such worker lives."""
    known = await WorkersBucket(bus).list() if await list_models(bus) else {}
    live = {name: seen.beat for name, seen in known.items() if seen.beat is not None and not seen.beat.is_tombstone}
    if worker not in live:
        raise HeadraceError(f"no worker {worker} lives; there are: {', '.join(sorted(live)) or 'none'}")
    return live[worker]


async def _comes_back(bucket: WorkersBucket, before: Heartbeat, *, within_s: float) -> bool:
    """Whether it registers anew."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        seen = await bucket.get(before.worker)
        if seen is not None and seen.beat is not None and seen.beat.epoch != before.epoch:
            return True
        await asyncio.sleep(_LOOK_S)
    return False


def _print(evicted: Evicted) -> None:
    out = console()
    back = "it lives and has registered anew" if evicted.is_back else "it has not come back"
    out.print(Text(f"worker {evicted.worker} is evicted; {back}"))
    if not evicted.held:
        out.print(Text("It held no request."))
        return
    rows = [(each.job, each.tenant, str(each.attempt)) for each in evicted.held]
    out.print(
        f"{evicted.num_handed_back} of the {len(evicted.held)} requests it held were handed back to their queues",
        style="bold",
        soft_wrap=True,
    )
    out.print(table("", ("job", "tenant", "attempt"), rows, right=("attempt",)))
    if evicted.num_handed_back < len(evicted.held):
        out.print(Text("The others had ended or were somebody else's.", style="dim"))


def _check(worker: str) -> None:
    if not is_worker_id(worker):
        raise ConfigError(f"WORKER is {worker[:80]!r}; allowed: 1 to 64 of A-Z a-z 0-9 _ -")
