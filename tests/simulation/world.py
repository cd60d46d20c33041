"""A deployment inside the model: real routers, workers and monitors as processes that can be killed or hung.

`World.check` collects what the rules forbid as it happens; `play` runs one scenario to its end.
"""

import asyncio
import contextlib
import gc
import json
import logging
import random
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final
from unittest.mock import patch

import msgspec
from nats.aio.msg import Msg

from headrace.bus.connection import Bus
from headrace.bus.disconnects import Disconnect
from headrace.bus.provision import ensure_jobs_stream, ensure_provisioned
from headrace.errors import BrokerError, ConfigError, EngineBusyError, EngineError
from headrace.monitor import run_monitor
from headrace.router.router import run_router
from headrace.schemas import events, subjects
from headrace.schemas.chunks import ChoiceDelta, EngineChunk, Usage
from headrace.schemas.events import Event, Owner
from headrace.schemas.openai import InferenceRequest
from headrace.schemas.states import JobState, fold, next_state
from headrace.schemas.subjects import Names
from headrace.schemas.workers import decode_heartbeat
from headrace.settings import Settings
from headrace.worker.engines.base import EngineFacts, EngineUsage, Resume
from headrace.worker.worker import WorkerOptions, run_worker
from tests.simulation.broker import Faults, Link, ModelBroker, Stored, Stream
from tests.simulation.bus import model_bus
from tests.simulation.loop import Process, SimulatedLoop, current_process

__all__ = ["Action", "Scenario", "Violation", "World", "play"]

MODEL: Final = "m"
TENANT: Final = "default"
_RECOVERY_S: Final = 40.0
_MAX_STEPS: Final = 400_000


class Action(msgspec.Struct, frozen=True):
    """One thing that happens, `after_s` seconds after the one before it."""

    kind: str
    after_s: float = 0.0
    who: int = 0
    much: float = 0.0


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """All a run depends on."""

    seed: int = 0
    actions: tuple[Action, ...] = ()
    faults: Faults = msgspec.field(default_factory=Faults)
    num_workers: int = 2
    num_routers: int = 1
    num_monitors: int = 1
    num_tokens: int = 4
    token_s: float = 0.05
    max_concurrency: int = 2
    queue_limit: int = 100
    has_notices: bool = False
    stutters: float = 0.0
    """Short hangs of random processes, per second."""


class Violation(AssertionError):
    """A rule of the protocol was broken."""


class _Request(msgspec.Struct):
    job: str
    is_streaming: bool
    queue_timeout_s: float
    deadline_s: float
    answers: list[str]
    num_submits: int = 0
    was_cancelled: bool = False
    accepted_at: float = 0.0


def token(job: str, number: int) -> str:
    """The text of one token of a job's answer; it names both, so that mixing and repeating show."""
    return f"{job}:{number} "


