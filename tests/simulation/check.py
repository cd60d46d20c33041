"""The rules of the job log, checked at each write as the broker takes it."""

from collections import defaultdict
from typing import TYPE_CHECKING

from headrace.discipline.company import guest_of
from headrace.schemas import events, subjects
from headrace.schemas.events import Event, Owner
from headrace.schemas.states import JobState, fold, next_state
from headrace.schemas.subjects import Names
from headrace.schemas.workers import decode_heartbeat
from tests.simulation.broker import Link, Stored, Stream
from tests.simulation.engine import token

if TYPE_CHECKING:
    from tests.simulation.engine import StubEngine
    from tests.simulation.world import Part, World

__all__ = ["Check"]


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
        self.first_start_at: dict[str, float] = {}
        self.num_handed_over = 0

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
        if state is not None and (state.is_terminal or self._has_message(job, state, other_than=stream)):
            return
        self.fail(f"LOST: message {message.seq} of {job}, which has not ended, {how}")

    def _has_message(self, job: str, state: JobState, *, other_than: Stream) -> bool:
        """Whether the model that the log names has a message of the job, in another stream."""
        name = self._names.jobs_stream(state.model) if state.model else ""
        queue = self._world.broker.streams.get(name)
        if queue is None or name == other_than.name:
            return False
        return any(each.headers[subjects.HDR_JOB] == job for each in queue.live.values())

    def engine_began(self, job: str, attempt: int, part: "Part") -> None:
        """An engine starts to compute."""
        events_ = self.logs[job]
        ours = [e for e in events_ if e.kind == "started" and e.attempt == attempt]
        if not ours:
            self.fail(f"UNCLAIMED: {part.name} runs {job} attempt {attempt} without a claim in the log")

    def company_kept(self, engine: "StubEngine") -> None:
        """An engine has begun one more: none of those it computes on probation may have to take turns with another."""
        max_faults = self._world.settings.max_attempts
        guests = {
            job: guest_of(self.states[job], max_faults=max_faults).after(engine.made[job, attempt])
            for (job, attempt), number in engine.running.items()
            if number and self.states[job].attempt == attempt
        }
        unproven = [job for job, guest in guests.items() if guest.is_unproven]
        if len(unproven) > 1 and any(guests[job].takes_turns for job in unproven):
            self.fail(f"COMPANY: {engine.part.name} computes {unproven} beside each other, all on probation")
        suspects = [job for job, guest in guests.items() if guest.is_suspect]
        if len(suspects) > 1:
            self.fail(
                f"COMPANY: {engine.part.name} computes {suspects} beside each other, all one fault from their end"
            )

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
            self.first_start_at.setdefault(job, self._world.now())
            if before.model and event.model != before.model:
                self.fail(f"MIXED: {job} started by {event.model}, it is {before.model}'s")
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
        if event.reason == events.FALLBACK:
            if before.was_started or before.is_terminal:
                self.fail(f"HANDED OVER: {job} by {who} although it had started")
            queue = self._world.broker.streams[self._names.jobs_stream(event.model)]
            if event.queue_sequence not in queue.live:
                self.fail(f"HANDED OVER: {job} by {who} without a message at {event.model}")
            self.num_handed_over += 1
            return
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
