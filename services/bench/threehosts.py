"""Three host agents with unequal memory, two models, a mixed load, and faults: the real run behind the promises."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Final

from headrace.bench.ground import Ground, ground
from headrace.bench.mixedload import CHAT_MODEL, SUMMARY_MODEL, Kind, Sent, planned, send
from headrace.bench.promises import Fault, Look, Run
from headrace.bus.configuration import ConfigView
from headrace.bus.heartbeats import WorkersView
from headrace.bus.instances import InstancesView
from headrace.bus.joblog import JobLog
from headrace.bus.provision import ensure_jobs_stream
from headrace.cli.entries import write_entry
from headrace.cli.progress import Progress
from headrace.cli.supervising import Supervised
from headrace.discipline.replicas import wanted_replicas
from headrace.errors import HeadraceError
from headrace.schemas.config import ModelConfig
from headrace.schemas.config_text import key_of
from headrace.schemas.instances import GroupName
from headrace.schemas.replicas import Autoscale, ReplicaGroup
from headrace.schemas.states import TERMINAL
from headrace.schemas.workers import Heartbeat
from headrace.settings import Settings

__all__ = ["HOSTS_GIB", "MODELS", "play_three_hosts"]

HOSTS_GIB: Final[Mapping[str, int]] = {"host-a": 2, "host-b": 4, "host-c": 6}
"""What each host lends to workers."""

_FULL_MODEL: Final = "full"
_FULL_LIMIT: Final = 5
_FULL_SENT: Final = 12
_FULL: Final = Kind(
    name="unserved", model=_FULL_MODEL, lane="normal", prompt_words=10, tokens=(8, 8), at_start=_FULL_SENT, deadline_s=8
)
"""Requests for a model that nobody serves and whose queue holds few: most are refused, the others run out of time."""

MODELS: Final[Mapping[str, ModelConfig]] = {
    CHAT_MODEL: ModelConfig(
        instances=(
            ReplicaGroup(
                engine="sim",
                args=("--max-concurrency", "8", "-o", "kv_tokens=4096", "-o", "tokens_per_second=25"),
                memory_mib=1024,
                uses="host",
                replicas=2,
                autoscale=Autoscale(
                    min_replicas=2,
                    max_replicas=4,
                    target_wait_s=2.0,
                    idle_s=20.0,
                    up_cooldown_s=5.0,
                    down_cooldown_s=10.0,
                ),
            ),
        )
    ),
    SUMMARY_MODEL: ModelConfig(
        instances=(
            ReplicaGroup(
                engine="sim",
                args=("--max-concurrency", "4", "-o", "kv_tokens=16384", "-o", "tokens_per_second=20"),
                memory_mib=2048,
                uses="host",
                replicas=2,
            ),
        )
    ),
    _FULL_MODEL: ModelConfig(queue_limit=_FULL_LIMIT),
}

_COMMAND: Final = (sys.executable, "-P", "-m", "headrace.cli")
_HOST_STOP_S: Final = 20.0
_READY_WITHIN_S: Final = 120.0
_LOOK_EVERY_S: Final = 0.1
_HUNG_FOR_S: Final = 6.0
_ENDS_WITHIN_S: Final = 300.0


async def play_three_hosts(settings: Settings, progress: Progress, *, duration_s: float, seed: int) -> Run:
    """Send the load for so long, lose a worker, a hung one and a host on the way, and read all to the end.

    Raises HeadraceError where the replicas do not come up, or requests do not end.
    """
    async with ground(settings, progress, options={}, num_workers=0) as field, _Hosts(field) as hosts:
        await _configure(field)
        for host in HOSTS_GIB:
            hosts.start(host)
        async with _watching(field) as watch:
            progress.say("waiting for the replicas")
            await watch.until_ready({CHAT_MODEL: 2, SUMMARY_MODEL: 2})
            requests = planned(duration_s, seed=seed)
            requests += [(0.2 * duration_s, sent) for _, sent in planned(0, seed=seed, kinds=(_FULL,))]
            watch.begin()
            async with asyncio.timeout(duration_s + _ENDS_WITHIN_S), asyncio.TaskGroup() as group:
                looking = group.create_task(watch.look_for_ever(), name="look")
                sending = [
                    group.create_task(send(field.client, sent, after_s=at_s, number=number), name=f"request {number}")
                    for number, (at_s, sent) in enumerate(requests)
                ]
                faults = await _spoil(watch, hosts, [sent for _, sent in requests], duration_s, progress)
                progress.say("waiting for the last answers")
                await asyncio.wait(sending)
                looking.cancel()
            sent = [each for _, each in requests]
            return Run(sent=sent, terminals=await _terminals(field, sent), faults=faults, looks=watch.looks)


async def _configure(field: Ground) -> None:
    for model, entry in MODELS.items():
        await write_entry(field.client.bus, key_of("models", model), entry, expected_revision=0)
        await ensure_jobs_stream(field.client.bus, model)


class _Hosts:
    """The agents, each a process that is killed with this one."""

    def __init__(self, field: Ground) -> None:
        self._env = {
            **os.environ,
            "HEADRACE_NATS_URL": field.stack.url,
            "HEADRACE_PREFIX": field.settings.prefix,
            "HEADRACE_STATE_DIR": field.settings.state_dir,
            "HEADRACE_LOG_LEVEL": field.settings.log_level,
        }
        self.lines: deque[str] = deque(maxlen=40)
        self._running: dict[str, Supervised] = {}
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> "_Hosts":
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for agent in self._running.values():
            agent.stop.set()
        await self._group.__aexit__(*exc_info)  # type: ignore[arg-type]  # what it was given

    def start(self, host: str) -> None:
        """Start an agent; it is not started again when it ends."""
        agent = Supervised(
            host,
            [*_COMMAND, "serve", "host", "--host-id", host, "--memory", f"{HOSTS_GIB[host]}GiB"],
            env=self._env,
            stop_timeout_s=_HOST_STOP_S,
            death_signal=signal.SIGTERM,
            on_line=lambda name, line: self.lines.append(f"{name} {line}"),
        )
        self._running[host] = agent
        self._group.create_task(agent.run(), name=host)

    async def kill(self, host: str) -> None:
        """SIGKILL an agent, and wait until it is gone."""
        agent = self._running[host]
        agent.kill()
        await agent.ended.wait()


class _Watch:
    """What is seen of the workers from outside."""

    def __init__(self, workers: WorkersView, instances: InstancesView, config: ConfigView) -> None:
        self._workers = workers
        self._instances = instances
        self._config = config
        self._began = time.monotonic()
        self.looks: list[Look] = []

    def begin(self) -> None:
        """Seconds count from now."""
        self._began = time.monotonic()

    async def until_s(self, at_s: float) -> None:
        """Wait until so many seconds have passed."""
        await asyncio.sleep(max(0.0, self._began + at_s - time.monotonic()))

    async def until_ready(self, wanted: Mapping[str, int]) -> None:
        """Wait until each model has so many workers. Raises HeadraceError if it takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READY_WITHIN_S):
                while any(len(self.ready(model)) < number for model, number in wanted.items()):
                    self._workers.changed.clear()
                    await self._workers.changed.wait()
                return
        raise HeadraceError(f"the replicas were not ready within {_READY_WITHIN_S:g} s")

    def ready(self, model: str) -> list[Heartbeat]:
        """Workers of a model that take requests."""
        beats = self._workers.beats.values()
        return [beat for beat in beats if beat.model == model and beat.state in ("Ready", "Busy")]

    def busiest(self, model: str, *, but: tuple[str, ...] = ()) -> Heartbeat | None:
        """The one of them that runs the most."""
        return max(
            (beat for beat in self.ready(model) if beat.worker not in but), key=lambda beat: beat.running, default=None
        )

    def host_with_most(self) -> str:
        """The host with the most leases."""
        hosts = [slot.host for slot in self._instances.slots.values()]
        return max(HOSTS_GIB, key=hosts.count)

    def workers_of(self, host: str) -> tuple[str, ...]:
        """Ids of the workers that a host's leases name."""
        return tuple(slot.worker for slot in self._instances.slots.values() if slot.host == host and slot.worker)

    async def look_for_ever(self) -> None:
        """Note what there is, ten times a second."""
        while True:
            beats = list(self._workers.beats.values())
            shares = [beat.kv_reserved_tokens / beat.kv_capacity_tokens for beat in beats if beat.kv_capacity_tokens]
            served = [model for model, entry in MODELS.items() if entry.instances]
            self.looks.append(
                Look(
                    at_s=time.monotonic() - self._began,
                    ready={model: len(self.ready(model)) for model in served},
                    wanted={model: self._wanted(model) for model in served},
                    num_workers=len(beats),
                    fullest=max(shares, default=0.0),
                )
            )
            await asyncio.sleep(_LOOK_EVERY_S)

    def _wanted(self, model: str) -> int:
        groups = self._config.config.model(model).instances
        return sum(wanted_replicas(group, self._instances.scales.get(GroupName(model, group.pool))) for group in groups)


