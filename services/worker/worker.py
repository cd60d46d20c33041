"""A worker process: one engine, one registration, as many requests as the engine's memory carries."""

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from functools import partial
from typing import Final

import msgspec

from headrace.bus.configuration import ConfigView
from headrace.bus.connection import Bus, Message, keep_clock
from headrace.bus.consumers import require_own_consumers
from headrace.bus.joblog import JobLog
from headrace.bus.jobqueue import Delivery, JobQueue
from headrace.bus.provision import ensure_jobs_stream, ensure_provisioned
from headrace.bus.services import answering
from headrace.discipline.affinity import RecentPrefixes
from headrace.discipline.room import UNLIMITED_TOKENS, Room, fetchable_tokens, num_fetchable
from headrace.errors import BrokerError, BrokerUnavailableError
from headrace.lifecycle import Backoff, unless_stopped, wait_first
from headrace.schemas.events import Owner
from headrace.schemas.subjects import DEFAULT_POOL, QueueName
from headrace.schemas.workers import Heartbeat, WorkerNudge, WorkerState
from headrace.worker.capacity import KvCapacity
from headrace.worker.engines.base import Engine
from headrace.worker.gate import Gate
from headrace.worker.handling import Handler
from headrace.worker.held import HeldSet
from headrace.worker.ledger import Ledger
from headrace.worker.memory import shared_folder
from headrace.worker.memorywatch import MemoryWatch
from headrace.worker.neighbours import Neighbours
from headrace.worker.pause import Pause
from headrace.worker.probe import Prober
from headrace.worker.puller import Puller
from headrace.worker.pulse import Pulse
from headrace.worker.supervision import Supervisor
from headrace.worker.tokenizing import tokenize_endpoint
from headrace.worker.wellbeing import Wellbeing

__all__ = ["Worker", "WorkerOptions", "run_worker"]

log = logging.getLogger(__name__)