class StubEngine:
    """Deterministic tokens, each a point where others may go first, and faults as scripted."""

    def __init__(self, world: "World", part: "Part") -> None:
        self._world, self._part = world, part
        self.part = part
        self._died = asyncio.Event()
        self._hung = asyncio.Event()
        self._hung.set()
        self.running: dict[tuple[str, int], int] = {}
        self.failing = 0
        self.busy = 0
        self.is_dead = False

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts(name="stub", max_num_seqs=self._world.scenario.max_concurrency, max_model_len=10_000)

    async def start(self) -> None:
        await asyncio.sleep(self._world.uniform(0.001, 0.3))
        self.is_dead = False
        self._died.clear()
        self._hung.set()

    async def count_prompt_tokens(self, request: InferenceRequest) -> int:
        await asyncio.sleep(0)
        return 3

    async def usage(self) -> EngineUsage:
        return EngineUsage(num_running=len(self.running))

    async def check_health(self) -> None:
        await asyncio.sleep(0)
        if self.is_dead:
            raise EngineError("dead")

    async def wait_died(self) -> str:
        await self._died.wait()
        return "the engine died"

    async def stop(self) -> None:
        await asyncio.sleep(0)

    def die(self) -> None:
        self.is_dead = True
        self._died.set()

    def hang(self) -> None:
        self._hung.clear()

    def go_on(self) -> None:
        self._hung.set()

    async def generate(
        self, request: InferenceRequest, *, max_tokens: int, request_id: str, resume: Resume | None = None
    ) -> AsyncGenerator[EngineChunk, None]:
        world = self._world
        job, _, attempt = request_id.rpartition("-")
        key = (job, int(attempt))
        first = resume.num_tokens if resume is not None else 0
        if resume is not None and resume.text != "".join(token(job, each) for each in range(first)):
            world.check.fail(f"RESUME: {job} goes on after {resume.text!r}")
        if self.busy and world.is_faulty:
            self.busy -= 1
            raise EngineBusyError("no room")
        world.check.engine_began(job, int(attempt), self._part)
        self.running[key] = self.running.get(key, 0) + 1
        try:
            for number in range(first, first + max_tokens):
                await asyncio.sleep(world.expovariate(world.scenario.token_s))
                await self._hung.wait()
                if self.is_dead:
                    raise EngineError("the engine died")
                if self.failing and world.is_faulty:
                    self.failing -= 1
                    world.check.engine_faults.add((self._part.name, job))
                    raise EngineError("scripted")
                yield EngineChunk(choices=(ChoiceDelta(text=token(job, number), num_tokens=1),))
            usage = Usage(prompt_tokens=3, completion_tokens=max_tokens, total_tokens=3 + max_tokens)
            yield EngineChunk(choices=(ChoiceDelta(finish_reason="length"),), usage=usage)
        finally:
            self.running[key] -= 1


