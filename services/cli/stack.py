"""Every part of Headrace on this machine, each a process of its own, started and stopped in the right order."""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from headrace.bus.connection import Bus, connect
from headrace.bus.heartbeats import WorkersBucket, WorkersView
from headrace.bus.members import GATEWAY, MONITOR, ROUTER, Member
from headrace.bus.provision import ensure_jobs_stream, ensure_provisioned
from headrace.bus.server import BrokerInfo
from headrace.cli import http
from headrace.cli.broker import SupervisedBroker
from headrace.cli.guard import Guard
from headrace.cli.supervising import Supervised
from headrace.errors import BrokerUnavailableError, ConfigError, EngineStartError, HeadraceError, NotProvisionedError
from headrace.lifecycle import wait_first
from headrace.schemas.subjects import DEFAULT_TENANT, service_inbox
from headrace.settings import Settings

__all__ = ["Plan", "Stack", "running_stack"]

_LOOK_S: Final = 0.05
_READY_WITHIN_S: Final = 180.0
_VLLM_READY_WITHIN_S: Final = 960.0
"""vLLM loads and compiles for many minutes; its engine gives up before that."""
_STOP_TIMEOUT_S: Final = 8.0
_SYSTEM_URL: Final = "HEADRACE_NATS_SYSTEM_URL"
_STOP_MARGIN_S: Final = 5.0
"""What a worker or a gateway gets beyond its grace period to hand back or to say, and leave."""

_COMMAND: Final = (sys.executable, "-P", "-m", "headrace.cli")
"""This program again; -P, so that no folder of the current directory is taken for it."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to start: workers of one model on one engine. `options` are the engine's.

    `has_notices`: whether the monitor gets the embedded broker's system account, and with it disconnect notices.
    `temp_dir` is where the parts keep temporary files, which one that is killed leaves behind. `http_port` is where the
    gateway listens; None: there is none. `is_secure`: each part has a credential of its own, and the embedded broker
    lets in nobody without one.
    """

    model: str
    engine: str
    num_workers: int = 1
    max_concurrency: int | None = None
    options: dict[str, str] = {}
    has_notices: bool = True
    temp_dir: str | None = None
    http_port: int | None = None
    is_secure: bool = False

    def worker_argv(self, worker_id: str | None) -> list[str]:
        """Arguments of `headrace` that start one of the workers."""
        argv = ["serve", "worker", "--engine", self.engine, "--model", self.model]
        if self.max_concurrency is not None:
            argv += ["--max-concurrency", str(self.max_concurrency)]
        if worker_id is not None:
            argv += ["--worker-id", worker_id]
        for key, value in self.options.items():
            argv += ["-o", f"{key}={value}"]
        return argv