@contextlib.asynccontextmanager
async def _watching(field: Ground) -> AsyncIterator[_Watch]:
    bus = field.client.bus
    workers, instances, config = WorkersView(bus), InstancesView(bus), ConfigView(bus)
    async with workers.running(), instances.running(), config.running():
        yield _Watch(workers, instances, config)


async def _spoil(watch: _Watch, hosts: _Hosts, sent: list[Sent], duration_s: float, progress: Progress) -> list[Fault]:
    """A worker is killed, another stopped for a while, the fullest host's agent killed and started again."""
    faults: list[Fault] = []
    await watch.until_s(0.25 * duration_s)
    victim = await _running_worker(watch, CHAT_MODEL, sent)
    progress.say(f"killing worker {victim.worker}")
    faults.append(Fault(kind="worker killed", who=victim.worker, at=time.monotonic(), workers=(victim.worker,)))
    os.kill(victim.pid, signal.SIGKILL)
    await watch.until_s(0.45 * duration_s)
    hung = await _running_worker(watch, SUMMARY_MODEL, sent)
    progress.say(f"stopping worker {hung.worker} for {_HUNG_FOR_S:g} s")
    faults.append(Fault(kind="worker stopped", who=hung.worker, at=time.monotonic(), workers=(hung.worker,)))
    os.kill(hung.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(_HUNG_FOR_S)
    finally:
        with contextlib.suppress(ProcessLookupError):  # its agent gave it up meanwhile
            os.kill(hung.pid, signal.SIGCONT)
    await watch.until_s(0.65 * duration_s)
    host = watch.host_with_most()
    progress.say(f"killing the agent of {host}")
    faults.append(Fault(kind="host killed", who=host, at=time.monotonic(), workers=watch.workers_of(host)))
    await hosts.kill(host)
    await watch.until_s(0.85 * duration_s)
    progress.say(f"starting the agent of {host} again")
    hosts.start(host)
    await watch.until_s(duration_s)
    return faults


async def _running_worker(watch: _Watch, model: str, sent: list[Sent]) -> Heartbeat:
    """A worker of the model that streams to somebody now, as its readers see it. Raises HeadraceError."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(30.0):
            while True:
                streaming = [
                    each.watched.starts[-1].worker
                    for each in sent
                    if not each.end and each.watched.starts and each.watched.num_tokens
                ]
                for beat in watch.ready(model):
                    if beat.worker in streaming and beat.pid:
                        return beat
                await asyncio.sleep(0.05)
    raise HeadraceError(f"no worker of {model} was streaming when one was to be lost")


async def _terminals(field: Ground, sent: list[Sent]) -> dict[str, int]:
    log = JobLog(field.client.bus)
    found: dict[str, int] = {}
    for each in sent:
        if not each.is_refused:
            events = await log.read(field.client.tenant, each.job)
            found[each.job] = sum(event.kind in TERMINAL for event in events)
    return found