_STOP_AGAIN_S: Final = 0.1
_MAX_WAITERS: Final = 4
"""Requests held that do not fit now, so that smaller ones behind them are found."""
_MAX_REASON_CHARS: Final = 500
_MAX_KEPT_BACK: Final = 128
"""Requests kept back at once. They take no room, so nothing else would end the fetching of more."""
_MAX_KEPT_BACK_TO_BORROW: Final = 64
"""The same for other pools' requests, so that those cannot keep a worker from its own."""


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told beside the settings. None: what the engine says."""

    worker: str
    model: str
    pool: str = DEFAULT_POOL
    max_concurrency: int | None = None
    kv_tokens: int | None = None


async def run_worker(bus: Bus, engine: Engine, options: WorkerOptions, *, stop: asyncio.Event) -> None:
    """Run one worker until `stop` is set and what it held is finished or handed back.

    Raises EngineStartError where the engine does not come up at all, BrokerError where the connection is gone for good
    or the job stream has somebody else's consumer.
    """
    if await unless_stopped(_provision(bus, options), stop):
        await Worker(bus, engine, options).run(stop)


async def _provision(bus: Bus, options: WorkerOptions) -> None:
    await ensure_provisioned(bus)
    await ensure_jobs_stream(bus, options.model)
    with contextlib.suppress(BrokerUnavailableError):  # the first fetch tells too
        await require_own_consumers(bus, options.model, wanted=QueueName(pool=options.pool))


class Worker:
    """Holds the parts of a worker together; each of them knows only what it needs."""

    def __init__(self, bus: Bus, engine: Engine, options: WorkerOptions) -> None:
        self._bus = bus
        self._settings = bus.settings
        self._engine = engine
        self._options = options
        self._state: WorkerState = "Starting"
        self._reason = ""
        self._is_draining = False
        self._has_warned = False
        self._told_tokens = 0
        self._ledger = Ledger(capacity_tokens=options.kv_tokens, max_concurrency=options.max_concurrency or 1)
        self._heart = Pulse(
            bus,
            options.worker,
            compose=self._beat,
            new_epoch=lambda: uuid.uuid4().hex[:12],
            on_lost=self._on_lost,
            on_fresh=self._on_fresh,
            stuck_after_s=self._settings.stall_s,
        )
        self._held = HeldSet(self._heart.changed)
        self._capacity = KvCapacity(
            self._ledger,
            self._held,
            told_tokens=options.kv_tokens,
            name=options.worker,
            shared_folder=shared_folder(self._settings.state_dir),
        )
        self._view = ConfigView(bus)
        self._gate = Gate(self._ledger, ageing_s=self._settings.ageing_s, on_change=self._room_changed)
        self._pause = Pause(self._view, options.model, self._gate)
        self._neighbours = Neighbours(bus, worker=options.worker, model=options.model)
        self._wellbeing = Wellbeing()
        self._prober = Prober(engine, model=options.model, held=self._held, timeout_s=self._settings.stall_s)
        self._memory = MemoryWatch(engine, held=self._held, wellbeing=self._wellbeing)
        self._supervisor = Supervisor(
            engine,
            model=options.model,
            held=self._held,
            gate=self._gate,
            wellbeing=self._wellbeing,
            prober=self._prober,
            stall_s=self._settings.stall_s,
            grace_s=self._settings.grace_s,
            adopt=self._adopt_facts,
            say=self._say_state,
            has_peers=self._has_peers,
        )
        self._served = RecentPrefixes()
        self._queue = JobQueue(bus, options.model, on_late=self._on_late)
        self._log = JobLog(bus)
        self._handler = Handler(
            bus,
            queue=self._queue,
            pool=options.pool,
            servers_of=lambda pool: self._view.config.model(options.model).servers_of(pool),
            engine=engine,
            gate=self._gate,
            served=self._served,
            wellbeing=self._wellbeing,
            neighbours=self._neighbours,
            held=self._held,
            identity=self._identity,
            beat_settled=self._heart.settled,
            room_changed=self._room_changed,
            is_full=self._is_full,
            settle_doubt=self._supervisor.settle_doubt,
            refund=self._refund,
            undo=self._undo,
            leave_to_another=self._leave_to_another,
        )
        self._puller = Puller(
            bus,
            self._queue,
            worker=options.worker,
            pool=options.pool,
            fetchable_tokens=self._fetchable_tokens,
            num_fetchable=self._num_fetchable,
            may_borrow=lambda: self._held.num_kept_back < _MAX_KEPT_BACK_TO_BORROW and not self._handler.num_aside,
            is_idle=lambda: not len(self._held),
            has_room_for_two=self._has_room_for_two,
            take=self._take,
            ageing_s=self._settings.ageing_s,
            config=lambda: self._view.config,
        )
        self._group: asyncio.TaskGroup | None = None
        self._nudged = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Register, start the engine, work until `stop`, drain, leave."""
        try:
            if not await unless_stopped(self._heart.start(), stop):
                return
            log.info(
                "worker %s registered for model %s, starting its engine", self._options.worker, self._options.model
            )
            try:
                await self._run_registered(stop)
            finally:
                await self._engine.stop()
                self._capacity.close()
        finally:
            await self._heart.stop()

    async def _run_registered(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            background = [
                group.create_task(self._heart.refresh_for_ever(), name="beat figures"),
                group.create_task(
                    self._held.renew_for_ever(self._queue, ack_wait_s=self._settings.ack_wait_s), name="renewals"
                ),
                group.create_task(self._supervisor.watch(), name="watchdog"),
                group.create_task(
                    self._gate.marks.follow(self._engine, is_up=self._is_up, changed=self._marks_passed), name="usage"
                ),
                group.create_task(
                    self._capacity.follow(is_up=self._is_up, changed=self._marks_passed), name="free memory"
                ),
                group.create_task(keep_clock(self._bus), name="clock"),
            ]
            if probe_s := self._settings.probe_s:
                ill = self._supervisor.note_illness
                background += [
                    group.create_task(
                        self._prober.follow(probe_s, is_up=self._is_up, failed=partial(ill, "probe")), name="probes"
                    ),
                    group.create_task(
                        self._memory.follow(probe_s, is_up=self._is_up, grows=partial(ill, "memory")), name="growth"
                    ),
                ]
            try:
                await self._work(group, stop)
            finally:
                for task in background:
                    task.cancel()

    async def _work(self, group: asyncio.TaskGroup, stop: asyncio.Event) -> None:
        starting = group.create_task(self._supervisor.start(), name="engine start")
        stopping = group.create_task(stop.wait(), name="stop")
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            return
        await starting
        await self._adopt_facts()
        supervising = group.create_task(self._supervisor.run(), name="engine")
        ctl = await self._bus.subscribe(self._bus.names.ctl(self._options.worker), cb=self._on_nudge)
        self._bus.on_reconnect.append(self._on_reconnect)
        metadata = {"worker": self._options.worker, "model": self._options.model}
        try:
            async with (
                self._queue,
                self._view.running(may_come_later=True),
                answering(
                    self._bus,
                    "headrace-worker",
                    [tokenize_endpoint(self._bus, self._options.model, self._engine)],
                    description="runs requests on an inference engine",
                    metadata=metadata,
                ),
            ):
                self._set_state("Ready", self._pause.look())
                pausing = group.create_task(self._pause.follow(changed=self._room_changed), name="pause")
                pulling = group.create_task(self._puller.run(), name="pull")
                facts = self._engine.facts
                log.info("worker %s is ready: engine %s %s", self._options.worker, facts.name, facts.version)
                await wait_first(stop, self._bus.closed, self._nudged, self._heart.failed)
                if self._heart.failure is not None:
                    raise self._heart.failure
                if self._bus.closed.is_set():
                    raise BrokerUnavailableError("the connection to the broker was closed for good")
                await self._drain(pulling)
                pausing.cancel()
        finally:
            supervising.cancel()
            if not self._bus.nc.is_closed:
                await ctl.unsubscribe()

    async def _drain(self, pulling: asyncio.Task[None]) -> None:
        """Fetch nothing more, finish what fits in the grace period, hand the rest back."""
        self._is_draining = True
        self._set_state("Draining")
        self._puller.stop()
        await pulling
        self._handler.drain()
        if len(self._held):
            log.info("draining: %d requests have %.0f s to finish", len(self._held), self._settings.grace_s)
            if not await wait_first(self._held.became_empty, timeout_s=self._settings.grace_s):
                await self._hand_the_rest_back()
        log.info("drained")

    async def _hand_the_rest_back(self) -> None:
        """Stop what runs, and what starts to run meanwhile, until nothing is held or the broker does not answer."""
        waits = Backoff(first_s=_STOP_AGAIN_S, max_s=_STOP_AGAIN_S, for_s=self._settings.retry_for_s)
        while len(self._held) and not waits.is_over:
            for execution in self._held.executions():
                execution.stop("drain")
            await wait_first(self._held.became_empty, timeout_s=_STOP_AGAIN_S)

    async def _has_peers(self) -> bool | None:
        others = await self._neighbours.of_pools((self._options.pool,))
        return None if others is None else any(other.state in ("Ready", "Busy") for other in others)

    # what it can take

    def _is_up(self) -> bool:
        return self._state in ("Ready", "Busy")

    def _marks_passed(self) -> None:
        self._gate.look()
        self._room_changed()

    def _fetchable_tokens(self) -> int:
        """KV tokens that a job fetched now may need to start at once; 0: fetch nothing."""
        return self._startable_tokens() if self._heart.is_fresh else 0

    def _startable_tokens(self) -> int:
        """The same whether or not our beats come through, for the beat itself."""
        if not self._is_up() or not self._pause.may_start or self._held.num_kept_back >= _MAX_KEPT_BACK:
            return 0
        return fetchable_tokens(
            self._promised_room(), self._gate.waiters, ageing_s=self._settings.ageing_s, max_waiters=_MAX_WAITERS
        )

    def _is_full(self) -> bool:
        """Whether nothing more starts beside what has its place, whatever was fetched."""
        return not self._is_up() or not fetchable_tokens(
            self._gate.room, self._gate.waiters, ageing_s=self._settings.ageing_s, max_waiters=_MAX_WAITERS
        )

    def _num_fetchable(self, limit: int) -> int:
        """How many jobs may be fetched at once, were each as large as the largest held; with none held, one."""
        return num_fetchable(
            self._promised_room(),
            self._gate.waiters,
            need_tokens=max((held.need_tokens for held in self._held), default=UNLIMITED_TOKENS),
            limit=limit,
            ageing_s=self._settings.ageing_s,
            max_waiters=_MAX_WAITERS,
        )

    def _has_room_for_two(self) -> bool:
        """Whether a job that nobody chose would leave room for another, were neither larger than usual."""
        number = num_fetchable(
            self._promised_room(),
            self._gate.waiters,
            need_tokens=self._settings.default_max_tokens,
            limit=2,
            ageing_s=self._settings.ageing_s,
            max_waiters=_MAX_WAITERS,
        )
        return number == 2

    def _promised_room(self) -> Room:
        """The room beside what runs and what was fetched: where its exact need is not known yet, the router's estimate
        counts.
        """
        room = self._gate.room
        for held in self._held:
            if not held.is_waiting and not held.is_backing_off and held not in self._gate:
                room = room.with_one_more(held.need_tokens)
        return room

    def _take(self, delivery: Delivery) -> None:
        assert self._group is not None
        held = self._handler.hold(delivery)  # now, so that the next look at our room counts it
        self._group.create_task(self._handler.handle(delivery, held), name=f"message {delivery.sequence}")

    async def _on_late(self, delivery: Delivery) -> None:
        if self._fetchable_tokens():
            self._take(delivery)
        else:
            await self._queue.hand_on(delivery)

    def _refund(self, queue: QueueName, tokens: int) -> None:
        self._puller.refund(queue, tokens)

    def _undo(self, queue: QueueName, tokens: int) -> None:
        self._puller.undo(queue, tokens)

    def _leave_to_another(self, delivery: Delivery) -> None:
        self._puller.leave_to_another(delivery)

    def _room_changed(self) -> None:
        if self._is_up():
            self._set_state("Ready" if self._has_slots() else "Busy", self._pause.reason or self._gate.marks.reason)
        if self._startable_tokens() != self._told_tokens:
            self._heart.changed()
        self._handler.look()
        self._puller.look()

    def _has_slots(self) -> bool:
        return self._gate.room.fits(1) and not self._held.num_waiting

    async def _on_reconnect(self) -> None:
        self._heart.changed()
        self._puller.look()

    # who it is

    def _identity(self, queue_sequence: int) -> Owner:
        return Owner(
            worker=self._options.worker,
            epoch=self._heart.epoch,
            queue_sequence=queue_sequence,
            beat=self._heart.revision,
            engine_run=self._supervisor.engine_run,
        )

    def _set_state(self, state: WorkerState, reason: str = "") -> None:
        if self._is_draining and state != "Failed":  # whatever its engine does, it takes nothing more
            state = "Draining"
        reason = reason[:_MAX_REASON_CHARS]
        if (state, reason) != (self._state, self._reason):
            self._state, self._reason = state, reason
            self._heart.changed()

    def _say_state(self, state: WorkerState, reason: str = "") -> None:
        self._set_state(state, reason or (self._pause.reason if state == "Ready" else ""))
        self._puller.look()

    async def _adopt_facts(self) -> None:
        self._ledger.max_concurrency = self._options.max_concurrency or self._engine.facts.max_num_seqs or 1
        await self._capacity.adopt(self._engine)
        self._gate.look()

    def _beat(self) -> Heartbeat:
        is_started = self._state != "Starting"
        facts = self._engine.facts if is_started else None
        self._told_tokens = self._startable_tokens()
        return Heartbeat(
            worker=self._options.worker,
            epoch=self._heart.epoch,
            state=self._state,
            model=self._options.model,
            version=facts.version if facts is not None else "",
            engine=facts.name if facts is not None else "",
            pool=self._options.pool,
            host=socket.gethostname(),
            pid=os.getpid(),
            port=facts.port if facts is not None else None,
            **self._capacity.as_beat(),
            kv_reserved_tokens=self._ledger.reserved_tokens,
            block_size=facts.block_size if facts is not None else 1,
            max_model_len=facts.max_model_len if facts is not None else None,
            max_concurrency=self._ledger.max_concurrency,
            effective_concurrency=self._effective_concurrency(),
            running=self._held.num_running,
            waiting=self._held.num_waiting,
            faulted=self._gate.num_faulted,
            unproven=self._gate.num_unproven,
            interval_s=self._settings.heartbeat_s,
            seconds_per_job=self._handler.seconds_per_job,
            reason=self._reason,
            prefixes=tuple(self._served),
            held=tuple(held.as_request() for held in self._held),
            fetchable_tokens=self._told_tokens,
            health=self._supervisor.health,
        )

    def _effective_concurrency(self) -> int:
        effective = self._gate.effective_concurrency(default_need_tokens=self._settings.default_max_tokens)
        if effective < self._ledger.max_concurrency and self._is_up() and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%d requests may run at once, but memory (%s KV tokens) carries about %d of the usual size",
                self._ledger.max_concurrency, self._ledger.capacity_tokens, effective,
            )  # fmt: skip
        return effective

    def _on_lost(self) -> None:
        self._held.void_all()
        self._puller.look()

    def _on_fresh(self) -> None:
        self._puller.look()

    # what is done to it

    async def _on_nudge(self, message: Message) -> None:
        try:
            nudge = msgspec.json.decode(message.data, type=WorkerNudge)
        except (msgspec.DecodeError, RecursionError):
            log.warning("an undecodable nudge was ignored")
            return
        if nudge.kind == "evicted":
            self._heart.changed()  # the next beat is refused, and we know
        elif nudge.kind == "drain":
            self._nudged.set()
        elif nudge.kind == "wake":
            queue = QueueName.from_consumer(nudge.consumer or "")
            if queue is not None:
                await self._puller.wake(queue)
        elif nudge.kind == "interrupted":
            queue = QueueName.from_consumer(nudge.consumer or "")
            if queue is not None:
                self._puller.note_interrupted(queue, nudge.number, share=nudge.share)
        elif nudge.kind == "restart":
            is_ours = (nudge.epoch, nudge.engine_run) == (self._heart.epoch, self._supervisor.engine_run)
            if is_ours and nudge.ailment is not None and self._is_up():
                self._supervisor.note_illness(nudge.ailment, nudge.reason[:_MAX_REASON_CHARS])
        elif nudge.tenant and nudge.job:
            await self._check_ended(nudge.tenant, nudge.job)

    async def _check_ended(self, tenant: str, job: str) -> None:
        # The nudge is a hint; the log says whether the job ended.
        try:
            last = await self._log.last(tenant, job)
        except BrokerError as error:
            log.warning("cannot check job %s: %s", job, error)
            return
        if last is not None and last.is_terminal:
            for held in self._held.of_job(tenant, job):
                if held.execution is not None:
                    held.execution.stop("ended")