class Part:
    """One process of the deployment, started anew whenever it ends."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name
        self.process: Process
        self.link: Link
        self.stop: asyncio.Event
        self.engine: StubEngine | None = None
        self.connection = ""
        self.is_up = False


class Check:
    """The rules. It sees each write as the broker takes it; what is wrong goes to `problems`, worst first."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._names = Names()
        self.problems: list[str] = []
        self.states: dict[str, JobState] = {}
        self.logs: dict[str, list[Event]] = defaultdict(list)
        self.gone: set[tuple[str, str]] = set()
        self.epochs: dict[str, str] = {}
        self.engine_faults: set[tuple[str, str]] = set()
        self.dead_letters: set[str] = set()
        self.num_starts: dict[str, int] = defaultdict(int)

    def fail(self, problem: str) -> None:
        """Note a broken rule."""
        self.problems.append(problem)
        self._world.broker.note(f"*** {problem}")

    def on_store(self, stream: Stream, message: Stored, sender: Link | None) -> None:
        """The broker stored a message."""
        if stream.name == self._names.log_stream(0):
            self._on_event(message, sender)
        elif stream.name.startswith("KV_") and stream.name.endswith("workers"):
            self._on_beat(message)
        elif stream.name == self._names.dead_stream:
            self.dead_letters.add(message.subject.rpartition(".")[2])

    def on_remove(self, stream: Stream, message: Stored, how: str) -> None:
        """A queue message is acked or deleted."""
        job = message.headers[subjects.HDR_JOB]
        state = self.states.get(job)
        if state is None or not state.is_terminal:
            self.fail(f"LOST: message {message.seq} of {job}, which has not ended, {how}")

    def engine_began(self, job: str, attempt: int, part: Part) -> None:
        """An engine starts to compute."""
        events_ = self.logs[job]
        ours = [e for e in events_ if e.kind == "started" and e.attempt == attempt]
        if not ours:
            self.fail(f"UNCLAIMED: {part.name} runs {job} attempt {attempt} without a claim in the log")

    def declare_gone(self, worker: str, epoch: str) -> None:
        """From now on this registration may be taken for lost."""
        self.gone.add((worker, epoch))

    def _on_beat(self, message: Stored) -> None:
        worker = message.subject.rpartition(".")[2]
        beat = decode_heartbeat(message.data) if message.data else None
        before = self.epochs.get(worker)
        if before is not None and (beat is None or beat.is_tombstone or beat.epoch != before):
            self.declare_gone(worker, before)
            what = "tombstone" if beat is not None and beat.is_tombstone else "gone" if beat is None else "anew"
            self._world.broker.note(f"key of {worker}: {what} (revision {message.seq})")
            self.epochs.pop(worker)
        if beat is not None and not beat.is_tombstone:
            if self.epochs.get(worker) != beat.epoch:
                self._world.broker.note(f"{worker} registers as {beat.epoch} (revision {message.seq})")
            self.epochs[worker] = beat.epoch

    def _on_event(self, message: Stored, sender: Link | None) -> None:
        expected = int(message.headers.get(subjects.HDR_EXPECTED_LAST_SUBJECT_SEQUENCE, "-1"))
        event = events.decode(message.headers, message.data, sequence=message.seq, last_sequence=expected)
        if event is None:
            self.fail(f"UNDECODABLE event by {sender.name if sender else '?'}")
            return
        who = sender.name if sender is not None else "?"
        job = event.job
        before = self.states.get(job, JobState())
        extra = f" lost={event.lost}" if event.lost else ""
        self._world.broker.note(
            f"{who}: {event.kind} {job} attempt {event.attempt} at {event.offset}+{event.count}{extra}"
            f" ({event.reason or ''}) -> {event.sequence}"
        )
        if before.is_terminal:
            self.fail(f"AFTER END: {event.kind} by {who} after {job} ended as {before.state}")
        elif next_state(before.state, event.kind) is None:
            self.fail(f"ILLEGAL: {event.kind} by {who} while {job} is {before.state}")
        self._check_kind(before, event, who)
        self.logs[job].append(event)
        after = self.states[job] = fold(self.logs[job])
        if not after.is_whole:
            self.fail(f"HOLE: the log of {job} is not whole after {event.kind} by {who}")

    def _check_kind(self, before: JobState, event: Event, who: str) -> None:
        job, owner = event.job, before.owner
        if event.kind in ("delta", "done"):
            if owner is None or not owner.is_same(event.owner) or event.attempt != before.attempt:
                self.fail(f"UNFENCED: {event.kind} of {job} by {who} attempt {event.attempt}, owner is {owner}")
            if event.kind == "delta" and event.offset != before.num_tokens:
                self.fail(f"OFFSET: delta of {job} at {event.offset}, readers have {before.num_tokens}")
            self._check_text(before, event)
        elif event.kind == "started":
            self.num_starts[job] += 1
            if event.attempt != before.attempt:
                self.fail(f"ATTEMPT: {job} started as attempt {event.attempt}, the log says {before.attempt}")
            if len(before.faults) >= self._world.settings.max_attempts:
                self.fail(f"BEYOND FAULTS: {job} started after {len(before.faults)} faults")
            request = self._world.requests.get(job)
            if request is not None and self._world.now() > request.accepted_at + request.deadline_s + 1:
                self.fail(f"LATE: {job} started after its deadline")
        elif event.kind == "requeued":
            self._check_requeue(before, event, who)
        elif event.kind == "failed" and event.is_dead and len(before.faults) < self._world.settings.max_attempts:
            self.fail(f"DEAD EARLY: {job} is given up after {len(before.faults)} faults")
        elif event.kind == "expired" and before.was_started:
            self.fail(f"EXPIRED although {job} had started")

    def _check_text(self, before: JobState, event: Event) -> None:
        body = event.json()
        text = body["choices"][0].get("text", "")
        first, last = event.offset, event.offset + event.count
        if event.kind == "done":
            first, last = 0, self._world.scenario.num_tokens
            request = self._world.requests[event.job]
            if request.is_streaming and before.num_tokens != last:
                self.fail(f"SHORT: {event.job} is done after {before.num_tokens} tokens")
        wanted = "".join(token(event.job, each) for each in range(first, last))
        if text != wanted:
            self.fail(f"TEXT: {event.kind} of {event.job} says {text!r} instead of {wanted!r}")

    def _check_requeue(self, before: JobState, event: Event, who: str) -> None:
        job, owner = event.job, before.owner
        if event.attempt != before.attempt + 1:
            self.fail(f"ATTEMPT: {job} requeued as {event.attempt} after {before.attempt}")
        if owner is None:
            self.fail(f"REQUEUED TWICE: {job} by {who} had no owner")
            return
        if who == owner.worker:
            if event.lost is not None and not self._is_true_fault(job, owner):
                self.fail(f"BURNT: {who} counts a fault for {job} that never was ({event.reason})")
            return
        is_gone = (owner.worker, owner.epoch) in self.gone or self._world.is_out(owner.worker)
        if not is_gone and self._world.is_running(owner.worker, job, before.attempt):
            self.fail(f"STEAL: {who} requeued {job} which {owner.worker} runs ({event.reason})")
        if event.lost is not None and not is_gone:
            self.fail(f"BURNT: {who} counts {event.lost} as lost, which lives ({event.reason})")

    def _is_true_fault(self, job: str, owner: Owner) -> bool:
        return (
            (owner.worker, job) in self.engine_faults
            or owner.worker in self._world.engine_trouble
            or (owner.worker, owner.epoch) in self.gone
        )


