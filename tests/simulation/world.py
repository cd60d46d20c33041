"""A deployment inside the model: real routers, workers and monitors as processes that can be killed or hung.

`World.check` collects what the rules forbid as it happens; `play` runs one scenario to its end.
"""

import asyncio
import contextlib
import gc
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final
from unittest.mock import patch

import msgspec

from headrace.bus.connection import Bus
from headrace.bus.disconnects import Disconnect
from headrace.bus.provision import ensure_jobs_stream, ensure_provisioned
from headrace.errors import BrokerError, ConfigError, EngineError
from headrace.monitor import run_monitor
from headrace.router.router import run_router
from headrace.schemas import subjects
from headrace.schemas.subjects import DEFAULT_POOL, Names
from headrace.settings import Settings
from headrace.worker.engines.base import Engine
from headrace.worker.worker import Worker, WorkerOptions, run_worker
from tests.simulation.broker import Faults, Link, ModelBroker
from tests.simulation.bus import model_bus
from tests.simulation.check import Check
from tests.simulation.client import Client, Request
from tests.simulation.deployment import configure
from tests.simulation.engine import StubEngine
from tests.simulation.idle import IdleWatch
from tests.simulation.loop import Process, SimulatedLoop, current_process
from tests.simulation.schedule import FALLBACK, MODEL, OWNERS, Action, Scenario
from tests.simulation.threads import ModelPulse, SimulatedAsyncio

__all__ = ["Part", "World", "play"]

_RECOVERY_S: Final = 40.0
_PATIENCE_S: Final = 1.0


