"""`headrace bench dispatch`: from sending a request to its worker and back, beside what NATS alone takes."""

import asyncio
import time
from typing import Final

import msgspec
from rich.console import RenderableType
from rich.text import Text

from headrace.bench.bare import Bare, bare
from headrace.bench.figures import Distribution, distribution, in_ms
from headrace.bench.ground import MODEL, Ground, Machine, ground, machine
from headrace.bench.tables import distributions
from headrace.bus.clock import parse_time
from headrace.bus.jobqueue import JobQueue
from headrace.bus.timeline import timeline
from headrace.cli.progress import Progress
from headrace.client import Accepted, Delta, Started
from headrace.errors import HeadraceError
from headrace.schemas.subjects import QueueName
from headrace.settings import Settings

__all__ = ["DispatchPhase", "DispatchResult", "measure_dispatch", "shown_dispatch"]

_WARM_UP: Final = 20
_PAUSE_S: Final = 0.005
_PROBE_EVERY_S: Final = 0.05


class Timed(msgspec.Struct, kw_only=True):
    """One request: when it was sent, by both clocks, and seconds from then to its delivery and to what the client
    saw.
    """

    job: str = ""
    sent_at: float
    sent_unix: float
    delivered_s: float | None = None
    accepted_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0


class DispatchPhase(msgspec.Struct, frozen=True, kw_only=True):
    """One phase, in milliseconds. `round_trip` and `publish_fetch` are NATS alone; the rest is from sending a request.

    `delivered` is when the broker sent it to its worker, `at_worker` when it stored the worker's claim, both by its
    clock, which is this machine's; the first is not known for one of many at once. `num_early_fetches`
    of the plain fetches came before the message just stored could be had, and were repeated.
    """

    num_early_fetches: int
    round_trip: Distribution | None
    publish_fetch: Distribution | None
    accepted: Distribution | None
    delivered: Distribution | None
    at_worker: Distribution | None
    started: Distribution | None
    first_token: Distribution | None


class DispatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `bench dispatch --json` prints. `rate` is the jobs per second that the loaded phase was to have, `reached`
    what it had.
    """

    machine: Machine
    rate: int
    reached: float
    idle: DispatchPhase
    loaded: DispatchPhase


async def measure_dispatch(
    settings: Settings, progress: Progress, *, num_requests: int, rate: int, seconds: float
) -> DispatchResult:
    """Both phases on one deployment. Raises HeadraceError where a request fails."""
    where = machine()
    options = {"tokens_per_second": "0", "kv_tokens": "1000000", "max_concurrency": "256"}
    async with ground(settings, progress, options=options, max_concurrency=256) as field, bare(field) as plain:
        progress.say("warming up")
        for _ in range(_WARM_UP):
            await plain.probe()
            await _request(field)
        plain.forget()
        queue = JobQueue(field.client.bus, MODEL)
        progress.say(f"idle: {num_requests} requests")
        idle = []
        for _ in range(num_requests):
            await plain.probe()
            idle.append(timed := await _request(field))
            delivered_at = await queue.last_delivered_at(QueueName())
            timed.delivered_s = delivered_at - timed.sent_unix if delivered_at is not None else None
            await asyncio.sleep(_PAUSE_S)
        idle_phase = await _phase(field, plain, idle)
        plain.forget()
        progress.say(f"{rate} jobs/s for {seconds:g} s")
        began = time.monotonic()
        loaded = await _load(field, plain, rate=rate, seconds=seconds)
        took_s = max(each.sent_at for each in loaded) - began
        loaded_phase = await _phase(field, plain, loaded)
    return DispatchResult(
        machine=where, rate=rate, reached=round(len(loaded) / max(took_s, seconds), 1), idle=idle_phase,
        loaded=loaded_phase,
    )  # fmt: skip


async def _request(field: Ground) -> Timed:
    """One request of one token, read to its end."""
    timed = Timed(sent_at=time.monotonic(), sent_unix=time.time())
    async with field.client.stream(model=MODEL, prompt="x", max_tokens=1) as stream:
        timed.job = stream.job
        async for event in stream:
            after_s = time.monotonic() - timed.sent_at
            if isinstance(event, Accepted):
                timed.accepted_s = after_s
            elif isinstance(event, Started):
                timed.started_s = after_s
            elif isinstance(event, Delta) and event.num_tokens and not timed.first_token_s:
                timed.first_token_s = after_s
    return timed


async def _load(field: Ground, plain: Bare, *, rate: int, seconds: float) -> list[Timed]:
    """Requests at a steady rate, however long each takes, with a probe of plain NATS now and then."""
    requests: list[asyncio.Task[Timed]] = []
    async with asyncio.TaskGroup() as group:
        probing = group.create_task(_probe_for_ever(plain))
        began = time.monotonic()
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            requests.append(group.create_task(_request(field)))
        await asyncio.wait(requests)
        probing.cancel()
    return [request.result() for request in requests]


async def _probe_for_ever(plain: Bare) -> None:
    while True:
        await plain.probe()
        await asyncio.sleep(_PROBE_EVERY_S)


async def _phase(field: Ground, plain: Bare, requests: list[Timed]) -> DispatchPhase:
    at_worker: list[float] = []
    for request in requests:
        stored = await _claimed_at(field, request.job)
        if stored is not None:
            at_worker.append(stored - request.sent_unix)
    if not at_worker:
        raise HeadraceError("the log has no claim of any request any more")
    return DispatchPhase(
        num_early_fetches=plain.num_early_fetches,
        round_trip=distribution(in_ms(plain.round_trips)),
        publish_fetch=distribution(in_ms(plain.publish_fetches)),
        accepted=distribution(in_ms(each.accepted_s for each in requests)),
        delivered=distribution(in_ms(each.delivered_s for each in requests if each.delivered_s is not None)),
        at_worker=distribution(in_ms(at_worker)),
        started=distribution(in_ms(each.started_s for each in requests)),
        first_token=distribution(in_ms(each.first_token_s for each in requests)),
    )


async def _claimed_at(field: Ground, job: str) -> float | None:
    """Unix seconds at which the worker's claim was stored."""
    for timed in await timeline(field.client.bus, field.client.tenant, job):
        if timed.event.kind == "started":
            return parse_time(timed.time)
    return None


def shown_dispatch(result: DispatchResult) -> list[RenderableType]:
    """A table for each phase, and how to read them."""
    parts: list[RenderableType] = []
    for title, phase in (
        ("Idle, ms", result.idle),
        (f"At {result.rate} jobs/s ({result.reached:g} reached), ms", result.loaded),
    ):
        rows = (
            ("core NATS round trip", phase.round_trip),
            ("JetStream publish + fetch", phase.publish_fetch),
            ("request → accepted at the client", phase.accepted),
            ("request → the broker sent it to its worker", phase.delivered),
            ("request → its worker has claimed it", phase.at_worker),
            ("request → started at the client", phase.started),
            ("request → first token at the client", phase.first_token),
        )
        beside = phase.round_trip.p50 if phase.round_trip is not None else None
        parts += [distributions(title, rows, beside=beside), Text("")]
    notes = (
        "The first two are NATS alone, timed in turns with the requests: a request and its reply between two "
        "connections of this process; a publish to a job stream with its acknowledgement, then a fetch of it.",
        "The broker times its sending (of one request at a time, for it tells only the last) and the claim, when it "
        "stored it. The measuring client shares the machine with all parts.",
        f"{result.idle.num_early_fetches + result.loaded.num_early_fetches} plain fetches came before the message just "
        "stored could be had, and were repeated.",
        str(result.machine),
    )
    return [*parts, *(Text(note, style="dim") for note in notes)]
