"""How long each request waits beside a worker that could run it, as `docs/discipline.md` defines the two.

Everything is read off the ledgers, lists and processes themselves, not off what they say of themselves.
"""

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from headrace.schemas import subjects
from headrace.schemas.subjects import DEFAULT_POOL, Names, QueueName
from headrace.schemas.workers import decode_heartbeat
from headrace.worker.held import Held
from tests.simulation.broker import Stored
from tests.simulation.schedule import MODEL

if TYPE_CHECKING:
    from tests.simulation.world import Part, World

__all__ = ["IdleWatch"]

_MAX_WAITERS: Final = 4
_LOST_HINT_S: Final = 0.15
"""What each lost wake of its queue may cost: a look around."""

ANY_WORKER: Final = "any"

Standing = Literal["waits", "is held", "is moving", "runs", "rests", "hangs", "is lost"]


class _Place(msgspec.Struct, frozen=True):
    """Where a job is. `holder` is the live worker that lists it.

    waits: the broker would give it to whoever asks. is held: fetched by a worker where it does not fit. is moving: on
    its way to a worker, or just taken in by one. runs: it has its place in the memory of one that lives. rests: kept
    back for a while after a fault. hangs: held by a worker that hangs. is lost: in flight, and no process holds it.
    """

    standing: Standing
    holder: "Part | None" = None


class _Clock:
    """How long a job has waited beside a worker; `num_lost` hints about its queue had been lost when it began."""

    def __init__(self, num_lost: int) -> None:
        self.idle_s = 0.0
        self.num_lost = num_lost


