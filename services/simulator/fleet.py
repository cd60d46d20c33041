"""A number of engines that follows the load, under our queue discipline, in virtual time."""

from collections.abc import Sequence
from random import Random
from typing import Final

import msgspec

from headrace.discipline.scaling import GroupLoad
from headrace.simulator.clock import Clock
from headrace.simulator.engine import Engine
from headrace.simulator.model import EngineModel
from headrace.simulator.policy import Ground, PolicyOptions
from headrace.simulator.pull import Pull
from headrace.simulator.requests import Request
from headrace.simulator.scalers import Scaler
from headrace.simulator.simulation import feed
from headrace.simulator.traces import Arrival

__all__ = ["FleetOutcome", "Sample", "simulate_fleet"]

_LOOK_S: Final = 1.0
_DEFAULT_NEED: Final = 1024
_WEIGHT: Final = 0.1
"""Of the newest in a moving average, as workers have it for the time of a job and its size."""


class Sample(msgspec.Struct, frozen=True):
    """One look: engines wanted and up, requests that wait."""

    time_s: float
    wanted: int
    ready: int
    num_waiting: int


class FleetOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What happened until `until_s`. `replica_s` are engine-seconds, from the start of each to its end."""

    requests: Sequence[Request]
    samples: Sequence[Sample]
    replica_s: float
    num_steps: int


def simulate_fleet(
    arrivals: Sequence[Arrival],
    scaler: Scaler,
    *,
    model: EngineModel,
    start_s: float,
    until_s: float,
    seed: int = 0,
) -> FleetOutcome:
    """Play the trace to the end of its last request, and on until `until_s`; an engine takes `start_s` to be up."""
    clock = Clock()
    fleet = _Fleet(clock, scaler, model=model, start_s=start_s, until_s=until_s, seed=seed)
    requests = [Request(index, arrival, model.need_tokens(arrival)) for index, arrival in enumerate(arrivals)]
    too_large = [request.index for request in requests if request.need_tokens > model.kv_tokens]
    assert not too_large, "the scenario has a request that no engine can hold"
    fleet.num_open = len(requests)
    feed(clock, fleet.pull, requests)
    clock.at(0.0, fleet.look)
    clock.run()
    return FleetOutcome(requests=requests, samples=fleet.samples, replica_s=fleet.replica_s, num_steps=fleet.num_steps)


class _Fleet:
    """Starts and stops engines as it is told, and measures what the scaler is told."""

    def __init__(
        self,
        clock: Clock,
        scaler: Scaler,
        *,
        model: EngineModel,
        start_s: float,
        until_s: float,
        seed: int,
    ) -> None:
        self._clock = clock
        self._scaler = scaler
        self._model = model
        self._start_s = start_s
        self._until_s = until_s
        self.pull = Pull(Ground(clock=clock, engines=(), random=Random(f"{seed} policy"), options=PolicyOptions()))
        self.num_open = 0
        self.samples: list[Sample] = []
        self.num_steps = 0
        self.replica_s = 0.0
        self._wanted = 0
        self._num_made = 0
        self._begun: dict[str, float] = {}
        self._starting: list[str] = []
        self._up: dict[str, Engine] = {}
        self._draining: set[str] = set()
        self._seconds_per_job: float | None = None
        self._usual_need: float | None = None
        self._worked_at: float | None = None

    def look(self) -> None:
        """Ask the scaler, do what it says, and look again."""
        now_s = self._clock.now_s
        slots, num_running = self._slots(), sum(self._num_running(engine) for engine in self._up.values())
        num_coming = min(self.pull.num_waiting, max(0, len(self._up) * slots - num_running))  # on its way to free slots
        load = GroupLoad(
            wanted=self._wanted,
            num_ready=len(self._up),
            num_queued=self.pull.num_waiting - num_coming,
            num_ahead=self.pull.num_waiting - num_coming,
            num_running=num_running + num_coming,
            seconds_per_job=self._seconds_per_job,
            slots=slots if self._up or self._usual_need is not None else None,
            worked_at=self._worked_at,
        )
        wanted = self._scaler.wanted(load, now_s)
        self.num_steps += wanted != self._wanted
        self._wanted = wanted
        while len(self._starting) + len(self._up) < wanted:
            self._begin()
        while len(self._starting) + len(self._up) > wanted:
            self._end_one()
        self.samples.append(Sample(now_s, wanted, len(self._up), self.pull.num_waiting))
        if now_s + _LOOK_S <= self._until_s or self.num_open:
            self._clock.after(_LOOK_S, self.look)
        else:
            for name in list(self._begun):
                self._gone(name)

    def _num_running(self, engine: Engine) -> int:
        return engine.num_running + len(engine.waiting)

    def _slots(self) -> int:
        """As many of the usual size as memory holds, as a worker says of itself."""
        usual = self._usual_need or _DEFAULT_NEED
        return max(1, min(self._model.max_concurrency, int(self._model.kv_tokens // usual)))

    def _begin(self) -> None:
        self._num_made += 1
        name = f"w{self._num_made}"
        self._begun[name] = self._clock.now_s
        self._starting.append(name)
        self._clock.after(self._start_s, lambda: self._is_up(name))

    def _is_up(self, name: str) -> None:
        if name not in self._starting:
            return
        self._starting.remove(name)
        engine = Engine(name, self._model, self._clock, on_finished=self._finished)
        self._up[name] = engine
        self.pull.add(engine)

    def _end_one(self) -> None:
        """One that is not up yet, else the one with the least to do."""
        if self._starting:
            self._gone(self._starting.pop())
            return
        engine = min(self._up.values(), key=lambda each: (self._num_running(each), each.name))
        del self._up[engine.name]
        self.pull.drain(engine)
        if self._num_running(engine):
            self._draining.add(engine.name)
        else:
            self._gone(engine.name)

    def _gone(self, name: str) -> None:
        self.replica_s += self._clock.now_s - self._begun.pop(name)

    def _finished(self, engine: Engine, request: Request) -> None:
        assert request.started_s is not None
        self.num_open -= 1
        self._worked_at = self._clock.now_s
        self._seconds_per_job = _moved(self._seconds_per_job, self._clock.now_s - request.started_s)
        self._usual_need = _moved(self._usual_need, request.need_tokens)
        self.pull.finished(engine, request)
        if engine.name in self._draining and not self._num_running(engine):
            self._draining.remove(engine.name)
            self._gone(engine.name)


def _moved(known: float | None, newest: float) -> float:
    return newest if known is None else known + _WEIGHT * (newest - known)