class World:
    """One deployment, its faults and its requests."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed)
        self.loop = SimulatedLoop(random.Random(scenario.seed ^ 0x5EED))
        self.faults = msgspec.structs.replace(scenario.faults)
        self.settings = Settings(
            state_dir="unused",
            nats_system_url="model" if scenario.has_notices else None,
            ack_wait_s=4,
            request_timeout_s=1,
            retry_for_s=6,
            stall_s=6,
            grace_s=2,
            queue_limit=scenario.queue_limit,
        )
        self.is_faulty = True
        self.requests: dict[str, _Request] = {}
        self.engine_trouble: set[str] = set()
        self._listeners: list[tuple[Part, Callable[[Disconnect], Awaitable[None]]]] = []
        self._num_clients = 0
        self._num_ids = 0
        broker_process = self.loop.add(Process("broker"))
        self.broker = ModelBroker(
            self.loop, random.Random(scenario.seed ^ 0xB0B), self.faults, broker_process.context
        )
        self.check = Check(self)
        self.broker.on_store = self.check.on_store
        self.broker.on_remove = self.check.on_remove
        self.parts: list[Part] = []
        self.dead: list[Part] = []

    # what others ask

    def now(self) -> float:
        return self.loop.time()

    def uniform(self, low: float, high: float) -> float:
        return self.rng.uniform(low, high)

    def expovariate(self, mean: float) -> float:
        return self.rng.expovariate(1 / mean)

    def is_out(self, worker: str) -> bool:
        """Whether a worker is dead or hung, or was a moment ago."""
        part = next(part for part in self.parts if part.name == worker)
        return not part.is_up or part.process.is_hung or part.process.paused_until > self.now()

    def is_running(self, worker: str, job: str, attempt: int) -> bool:
        """Whether a worker's engine computes an attempt."""
        part = next(part for part in self.parts if part.name == worker)
        return part.engine is not None and part.engine.running.get((job, attempt), 0) > 0

    # processes

    def start(self, part: Part) -> None:
        """Start a process, for the first time or again."""
        part.process = self.loop.add(Process(part.name))
        self._num_clients += 1
        bus = part.process.context.run(model_bus, self.broker, part.process, self.settings, self._num_clients)
        part.link = bus.nc.link  # type: ignore[attr-defined]
        part.connection = bus.connection_id
        part.is_up = True
        part.process.context.run(lambda: self.loop.create_task(self._supervised(part, bus), name=part.name))

    async def _supervised(self, part: Part, bus: Bus) -> None:
        process = part.process
        part.stop = asyncio.Event()
        try:
            if part.kind == "router":
                await run_router(bus, stop=part.stop)
            elif part.kind == "monitor":
                await run_monitor(bus, stop=part.stop)
            else:
                part.engine = StubEngine(self, part)
                options = WorkerOptions(worker=part.name, model=MODEL)
                await run_worker(bus, part.engine, options, stop=part.stop)
        except (BrokerError, ConfigError, EngineError) as error:
            self.broker.note(f"{part.name} ENDS: {error}")
        except BaseExceptionGroup as group:
            self._ended_by(part, group)
        except Exception as error:
            self.check.fail(f"CRASH of {part.name}: {error!r}")
        self.broker.note(f"{part.name} is down")
        if part.process is process and not self.is_over:
            self._gone(part, loses_half=False)
            await asyncio.sleep(0.5)
            self.loop.call_soon(self.start, part, context=self.loop.outside.context)

    is_over = False

    def _ended_by(self, part: Part, group: BaseExceptionGroup[BaseException]) -> None:
        expected, rest = group.split((BrokerError, ConfigError, EngineError))
        if rest is not None and not self.is_over:
            self.check.fail(f"CRASH of {part.name}: {rest.exceptions!r}")
        if expected is not None:
            self.broker.note(f"{part.name} ENDS: {expected.exceptions!r}")

    def _gone(self, part: Part, *, loses_half: bool) -> None:
        part.is_up = False
        part.engine = None
        self.broker.disconnect(part.link, loses_half=loses_half)
        if part.kind == "worker" and part.name in self.check.epochs:
            self.check.declare_gone(part.name, self.check.epochs[part.name])
        notice = Disconnect(part.connection, "Client Closed")
        for listener, handler in self._listeners:
            if listener.is_up and listener is not part:
                self.loop.call_later(
                    self.uniform(0.001, 0.05), self._notify, listener, handler, notice, context=self.loop.outside.context
                )

    def _notify(self, part: Part, handler: Callable[[Disconnect], Awaitable[None]], notice: Disconnect) -> None:
        async def tell() -> None:
            with contextlib.suppress(BrokerError):
                await handler(notice)

        if part.is_up:
            part.process.context.run(lambda: self.loop.create_task(tell(), name="notice"))

    @contextlib.asynccontextmanager
    async def disconnects(
        self, url: str, settings: Settings, *, handler: Callable[[Disconnect], Awaitable[None]]
    ) -> AsyncIterator[None]:
        """Stands for the system account's notices."""
        process = current_process()
        part = next(part for part in self.parts if part.process is process)
        self._listeners.append((part, handler))
        yield

    def kill(self, part: Part, *, loses_half: bool) -> None:
        """End a process without a word."""
        if not part.is_up:
            return
        self.broker.note(f"=== {part.name} KILLED")
        part.process.is_dead = True
        self._gone(part, loses_half=loses_half)
        part.process.ready.clear()

    def hang(self, part: Part) -> None:
        """SIGSTOP."""
        if part.is_up and not part.process.is_hung:
            self.broker.note(f"=== {part.name} HANGS")
            part.process.is_hung = True

    def go_on(self, part: Part) -> None:
        """SIGCONT."""
        if part.process.is_hung:
            self.broker.note(f"=== {part.name} GOES ON")
            part.process.is_hung = False

    # the scenario

    async def play(self) -> None:
        """All actions, then peace, until everything has ended."""
        scenario, setup = self.scenario, self.loop.add(Process("client"))
        faults = msgspec.structs.replace(self.faults)
        self.faults.end()
        bus = model_bus(self.broker, setup, self.settings, 0)
        await ensure_provisioned(bus)
        await ensure_jobs_stream(bus, MODEL)
        self._client = Client(self, bus)
        await self._client.start()
        for kind, number in (("worker", scenario.num_workers), ("router", scenario.num_routers), ("monitor", scenario.num_monitors)):
            self.parts += [Part(kind, f"{kind[0]}{each}") for each in range(number)]
        for part in self.parts:
            self.start(part)
        await asyncio.sleep(2.5)
        for field in msgspec.structs.fields(Faults):
            setattr(self.faults, field.name, getattr(faults, field.name))
        stuttering = asyncio.ensure_future(self._stutter_for_ever())
        for action in scenario.actions:
            await asyncio.sleep(action.after_s)
            await self._act(action)
        await asyncio.sleep(self.uniform(0, 3))
        stuttering.cancel()
        await self._peace()

    async def _peace(self) -> None:
        self.broker.note("=== faults stop")
        self.is_faulty = False
        self.faults.end()
        for part in self.parts:
            self.go_on(part)
            if part.engine is not None:
                part.engine.go_on()
        if not await self._until_settled(_RECOVERY_S):
            left = self._unsettled()
            longest = max((request.deadline_s for request in self.requests.values()), default=0)
            if await self._until_settled(longest + 20):
                self.check.fail(f"SLOW: only the deadline ended it: {left}")
            else:
                self.check.fail(f"NOT LIVE: {self._unsettled()}")
        self._check_end()

    async def _until_settled(self, seconds: float) -> bool:
        until = self.now() + seconds
        while self.now() < until and not self.check.problems:
            if not self._unsettled():
                return True
            await asyncio.sleep(0.25)
        return not self._unsettled()

    def _unsettled(self) -> list[str]:
        left = []
        for job, request in self.requests.items():
            state = self.check.states.get(job)
            is_taken = state is not None or {"accepted", "attached"} & set(request.answers)
            if is_taken and (state is None or not state.is_terminal):
                left.append(f"{job} is {state.state if state else 'unknown to the log'}")
        queue = self.broker.streams[Names().jobs_stream(MODEL)]
        return left + [f"message {each.seq} of {each.headers[subjects.HDR_JOB]}" for each in queue.live.values()]

    def _check_end(self) -> None:
        for job, request in self.requests.items():
            state = self.check.states.get(job)
            answers = set(request.answers)
            is_answered = len(request.answers) >= request.num_submits
            if state is not None and is_answered and answers and answers <= {"queue_full", "model_not_found"}:
                self.check.fail(f"GHOST: {job} was refused ({request.answers}) but its log is {state.state}")
            is_dead = state is not None and state.last is not None and state.last.is_dead
            if is_dead != (job in self.check.dead_letters):
                self.check.fail(f"DEAD LETTER of {job}: {'missing' if is_dead else 'without cause'}")

    async def _act(self, action: Action) -> None:
        part = self.parts[action.who % len(self.parts)]
        engines = [part.engine for part in self.parts if part.engine is not None]
        engine = engines[action.who % len(engines)] if engines else None
        match action.kind:
            case "submit":
                await self._client.submit(f"j{action.who}", hurry=action.much)
            case "cancel":
                await self._client.ask("cancel", f"j{action.who}")
            case "status":
                await self._client.ask("status", f"j{action.who}")
            case "kill":
                self._kill_and_restart(part, action.much)
            case "hang":
                self.hang(part)
                self.loop.call_later(action.much, self.go_on_if, part, part.process)
            case "drain":
                if part.is_up and not part.process.is_hung and hasattr(part, "stop"):
                    self.broker.note(f"=== {part.name} told to stop")
                    part.stop.set()
            case "outage":
                self.faults.outage = "unserved" if action.who % 2 else "silent"
                self.broker.note(f"=== outage ({self.faults.outage}) for {action.much:.1f} s")
                self.loop.call_later(action.much, self._end_outage)
            case "fail" if engine is not None:
                engine.failing += 1
            case "busy" if engine is not None:
                engine.busy += 1
            case "die" if engine is not None:
                self.broker.note(f"=== engine of {engine.part.name} dies")
                self.engine_trouble.add(engine.part.name)
                engine.die()
            case "stall" if engine is not None:
                self.broker.note(f"=== engine of {engine.part.name} hangs")
                self.engine_trouble.add(engine.part.name)
                engine.hang()

    def go_on_if(self, part: Part, process: Process) -> None:
        if part.process is process:
            self.go_on(part)

    def _end_outage(self) -> None:
        self.faults.outage = ""
        self.broker.note("=== outage is over")

    def _kill_and_restart(self, part: Part, after_s: float) -> None:
        if part.is_up:
            self.kill(part, loses_half=self.rng.random() < 0.5)
            self.loop.call_later(after_s, self.start, part)

    async def _stutter_for_ever(self) -> None:
        while self.scenario.stutters:
            await asyncio.sleep(self.expovariate(1 / self.scenario.stutters))
            part = self.rng.choice(self.parts)
            part.process.paused_until = self.now() + self.uniform(0.02, 1.5)