class IdleWatch:
    """Adds up each job's time beside each worker, or beside any, and says so where it becomes too long.

    Time in which a job is moving counts for nothing and ends nothing, so one that is handed to and fro is seen.
    """

    def __init__(self, world: "World") -> None:
        self._world = world
        self._counts_any = world.scenario.counts_any
        self._clocks: dict[str, dict[str, _Clock]] = {}
        self._lost_s: dict[str, float] = {}
        self.longest_idle_s = 0.0
        self.longest_lost_s = {True: 0.0, False: 0.0}
        """By whether it was listed."""

    def look(self, since: float, until: float) -> None:
        """Things are as they are now from one moment to the other."""
        world = self._world
        self._check_ledgers()
        queue = world.broker.streams.get(Names().jobs_stream(MODEL))
        if queue is None or world.is_over:
            return
        if world.faults.outage:
            self._clocks.clear()
            self._lost_s.clear()
            return
        listed = {
            held.delivery.sequence: (part, held)
            for part in sorted(self._workers(), key=self._is_out, reverse=True)  # those that live have the last word
            if part.worker is not None
            for held in part.worker._held
        }
        waiting = self._waiting_pools()
        for message in list(queue.live.values()):
            job = message.headers[subjects.HDR_JOB]
            state = world.check.states.get(job)
            if state is not None and state.is_terminal:
                continue
            place = self._place(message, *listed.get(message.seq, (None, None)))
            self._count(job, message, place, waiting, until - since)

    def _count(self, job: str, message: Stored, place: _Place, waiting: set[str], for_s: float) -> None:
        if place.standing in ("is lost", "hangs"):
            self._count_lost(job, message, place, for_s)
            return
        self._lost_s.pop(job, None)
        if place.standing == "is moving":
            return
        queue = QueueName.from_subject(message.subject)
        able = self._able(job, queue, place, waiting) if queue is not None else []
        num_lost = self._num_hints_lost(queue)
        clocks = self._clocks.setdefault(job, {})
        beside = [ANY_WORKER] if able and self._counts_any else [part.name for part in able]
        for gone in clocks.keys() - set(beside):
            del clocks[gone]
        for name in beside:
            clock = clocks.setdefault(name, _Clock(num_lost))
            before, clock.idle_s = clock.idle_s, clock.idle_s + for_s
            self.longest_idle_s = max(self.longest_idle_s, clock.idle_s)
            limit_s = (self._world.scenario.max_idle_s or 0.0) + _LOST_HINT_S * (num_lost - clock.num_lost)
            if before <= limit_s < clock.idle_s:
                self._say(job, place, able, clock.idle_s)

    def _say(self, job: str, place: _Place, able: "list[Part]", idle_s: float) -> None:
        where = f" by {place.holder.name}" if place.holder is not None else ""
        beside = ", ".join(self._shown(part) for part in able)
        need = self._world.scenario.need_tokens(job)
        self._world.check.fail(f"IDLE: {job} ({need}) {place.standing}{where} for {idle_s:.3f} s beside {beside}")

    def _count_lost(self, job: str, message: Stored, place: _Place, for_s: float) -> None:
        before = self._lost_s.get(job, 0.0)
        total = self._lost_s[job] = before + for_s
        scenario = self._world.scenario
        is_listed = self._is_listed(message)
        limit_s = scenario.max_listed_s if is_listed else scenario.max_lost_s
        longest = self.longest_lost_s
        longest[is_listed] = max(longest[is_listed], total)
        if limit_s is not None and before <= limit_s < total:
            listed = "listed" if is_listed else "not listed"
            self._world.check.fail(f"LOST FOR: {job} {place.standing} for {total:.3f} s, {listed}")

    def _is_listed(self, message: Stored) -> bool:
        """Whether the last beat of a worker listed it, be it overwritten by its tombstone."""
        beats = self._world.broker.streams[f"KV_{Names().workers_bucket}"]
        found = (decode_heartbeat(each.data) for each in beats.live.values() if each.data)
        return any(beat.holds(message.seq) for beat in found if beat is not None)

    def _num_hints_lost(self, queue: QueueName | None) -> int:
        return self._world.broker.hints_lost.get(queue.consumer if queue is not None else "", 0)

    def _shown(self, part: "Part") -> str:
        assert part.worker is not None
        ledger, num_waiting = part.worker._ledger, part.worker._held.num_waiting
        return f"{part.name} ({ledger.reserved_tokens} of {part.kv_tokens} taken, {num_waiting} held)"

    def _workers(self) -> "list[Part]":
        return [part for part in self._world.parts if part.kind == "worker" and part.model == MODEL and part.is_up]

    def _place(self, message: Stored, part: "Part | None", held: Held | None) -> _Place:
        if part is None or held is None or part.worker is None:
            return _Place("is lost" if self._is_in_flight(message) else "waits")
        if self._is_out(part):
            return _Place("hangs" if self._is_in_flight(message) else "waits")
        if held in part.worker._ledger or held.execution is not None:
            return _Place("runs", part)
        need = self._world.scenario.need_tokens(held.job)
        is_aside = held in part.worker._handler._asides
        if held.is_waiting or is_aside or (part.kv_tokens is not None and need > part.kv_tokens):
            return _Place("is held", part)
        return _Place("rests" if held.is_backing_off else "is moving", part)

    def _is_in_flight(self, message: Stored) -> bool:
        queue = self._world.broker.streams[Names().jobs_stream(MODEL)]
        return any(
            message.seq in consumer.pending and message.seq not in consumer.redeliver
            for consumer in queue.consumers.values()
        )

    def _is_out(self, part: "Part") -> bool:
        return part.process.is_hung or part.process.paused_until > self._world.now()

    def _waiting_pools(self) -> set[str]:
        """Pools in whose queues something may be fetched."""
        queue = self._world.broker.streams[Names().jobs_stream(MODEL)]
        names = (QueueName.from_subject(m.subject) for m in queue.live.values() if not self._is_in_flight(m))
        return {name.pool for name in names if name is not None}

    def _able(self, job: str, queue: QueueName, place: _Place, waiting: set[str]) -> "list[Part]":
        if place.standing in ("runs", "rests") or (place.holder is not None and not self._sees(place.holder)):
            return []
        return [
            part
            for part in self._workers()
            if part is not place.holder
            and self._is_well(part)
            and self._has_room(part, job, queue, waiting)
            and (place.holder is None or self._is_seen(part))
        ]

    def _sees(self, holder: "Part") -> bool:
        """Whether no answer is missing by which a holder would know the job or the other workers."""
        return not self._is_deaf(holder, Names().log_stream(0), f"KV_{Names().workers_bucket}")

    def _is_seen(self, part: "Part") -> bool:
        """Whether no beat of a worker is under way in vain, which hides its room from those who hold something."""
        return not any(
            link.deaf_until.get(f"KV_{Names().workers_bucket}", 0.0) > self._world.now() for _, link, _ in part.threads
        )

    def _is_well(self, part: "Part") -> bool:
        """Whether nothing keeps a worker from running something but what runs there already."""
        worker = part.worker
        if not part.is_up or worker is None or part.engine is None or part.engine.is_dead or self._is_out(part):
            return False
        if self._is_deaf(part, Names().jobs_stream(MODEL), f"KV_{Names().config_bucket}"):
            return False
        return worker._heart.is_fresh and worker._state in ("Ready", "Busy")

    def _has_room(self, part: "Part", job: str, queue: QueueName, waiting: set[str]) -> bool:
        scenario, worker = self._world.scenario, part.worker
        assert worker is not None
        if part.pool != queue.pool and (queue.pool != DEFAULT_POOL or part.pool in waiting):
            return False
        waiters = worker._gate.waiters
        ageing_s = self._world.settings.ageing_s
        if len(waiters) >= _MAX_WAITERS or any(each.is_interrupted or each.waited_s >= ageing_s for each in waiters):
            return False
        coming = [
            held for held in worker._held if not (held.is_waiting or held.is_backing_off or held in worker._ledger)
        ]
        used = worker._ledger.reserved_tokens + sum(scenario.need_tokens(held.job) for held in coming)
        has_slot = worker._ledger.num_running + len(coming) < scenario.max_concurrency
        return has_slot and (part.kv_tokens is None or used + scenario.need_tokens(job) <= part.kv_tokens)

    def _is_deaf(self, part: "Part", *streams: str) -> bool:
        return any(part.link.deaf_until.get(each, 0.0) > self._world.now() for each in streams)

    def _check_ledgers(self) -> None:
        for part in self._workers():
            if part.worker is not None and part.kv_tokens is not None:
                reserved = part.worker._ledger.reserved_tokens
                if reserved > part.kv_tokens:
                    self._world.check.fail(f"OVERCOMMIT: {part.name} promised {reserved} of {part.kv_tokens} tokens")
