"""Our policy: requests wait in one place, workers pull what fits, and the router's hint says who has the prefix."""

import math
from collections.abc import Callable, Sequence
from typing import Final

from headrace.discipline.affinity import preferred
from headrace.discipline.placement import WorkerView
from headrace.simulator.engine import Engine
from headrace.simulator.policy import Ground
from headrace.simulator.prefixhints import hashes_of
from headrace.simulator.puller import PullWorker
from headrace.simulator.queues import Queues
from headrace.simulator.requests import Request

__all__ = ["Pull"]

_GOLDEN: Final = 0.6180339887
"""Its multiples, modulo 1, are phases that lie well apart, however many there will be."""


class Pull:
    """A request is queued; its wake rings the worker that the hint names, and one member of the wake group at random.

    Who is woken and not named waits `hint_wait_s` first. A worker also looks every `resync_s` while anything is
    unfinished, and when it gets room again. Router and workers know of each other by heartbeats alone. Those go out
    each `heartbeat_s`, and when something changed, `beat_gap_s` apart; workers list them each `neighbours_s` at most.
    """

    def __init__(self, ground: Ground) -> None:
        self._clock = ground.clock
        self._random = ground.random
        self._options = ground.options
        self._queues = Queues(ground.options.weights)
        self._workers = {
            engine.name: PullWorker(
                engine, ground, self._queues, others=self._others, ring=self._ring, changed=self._to_beat
            )
            for engine in ground.engines
        }
        self._ground = ground
        self._beats = {name: worker.view() for name, worker in self._workers.items()}
        self._to_come: set[str] = set()
        self._listed: dict[str, tuple[float, Sequence[WorkerView]]] = {}
        self._num_open = 0
        self._num_added = 0
        self._resting: list[Callable[[], None]] = []
        for number, name in enumerate(self._workers):
            self._begin_ticks(name, number / len(self._workers))

    @property
    def num_waiting(self) -> int:
        """Requests without a place in an engine: queued, or held by a worker that has no room for them."""
        return self._queues.num_waiting + sum(worker.num_held for worker in self._workers.values())

    def add(self, engine: Engine) -> None:
        """Its worker is ready: it looks at once, as a new one does."""
        worker = PullWorker(
            engine, self._ground, self._queues, others=self._others, ring=self._ring, changed=self._to_beat
        )
        self._workers[engine.name] = worker
        self._beats[engine.name] = worker.view()
        self._num_added += 1
        self._begin_ticks(engine.name, self._num_added * _GOLDEN % 1)
        if self._num_open:
            self._go_on()
        worker.look()

    def drain(self, engine: Engine) -> None:
        """Its worker fetches nothing more, and hands back what has not begun; what runs goes on to its end."""
        self._workers[engine.name].drain()
        self._beats.pop(engine.name)
        if self._workers[engine.name].is_empty:
            del self._workers[engine.name]

    def arrive(self, request: Request) -> None:
        """It is queued, and the wakes go out."""
        self._num_open += 1
        request.hashes = hashes_of(request.index, request.arrival)
        request.named = preferred(request.hashes, list(self._beats.values()), request.need_tokens)
        self._queues.put(request)
        self._clock.after(self._options.dispatch_s / 2, lambda: self._wake(request.named))
        self._go_on()

    def finished(self, engine: Engine, request: Request) -> None:
        """Its worker looks for the next one."""
        self._num_open -= 1
        worker = self._workers[engine.name]
        worker.finished(request)
        if worker.is_draining and worker.is_empty:
            del self._workers[engine.name]

    def _begin_ticks(self, name: str, phase: float) -> None:
        self._tick(name, phase, self._options.heartbeat_s, self._beat)
        self._tick(name, phase, self._options.resync_s, self._resync)

    def _go_on(self) -> None:
        while self._resting:
            self._resting.pop()()

    def _wake(self, named: str | None) -> None:
        if named is not None:
            self._ring(named)
        members = [worker for worker in self._workers.values() if worker.can_fetch]
        if not members:
            return
        member = self._random.choice(members)
        if named is None:
            member.begin_round()
        elif member.name != named:
            self._clock.after(self._options.hint_wait_s, member.begin_round)

    def _ring(self, name: str) -> None:
        if name in self._workers:
            self._workers[name].begin_round()

    def _others(self, name: str) -> Sequence[WorkerView]:
        at_s, listed = self._listed.get(name, (-math.inf, ()))
        if self._clock.now_s - at_s >= self._options.neighbours_s:
            listed = [view for view in self._beats.values() if view.worker != name]
            self._listed[name] = (self._clock.now_s, listed)
        return listed

    def _tick(self, name: str, phase: float, period_s: float, action: Callable[[str], None]) -> None:
        """Do it once a period, at its own phase, while the worker is there and anything is unfinished."""
        number = -1

        def again() -> None:
            nonlocal number
            number = max(number + 1, math.ceil(self._clock.now_s / period_s - phase))
            self._clock.at((number + phase) * period_s, tick)

        def tick() -> None:
            if name not in self._beats:
                return
            action(name)
            if self._num_open:
                again()
            else:
                self._resting.append(again)

        self._resting.append(again)

    def _to_beat(self, name: str) -> None:
        if name not in self._to_come:
            self._to_come.add(name)
            self._clock.after(self._options.beat_gap_s, lambda: self._beat(name))

    def _beat(self, name: str) -> None:
        self._to_come.discard(name)
        if name in self._beats:
            self._beats[name] = self._workers[name].view()

    def _resync(self, name: str) -> None:
        self._workers[name].place_held()
        self._workers[name].look()