class Client:
    """Sends requests and notes the answers."""

    def __init__(self, world: World, bus: Bus) -> None:
        self._world, self._bus = world, bus
        self._names = bus.names
        self._jobs: dict[str, str] = {}

    async def start(self) -> None:
        """Listen for answers."""
        await self._bus.subscribe("_INBOX.default.>", cb=self._on_answer)

    async def submit(self, job: str, *, hurry: float) -> None:
        """Send a request, or send it again."""
        world = self._world
        request = world.requests.get(job)
        if request is None:
            deadline_s = 4.0 if 0.2 < hurry < 0.3 else 600.0
            queue_timeout_s = 2.0 if 0.1 < hurry < 0.2 else 300.0
            request = world.requests[job] = _Request(job, hurry < 0.8, queue_timeout_s, deadline_s, [], accepted_at=1e12)
        request.accepted_at = max(world.now() + 10, request.accepted_at if request.num_submits else 0)
        request.num_submits += 1
        number = len(self._jobs)
        inbox = f"_INBOX.default.answers-{number}"
        self._jobs[inbox] = job
        world.broker.note(f"=== submit {job}")
        body = {"prompt": job, "max_tokens": world.scenario.num_tokens, "stream": request.is_streaming}
        await self._bus.publish(
            self._names.infer(TENANT, "completions", MODEL),
            json.dumps(body).encode(),
            reply=inbox,
            headers={
                subjects.HDR_ID: job,
                subjects.HDR_DEADLINE: str(request.deadline_s),
                subjects.HDR_QUEUE_TIMEOUT: str(request.queue_timeout_s),
            },
        )

    async def ask(self, what: str, job: str) -> None:
        """Cancel a job or ask for its status."""
        self._world.broker.note(f"=== {what} {job}")
        subject = self._names.cancel(TENANT, job) if what == "cancel" else self._names.status(TENANT, job)
        await self._bus.publish(subject, b"", reply="_INBOX.default.control")

    async def _on_answer(self, message: Msg) -> None:
        job = self._jobs.get(message.subject)
        headers = message.headers or {}
        if job is None:
            return
        if headers.get(subjects.HDR_EVENT) == "accepted":
            answer = "attached" if subjects.HDR_ATTACHED in headers else "accepted"
        elif headers.get(subjects.HDR_EVENT) == "error":
            answer = json.loads(message.data)["error"]["code"]
        else:
            return
        self._world.broker.note(f"answer to {job}: {answer}")
        self._world.requests[job].answers.append(answer)


