"""Parts of a deployment that a schedule may kill, freeze and bring back; in this process, or as processes."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from headrace.bus.connection import Bus, connect
from headrace.bus.server import BrokerInfo
from headrace.client import Client
from headrace.errors import BrokerError
from headrace.lifecycle import ChildProcess
from headrace.monitor import run_monitor
from headrace.router import run_router
from headrace.settings import Settings
from headrace.worker.engines.sim import SimEngine
from headrace.worker.worker import WorkerOptions, run_worker
from tests.deployment import MODEL, sim
from tests.faults.link import Link
from tests.processes import part

__all__ = ["Player", "Stage", "watching_logs"]

_END_WITHIN_S = 30.0
_START_WITHIN_S = 10.0


class Player:
    """One part. What it is told to do it may do at once or later; `Stage` sees to it that it has ended."""

    def __init__(self, name: str, link: Link) -> None:
        self.name = name
        self.link = link
        self.is_over = False
        self.is_killed = False
        self.engine: SimEngine | None = None

    async def kill(self) -> None:
        """End it with nothing said to anybody."""
        self.is_over = self.is_killed = True
        self.link.cut()

    def freeze(self) -> None:
        """Hold it up: what it says and hears is late, or it stands still as a whole."""
        self.link.freeze()

    def thaw(self) -> None:
        """Let it go on."""
        self.link.thaw()

    def drop(self) -> None:
        """End its connections to the broker; it may connect again."""
        self.link.thaw()  # nats-py leaves the sockets of greetings that nobody answers to the garbage collector
        self.link.drop()

    def drain(self) -> None:
        """Ask it to finish and to leave."""
        self.is_over = True

    async def ended(self) -> str:
        """Wait for its end; what was wrong with it, "" if nothing."""
        raise NotImplementedError

    @property
    def problem(self) -> str:
        """What is wrong with it now: it must not end by itself."""
        raise NotImplementedError

    @property
    def failed_to_start(self) -> bool:
        """Whether it gave up at its start since the broker did not answer; whoever supervises it starts it again."""
        return False


class _Task(Player):
    def __init__(
        self, name: str, link: Link, run: Callable[[asyncio.Event, list[Bus]], Coroutine[Any, Any, None]]
    ) -> None:
        super().__init__(name, link)
        self._stop = asyncio.Event()
        self._buses: list[Bus] = []
        self._began = time.monotonic()
        self._ended = self._began
        token = _running.set(self)
        self._task = asyncio.create_task(run(self._stop, self._buses), name=name)
        _running.reset(token)
        self._task.add_done_callback(self._note_end)

    async def kill(self) -> None:
        await super().kill()
        self._task.cancel()
        for bus in self._buses:  # what it does at its end must reach nobody, nor wait for anybody
            await bus.nc.close()

    def drain(self) -> None:
        super().drain()
        self._stop.set()

    async def ended(self) -> str:
        done, _ = await asyncio.wait([self._task], timeout=_END_WITHIN_S)
        if done:
            return self.problem
        others = "".join(f"\n    {task.get_name()}: {_awaits(task)}" for task in asyncio.all_tasks())
        return f"{self.name} does not end: {_awaits(self._task)}; all tasks there are:{others}"

    @property
    def problem(self) -> str:
        if not self._task.done() or self.is_killed or self.failed_to_start:
            return ""
        if self._task.cancelled():
            return f"{self.name} was cancelled by nobody"
        error = self._task.exception()
        if error is not None:
            return f"{self.name} failed after {self._ended - self._began:.1f} s: {_causes(error)}"
        return "" if self.is_over else f"{self.name} ended by itself"

    @property
    def failed_to_start(self) -> bool:
        if not self._task.done() or self._task.cancelled() or self._ended - self._began > _START_WITHIN_S:
            return False
        error = self._task.exception()
        return error is not None and all(isinstance(each, BrokerError) for each in _leaves(error))

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._ended = time.monotonic()
        if not task.cancelled():
            task.exception()  # one that was killed is asked by nobody, and would be told of in somebody else's log


class _Process(Player):
    def __init__(self, name: str, link: Link, child: ChildProcess) -> None:
        super().__init__(name, link)
        self._child = child

    async def kill(self) -> None:
        self.is_over = self.is_killed = True
        self._child.send_signal(signal.SIGKILL)

    def freeze(self) -> None:
        self._child.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._child.send_signal(signal.SIGCONT)

    def drain(self) -> None:
        super().drain()
        self._child.send_signal(signal.SIGTERM)

    async def ended(self) -> str:
        try:
            async with asyncio.timeout(_END_WITHIN_S):
                await self._child.wait()
        except TimeoutError:
            await self._child.stop()
            return f"{self.name} does not end:\n{self._child.tail()}"
        await self._child.stop()
        return self.problem

    @property
    def problem(self) -> str:
        code = self._child.returncode
        is_told = self.is_over and code in (0, -signal.SIGTERM)  # Python may not yet have been there to take the signal
        if code is None or self.is_killed or is_told:
            return ""
        return f"{self.name} ended with {code}:\n{self._child.tail()}"


class Stage:
    """Starts players by name; one of a name at a time."""

    def __init__(self, broker: BrokerInfo, settings: Settings, client: Client, state_dir: Path) -> None:
        self._broker = broker
        self._settings = settings
        self._client = client
        self._state_dir = state_dir
        self._stack = contextlib.AsyncExitStack()
        self._all: list[Player] = []
        self.players: dict[str, Player] = {}
        self.engines: dict[str, list[SimEngine]] = {}

    async def router(self, name: str) -> None:
        """Start a router."""
        await self._run(name, lambda bus, stop: run_router(bus, stop=stop))

    async def monitor(self, name: str, *, has_notices: bool) -> None:
        """Start a monitor."""
        system_url = self._broker.system_url if has_notices else None
        await self._run(name, lambda bus, stop: run_monitor(bus, stop=stop), nats_system_url=system_url)

    async def worker(self, name: str, *, max_concurrency: int, tokens_per_second: float) -> None:
        """Start a worker in this process."""
        engine = sim(tokens_per_second=tokens_per_second, stall_s=60.0)
        self.engines.setdefault(name, []).append(engine)
        options = WorkerOptions(worker=name, model=MODEL, max_concurrency=max_concurrency)
        player = await self._run(name, lambda bus, stop: run_worker(bus, engine, options, stop=stop))
        player.engine = engine

    async def worker_process(self, name: str, *, max_concurrency: int, tokens_per_second: float) -> None:
        """Start a worker as a process."""
        link = await self._stack.enter_async_context(Link(self._broker.url))
        settings = self._settings
        variables = {
            f"HEADRACE_{key.upper()}": str(getattr(settings, key))
            for key in ("heartbeat_s", "worker_ttl_s", "ack_wait_s", "stall_s", "max_attempts", "request_timeout_s")
        }
        child = part(
            "serve", "worker", "--engine", "sim", "--model", MODEL, "--worker-id", name,
            "--max-concurrency", str(max_concurrency),
            "-o", f"tokens_per_second={tokens_per_second}", "-o", "stall_s=60",
            url=link.url, prefix=settings.prefix, state_dir=self._state_dir, **variables,
        )  # fmt: skip
        await self._stack.enter_async_context(child)
        self._enter(_Process(name, link, child))

    def problems(self) -> list[str]:
        """What is wrong with the players now."""
        return [player.problem for player in self._all if player.problem]

    async def close(self) -> list[str]:
        """End everybody; what was wrong with them."""
        for player in self._all:
            player.thaw()
            if not player.is_over:
                player.drain()
        problems = [await player.ended() for player in self._all]
        await self._stack.aclose()
        return [problem for problem in problems if problem]

    async def _run(
        self, name: str, run: Callable[[Bus, asyncio.Event], Awaitable[None]], **changes: str | None
    ) -> Player:
        link = await self._stack.enter_async_context(Link(self._broker.url))
        values = {key: getattr(self._settings, key) for key in self._settings.__struct_fields__}
        settings = Settings(**{**values, **changes})

        async def go(stop: asyncio.Event, buses: list[Bus]) -> None:
            async with connect(link.url, settings, name=name) as bus:
                buses.append(bus)
                await run(bus, stop)

        return self._enter(_Task(name, link, go))

    def _enter(self, player: Player) -> Player:
        self._all.append(player)
        self.players[player.name] = player
        return player


def _awaits(task: asyncio.Task[Any]) -> str:
    """Where a task waits, through all that it awaits."""
    awaited: Any = task.get_coro()
    places = []
    while awaited is not None:
        frame = (
            getattr(awaited, "cr_frame", None)
            or getattr(awaited, "ag_frame", None)
            or getattr(awaited, "gi_frame", None)
        )
        if frame is not None:
            places.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        else:
            places.append(repr(awaited))
        awaited = (
            getattr(awaited, "cr_await", None)
            or getattr(awaited, "ag_await", None)
            or getattr(awaited, "gi_yieldfrom", None)
        )
    return " > ".join(places)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [error]


def _causes(error: BaseException) -> str:
    return "; ".join(f"{type(leaf).__name__}: {leaf}" for leaf in _leaves(error))


_watcher: ContextVar[list[str] | None] = ContextVar("watcher", default=None)
_running: ContextVar[Player | None] = ContextVar("running", default=None)


@contextlib.contextmanager
def watching_logs() -> Iterator[list[str]]:
    """What is logged with a traceback, which nothing that a fault brings about should be.

    Only by what is started inside this context, so several may watch at once.
    """
    found: list[str] = []
    token = _watcher.set(found)
    handler = _Watcher(level=logging.ERROR)
    logging.getLogger().addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(handler)
        _watcher.reset(token)


class _Watcher(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        found, player, line = _watcher.get(), _running.get(), self.format(record)
        if player is not None and player.is_killed:  # nobody would read what a dead process says
            return
        if found is not None and record.exc_info and record.exc_info[0] is not None and line not in found:
            found.append(line)