class Stack:
    """The running parts. `bus` is a connection of this process; the parts have their own.

    A part that ends is started again once `wait_ready` has returned True. `add_worker` starts one more.
    """

    def __init__(
        self,
        bus: Bus,
        url: str,
        plan: Plan,
        services: list[Supervised],
        workers: list[Supervised],
        add_worker: Callable[[], Supervised],
    ) -> None:
        self.bus = bus
        self.url = url
        self.plan = plan
        self.services = services
        self.workers = workers
        self.add_worker = add_worker

    async def wait_ready(self, stop: asyncio.Event, *, num_workers: int = 1) -> bool:
        """Return once a request would be answered, and so many workers are there: True, or False if `stop` came first.

        Raises what kept a part from starting: HeadraceError with its last words, EngineStartError of a failed engine.
        """
        within_s = _VLLM_READY_WITHIN_S if self.plan.engine == "vllm" else _READY_WITHIN_S
        try:
            async with asyncio.timeout(within_s):
                is_ready = (
                    await self._until_routed(stop)
                    and await self._until_listening(stop)
                    and await self._until_served(stop, num_workers)
                )
        except TimeoutError:
            raise HeadraceError(f"nothing was ready to answer within {within_s:g} s; see the log lines above") from None
        for child in (*self.services, *self.workers):
            child.is_proven = is_ready
        return is_ready

    async def child_of(self, worker: str) -> Supervised:
        """The process of a worker by its id. Raises HeadraceError where it is none of ours, or gone."""
        seen = await WorkersBucket(self.bus).get(worker)
        for child in self.workers:
            if seen is not None and seen.beat is not None and child.pid == seen.beat.pid:
                return child
        raise HeadraceError(f"worker {worker} is none of the processes that run here")

    async def _until_routed(self, stop: asyncio.Event) -> bool:
        subject = self.bus.names.status(DEFAULT_TENANT, "ready")
        while not stop.is_set():
            self._raise_if_ended()
            with contextlib.suppress(NotProvisionedError, BrokerUnavailableError):
                await self.bus.request(subject)
                return True
            await wait_first(stop, *self._ends(), timeout_s=_LOOK_S)
        return False

    async def _until_listening(self, stop: asyncio.Event) -> bool:
        port = self.plan.http_port
        while port is not None and not await http.answers(self.bus.settings.http_host, port):
            self._raise_if_ended()
            if await wait_first(stop, *self._ends(), timeout_s=_LOOK_S) and stop.is_set():
                return False
        return True

    async def _until_served(self, stop: asyncio.Event, num_workers: int) -> bool:
        view = WorkersView(self.bus)
        async with view.running():
            while not stop.is_set():
                self._raise_if_ended()
                view.changed.clear()
                pids = {worker.pid for worker in self.workers if not worker.stop.is_set()}
                ours = [beat for beat in view.beats.values() if beat.pid in pids]
                if sum(beat.state in ("Ready", "Busy") for beat in ours) >= num_workers:
                    return True
                if failed := next((beat for beat in ours if beat.state == "Failed"), None):
                    raise EngineStartError(failed.reason or "the engine failed")
                await wait_first(stop, view.changed, *self._ends(), timeout_s=1.0)
        return False

    def _starting(self) -> list[Supervised]:
        return [child for child in (*self.services, *self.workers) if not child.is_proven]

    def _ends(self) -> list[asyncio.Event]:
        return [child.first_end for child in self._starting()]

    def _raise_if_ended(self) -> None:
        for child in self._starting():
            if child.first_end.is_set():
                words = child.last_words.removeprefix("headrace: ") or f"it ended with exit code {child.exit_code}"
                kind = ConfigError if child.exit_code == 2 else HeadraceError
                raise kind(f"{child.name} did not start: {words}")


@contextlib.asynccontextmanager
async def running_stack(
    settings: Settings, plan: Plan, *, on_line: Callable[[str, str], None], on_step: Callable[[str], None]
) -> AsyncIterator[Stack]:
    """Start broker (unless `nats_url` names one), router, monitor, workers and gateway; keep them running in the block.

    After it workers and gateway have drained within the grace period, then router and monitor have ended, the broker
    last.
    If this process is killed, the kernel ends them all (Linux); workers are told to drain. `on_line` gets the name of a
    part and a line it printed, `on_step` what is being done. Raises HeadraceError, perhaps in an exception group.
    """
    async with contextlib.AsyncExitStack() as stack:
        info: BrokerInfo | None = None
        guard: Guard | None = None
        if settings.nats_url is None:
            on_step("starting the broker")
            if plan.is_secure:
                guard = Guard(settings, model=plan.model, num_workers=plan.num_workers)
                settings = guard.operator_settings
            directory = guard.directory if guard is not None else None
            broker = SupervisedBroker(Path(settings.state_dir), port=settings.broker_port, directory=directory)
            info = await stack.enter_async_context(broker.running())
        url = settings.nats_url or (info.url if info is not None else "")
        on_step("connecting")
        inbox_prefix = service_inbox("operator")
        bus = await stack.enter_async_context(connect(url, settings, name="headrace-up", inbox_prefix=inbox_prefix))
        await ensure_provisioned(bus)
        if guard is not None:  # no worker may make a stream there
            await ensure_jobs_stream(bus, plan.model)
        on_step("starting router and monitor")
        env = _environment(settings, url, plan)
        services = [
            _service("router", _guarded(env, guard, ROUTER), on_line),
            _service("monitor", _with_notices(_guarded(env, guard, MONITOR), info, plan), on_line),
        ]
        for service in reversed(services):  # so that the router stops first
            await stack.enter_async_context(_kept([service]))
        on_step(f"starting {plan.num_workers} worker(s) with engine {plan.engine}")
        workers = [_worker(number, settings, plan, env, guard, on_line) for number in range(1, plan.num_workers + 1)]
        http_env = _guarded(env, guard, GATEWAY)
        edge = [_gateway(settings, plan.http_port, http_env, on_line)] if plan.http_port is not None else []
        group = await stack.enter_async_context(_kept(workers, edge))

        def add_worker() -> Supervised:
            worker = _worker(len(workers) + 1, settings, plan, env, guard, on_line)
            workers.append(worker)
            group.create_task(worker.run(), name=worker.name)
            return worker

        on_step(f"waiting for {plan.model}")
        yield Stack(bus, url, plan, [*services, *edge], workers, add_worker)
        on_step("stopping")