class _Errors(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None and not self._world.is_over:
            self._world.check.fail(f"UNEXPECTED: {record.getMessage()}: {record.exc_info[1]!r}")


@contextlib.contextmanager
def _virtual(world: World) -> Iterator[None]:
    log = logging.getLogger("headrace")
    handler, was = _Errors(world), (log.level, log.propagate)
    log.addHandler(handler)
    log.setLevel(logging.ERROR)
    log.propagate = False
    ids = random.Random(world.scenario.seed)
    had_gc = gc.isenabled()
    gc.disable()  # finalizers would run at moments that no seed decides
    try:
        with (
            patch.object(time, "monotonic", world.loop.time),
            patch.object(time, "time", world.loop.time),
            patch.object(uuid, "uuid4", lambda: uuid.UUID(int=ids.getrandbits(128))),
            patch("headrace.worker.worker.read_host_memory", lambda: None),
            patch("headrace.monitor.guard.disconnects", world.disconnects),
        ):
            yield
    finally:
        if had_gc:
            gc.enable()
        log.removeHandler(handler)
        log.setLevel(was[0])
        log.propagate = was[1]


def play(scenario: Scenario) -> World:
    """Run a scenario to its end; what went wrong is in `check.problems` of what it returns."""
    world = World(scenario)
    loop = world.loop
    with _virtual(world):
        try:
            loop.set_exception_handler(lambda _, context: _on_loop_error(world, context))
            loop.run_until_complete(world.play())
        except Violation:
            pass
        finally:
            world.is_over = True
            _clean_up(world)
    return world


def _on_loop_error(world: World, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if not world.is_over and not isinstance(error, BrokerError | asyncio.CancelledError):
        world.check.fail(f"LOOP: {context.get('message')}: {error!r}")


def _clean_up(world: World) -> None:
    """End all tasks, those of the dead too, with nothing reaching the broker."""
    loop = world.loop
    for part in world.parts:
        world.broker.disconnect(part.link, loses_half=True)
    for process in loop.processes:
        process.is_dead = process.is_hung = False
        process.paused_until = 0.0
    world.broker.publish = lambda *_: None  # type: ignore[method-assign]
    for _ in range(20):
        tasks = [task for task in asyncio.all_tasks(loop) if not task.done()]
        if not tasks:
            break
        for task in sorted(tasks, key=hash):
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=20))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
