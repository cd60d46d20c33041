"""Our policy: requests wait in one place, workers pull what fits, and the router's hint says who has the prefix."""

import functools
import math
from collections.abc import Callable, Sequence

from headrace.discipline.affinity import preferred
from headrace.discipline.placement import WorkerView
from headrace.simulator.engine import Engine
from headrace.simulator.policy import Ground
from headrace.simulator.prefixhints import hashes_of
from headrace.simulator.puller import PullWorker
from headrace.simulator.queues import Queues
from headrace.simulator.requests import Request

__all__ = ["Pull"]


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
        self._beats = {name: worker.view() for name, worker in self._workers.items()}
        self._to_come: set[str] = set()
        self._listed: dict[str, tuple[float, Sequence[WorkerView]]] = {}
        self._num_open = 0
        self._resting: list[Callable[[], None]] = []
        for number, name in enumerate(self._workers):
            phase = number / len(self._workers)
            self._tick(phase, self._options.heartbeat_s, functools.partial(self._beat, name))
            self._tick(phase, self._options.resync_s, functools.partial(self._resync, name))

    def arrive(self, request: Request) -> None:
        """It is queued, and the wakes go out."""
        self._num_open += 1
        request.hashes = hashes_of(request.index, request.arrival)
        request.named = preferred(request.hashes, list(self._beats.values()), request.need_tokens)
        self._queues.put(request)
        self._clock.after(self._options.dispatch_s / 2, lambda: self._wake(request.named))
        while self._resting:
            self._resting.pop()()

    def finished(self, engine: Engine, request: Request) -> None:
        """Its worker looks for the next one."""
        self._num_open -= 1
        self._workers[engine.name].finished(request)

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
        self._workers[name].begin_round()

    def _others(self, name: str) -> Sequence[WorkerView]:
        at_s, listed = self._listed.get(name, (-math.inf, ()))
        if self._clock.now_s - at_s >= self._options.neighbours_s:
            listed = [view for view in self._beats.values() if view.worker != name]
            self._listed[name] = (self._clock.now_s, listed)
        return listed

    def _tick(self, phase: float, period_s: float, action: Callable[[], None]) -> None:
        """Do it once a period, at its own phase, while anything is unfinished."""
        number = -1

        def again() -> None:
            nonlocal number
            number = max(number + 1, math.ceil(self._clock.now_s / period_s - phase))
            self._clock.at((number + phase) * period_s, tick)

        def tick() -> None:
            action()
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
        self._beats[name] = self._workers[name].view()

    def _resync(self, name: str) -> None:
        self._workers[name].place_held()
        self._workers[name].look()