@contextlib.asynccontextmanager
async def _kept(*lists: list[Supervised]) -> AsyncIterator[asyncio.TaskGroup]:
    """Keep children running inside the block; stopped together, all of them ended after it.

    Who adds a child to a list inside the block runs it in the group.
    """
    async with asyncio.TaskGroup() as group:
        for child in itertools.chain(*lists):
            group.create_task(child.run(), name=child.name)
        try:
            yield group
        finally:
            for child in itertools.chain(*lists):
                child.stop.set()


def _environment(settings: Settings, url: str, plan: Plan) -> dict[str, str]:
    ours = {
        "HEADRACE_NATS_URL": url,
        "HEADRACE_PREFIX": settings.prefix,
        "HEADRACE_STATE_DIR": settings.state_dir,
        "HEADRACE_LOG_LEVEL": settings.log_level,
        "HEADRACE_MONITOR_PORT": str(settings.monitor_port),
    }
    if plan.temp_dir is not None:
        ours["TMPDIR"] = plan.temp_dir
    return {**os.environ, **ours}


def _with_notices(env: Mapping[str, str], info: BrokerInfo | None, plan: Plan) -> dict[str, str]:
    """A monitor's environment: with the embedded broker's system account, or without any; as it is with any other."""
    if info is None:
        return dict(env)
    given = {_SYSTEM_URL: info.system_url} if plan.has_notices and info.system_url else {}
    return {name: value for name, value in env.items() if name != _SYSTEM_URL} | given


def _guarded(env: Mapping[str, str], guard: Guard | None, member: Member) -> dict[str, str]:
    """A part's environment with its own credential, where it needs one."""
    return dict(env) | (guard.credentials_of(member) if guard is not None else {})


def _service(name: str, env: Mapping[str, str], on_line: Callable[[str, str], None]) -> Supervised:
    return Supervised(
        name,
        [*_COMMAND, "serve", name],
        env=env,
        stop_timeout_s=_STOP_TIMEOUT_S,
        death_signal=signal.SIGKILL,
        on_line=on_line,
    )


def _gateway(settings: Settings, port: int, env: Mapping[str, str], on_line: Callable[[str, str], None]) -> Supervised:
    return Supervised(
        "gateway",
        [*_COMMAND, "serve", "gateway"],
        env={**env, "HEADRACE_HTTP_HOST": settings.http_host, "HEADRACE_HTTP_PORT": str(port)},
        stop_timeout_s=settings.grace_s + _STOP_MARGIN_S,
        death_signal=signal.SIGKILL,
        on_line=on_line,
    )


def _worker(
    number: int,
    settings: Settings,
    plan: Plan,
    env: Mapping[str, str],
    guard: Guard | None,
    on_line: Callable[[str, str], None],
) -> Supervised:
    is_only = number == plan.num_workers == 1
    worker_id = settings.worker_id
    if worker_id is not None and not is_only:
        worker_id = f"{worker_id}-{number}"
    if guard is not None:
        member = guard.worker(number)
        worker_id, env = member.worker, _guarded(env, guard, member)
    name = "worker" if is_only else f"worker-{number}"
    return Supervised(
        name,
        [*_COMMAND, *plan.worker_argv(worker_id)],
        env=env,
        stop_timeout_s=settings.grace_s + _STOP_MARGIN_S,
        death_signal=signal.SIGTERM,
        on_line=on_line,
    )