class Part:
    """One process of the deployment, started anew whenever it ends."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name
        self.model = MODEL
        self.process: Process
        self.link: Link
        self.stop: asyncio.Event
        self.pool = DEFAULT_POOL
        self.kv_tokens: int | None = None
        self.worker: Worker | None = None
        self.engine: StubEngine | None = None
        self.threads: list[tuple[Process, Link, str]] = []
        self.is_up = False

    @property
    def processes(self) -> list[Process]:
        """All that is scheduled for it."""
        return [self.process, *(process for process, _, _ in self.threads)]


class World:
    """One deployment, its faults and its requests."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed)
        self.loop = SimulatedLoop(random.Random(scenario.seed ^ 0x5EED))
        self.faults = msgspec.structs.replace(scenario.faults)
        self.settings = Settings(
            state_dir="unused",
            nats_system_url="nats://model" if scenario.has_notices else None,
            ack_wait_s=4,
            request_timeout_s=1,
            retry_for_s=6,
            stall_s=6,
            grace_s=2,
            queue_limit=scenario.queue_limit,
        )
        self.is_faulty = True
        self.requests: dict[str, Request] = {}
        self.engine_trouble: set[str] = set()
        self._listeners: list[tuple[Part, Callable[[Disconnect], Awaitable[None]]]] = []
        self._num_clients = 0
        self._num_ids = 0
        broker_process = self.loop.add(Process("broker"))
        self.broker = ModelBroker(self.loop, random.Random(scenario.seed ^ 0xB0B), self.faults, broker_process.context)
        self.check = Check(self)
        self.broker.on_store = self.check.on_store
        self.broker.on_remove = self.check.on_remove
        self.idle = IdleWatch(self)
        if scenario.max_idle_s is not None:
            self.loop.observe = self.idle.look
        self.parts: list[Part] = []
        self.dead: list[Part] = []

    # what others ask

    @property
    def models(self) -> tuple[str, ...]:
        """Models that have workers."""
        return (MODEL, FALLBACK) if self.scenario.num_fallback_workers else (MODEL,)

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
        part.threads = []
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
                options = WorkerOptions(worker=part.name, model=part.model, pool=part.pool, kv_tokens=part.kv_tokens)
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
        part.engine = part.worker = None
        self.broker.disconnect(part.link, loses_half=loses_half)
        if part.kind == "worker" and part.name in self.check.epochs:
            self.check.declare_gone(part.name, self.check.epochs[part.name])
        for _, link, connection in part.threads:
            self._disconnected(part, link, connection, loses_half=loses_half)

    def _disconnected(self, part: Part, link: Link, connection: str, *, loses_half: bool) -> None:
        if link.is_closed:
            return
        self.broker.disconnect(link, loses_half=loses_half)
        notice = Disconnect(connection, "Client Closed")
        for listener, handler in self._listeners:
            if listener.is_up and listener is not part:
                self.loop.call_later(
                    self.uniform(0.001, 0.05),
                    self._notify,
                    listener,
                    handler,
                    notice,
                    context=self.loop.outside.context,
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

    def new_worker(self, bus: Bus, engine: Engine, options: WorkerOptions) -> Worker:
        """Stands for the class, so that what a worker knows can be looked at."""
        worker = Worker(bus, engine, options)
        part = next(part for part in self.parts if part.name == options.worker)
        part.worker = worker
        return worker

    def new_thread(self, process: Process) -> Process:
        """The process that stands for a thread of another."""
        part = next(part for part in self.parts if part.process is process)
        thread = self.loop.add(Process(f"{part.name}.heart"))
        part.threads.append((thread, Link("", thread.context), ""))
        return thread

    @contextlib.asynccontextmanager
    async def connect(self, url: str, settings: Settings, *, name: str, inbox_prefix: str) -> AsyncIterator[Bus]:
        """Stands for the connection that the heartbeat's thread makes."""
        process = current_process()
        part = next(part for part in self.parts if process in part.processes)
        self._num_clients += 1
        bus = model_bus(self.broker, part.threads[-1][0], self.settings, self._num_clients)
        link = bus.nc.link  # type: ignore[attr-defined]
        part.threads[-1] = (part.threads[-1][0], link, bus.connection_id)
        yield bus
        self._disconnected(part, link, bus.connection_id, loses_half=False)

    def kill(self, part: Part, *, loses_half: bool) -> None:
        """End a process without a word."""
        if not part.is_up:
            return
        self.broker.note(f"=== {part.name} KILLED")
        for process in part.processes:
            process.is_dead = True
        self._gone(part, loses_half=loses_half)

    def hang(self, part: Part) -> None:
        """SIGSTOP."""
        if part.is_up and not part.process.is_hung:
            self.broker.note(f"=== {part.name} HANGS")
            for process in part.processes:
                process.is_hung = True

    def go_on(self, part: Part) -> None:
        """SIGCONT."""
        if part.process.is_hung:
            self.broker.note(f"=== {part.name} GOES ON")
            for process in part.processes:
                process.is_hung = False

    # the scenario

    async def play(self) -> None:
        """All actions, then peace, until everything has ended."""
        scenario, setup = self.scenario, self.loop.add(Process("client"))
        faults = msgspec.structs.replace(self.faults)
        self.faults.end()
        bus = model_bus(self.broker, setup, self.settings, 0)
        await ensure_provisioned(bus)
        for model in self.models:
            await ensure_jobs_stream(bus, model)
        if scenario.asks:
            await configure(bus, scenario)
        self._client = Client(self, bus)
        await self._client.start()
        for kind, number in (
            ("worker", scenario.num_workers),
            ("router", scenario.num_routers),
            ("monitor", scenario.num_monitors),
        ):
            self.parts += [Part(kind, f"{kind[0]}{each}") for each in range(number)]
        for part, kv_tokens in zip(self.parts, scenario.kv_tokens, strict=False):
            part.kv_tokens = kv_tokens
        for part, pool in zip(self.parts, scenario.pools, strict=False):
            part.pool = pool
        for each in range(scenario.num_fallback_workers):
            self.parts.append(Part("worker", f"f{each}"))
            self.parts[-1].model = FALLBACK
        for part in self.parts:
            self.start(part)
        await asyncio.sleep(2.5)
        for field in msgspec.structs.fields(Faults):
            setattr(self.faults, field.name, getattr(faults, field.name))
        stuttering = asyncio.ensure_future(self._stutter_for_ever())
        for action in scenario.actions:
            await self.broker.until_noted(action.after_lines, within_s=_PATIENCE_S)
            await asyncio.sleep(action.after_s)
            await self._act(action)
        await asyncio.sleep(self.uniform(0, 3) + (0 if scenario.max_idle_s is None else 1))
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
        work_s = len(self.requests) * self.scenario.num_tokens * self.scenario.token_s
        if not await self._until_settled(_RECOVERY_S + 2 * work_s):
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
        for model in self.models:
            queue = self.broker.streams[Names().jobs_stream(model)]
            left += [f"message {each.seq} of {each.headers[subjects.HDR_JOB]}" for each in queue.live.values()]
        return left

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
        part = self._struck(action.who)
        engines = [each.engine for each in (part, *self.parts) if each.engine is not None]
        engine = engines[0] if engines else None
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
                self._excuse_stall(part, action.much)
                self.hang(part)
                self.loop.call_later(action.much, self.go_on_if, part, part.process)
            case "drain":
                if part.is_up and not part.process.is_hung and hasattr(part, "stop"):
                    self.broker.note(f"=== {part.name} told to stop")
                    part.stop.set()
            case "redeliver":
                for model in self.models:
                    self.broker.end_ack_wait(Names().jobs_stream(model), action.who)
            case "expire":
                key = f"$KV.{Names().workers_bucket}.{part.name}"
                self.broker.end_ttl(f"KV_{Names().workers_bucket}", key)
            case "slow":
                self._excuse_stall(part, action.much)
                for process in part.processes if action.who % 2 else [part.process]:
                    process.paused_until = self.now() + action.much
            case "outage":
                self.faults.outage = "unserved" if action.who % 2 else "silent"
                self.broker.note(f"=== outage ({self.faults.outage}) for {action.much:.1f} s")
                self.broker.drop_parked(is_told=action.who % 4 < 2)
                self.loop.call_later(action.much, self._end_outage)
            case "leader":
                self.broker.note("=== consumers have another leader")
                self.broker.drop_parked(is_told=bool(action.who % 2))
            case "fail" if engine is not None:
                engine.failing += 1
            case "busy" if engine is not None:
                engine.busy += 1
            case "die" if engine is not None:
                self.engine_dies(engine)
            case "stall" if engine is not None:
                self.broker.note(f"=== engine of {engine.part.name} hangs")
                self.engine_trouble.add(engine.part.name)
                engine.hang()

    def engine_dies(self, engine: StubEngine) -> None:
        """It fails all it runs, until it is started again."""
        self.broker.note(f"=== engine of {engine.part.name} dies")
        self.engine_trouble.add(engine.part.name)
        engine.die()

    def _excuse_stall(self, part: Part, pause_s: float) -> None:
        # A worker's watchdog takes its own long pause for its engine's.
        if pause_s > self.settings.stall_s / 4:
            self.engine_trouble.add(part.name)

    def _struck(self, who: int) -> Part:
        if who >= OWNERS:
            state = self.check.states.get(f"j{who - OWNERS}")
            if state is not None and state.owner is not None:
                owner = state.owner.worker
                return next(part for part in self.parts if part.name == owner)
        return self.parts[who % len(self.parts)]

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
            until = self.now() + self.uniform(0.02, 1.5)
            for process in part.processes if self.rng.random() < 0.5 else [self.rng.choice(part.processes)]:
                process.paused_until = until


class _Errors(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is None or self._world.is_over:
            return
        if not isinstance(record.exc_info[1], BrokerError):  # a request that a broker in trouble could not answer
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
            patch("headrace.worker.memory.read_host_memory", lambda: None),
            patch("headrace.monitor.guard.disconnects", world.disconnects),
            patch("headrace.worker.worker.Pulse", ModelPulse),
            patch("headrace.worker.worker.Worker", world.new_worker),
            patch("headrace.worker.pulse.asyncio", SimulatedAsyncio()),
            patch("headrace.worker.pulse.connect", world.connect),
            patch.object(ModelPulse, "new_thread", world.new_thread, create=True),
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
        for link in (part.link, *(link for _, link, _ in part.threads)):
            world.broker.disconnect(link, loses_half=True)
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
