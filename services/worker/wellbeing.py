"""How the requests of a worker go, counted where they run: what its heartbeat says of its health."""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from headrace.schemas.workers import WorkerHealth

__all__ = ["Course", "Wellbeing"]

_NUM_ANSWERS: Final = 32
_ANSWERS_FOR_S: Final = 300.0
_NUM_MEASUREMENTS: Final = 128
_MEASURED_FOR_S: Final = 60.0
_PACE_EVERY_S: Final = 1.0
_LEAST_TOKENS: Final = 4
"""Tokens after the first from which on the pace of an answer that took less than `_PACE_EVERY_S` counts."""


class _Window:
    """The last measurements that are not too old."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._values: deque[tuple[float, float]] = deque(maxlen=_NUM_MEASUREMENTS)

    def add(self, value: float) -> None:
        self._values.append((self._clock(), value))

    def clear(self) -> None:
        self._values.clear()

    def median(self) -> tuple[float | None, int]:
        """The median, and of how many."""
        oldest = self._clock() - _MEASURED_FOR_S
        while self._values and self._values[0][0] < oldest:
            self._values.popleft()
        values = sorted(value for _, value in self._values)
        if not values:
            return None, 0
        middle = len(values) // 2
        median = values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2
        return float(f"{median:.4g}"), len(values)


class Course:
    """The course of one request through the engine. Only waiting for the engine counts, never what we do ourselves."""

    def __init__(self, wellbeing: "Wellbeing") -> None:
        self._wellbeing = wellbeing
        self._run = wellbeing.engine_run
        self._has_begun = False
        self._has_ended = False
        self._waited_s = 0.0
        self._num_tokens = 0

    def take(self, num_tokens: int, *, waited_s: float) -> None:
        """The engine gave a piece after so many seconds; one without tokens is a sign of life."""
        self._waited_s += waited_s
        if not num_tokens:
            return
        if not self._has_begun:
            self._has_begun = True
            self._tell_first(self._waited_s)
            self._waited_s = 0.0
            return
        self._num_tokens += num_tokens
        if self._waited_s >= _PACE_EVERY_S:
            self._tell_pace()

    def end(self) -> None:
        """The engine is done with it, or it was stopped."""
        if self._has_ended:
            return
        if self._num_tokens >= _LEAST_TOKENS:
            self._tell_pace()
        self._has_ended = True
        self._wellbeing.num_running -= 1

    def answer(self, job: str, *, is_failure: bool) -> None:
        """It ended well, or by the engine's fault."""
        if self._run == self._wellbeing.engine_run:
            self._wellbeing.note_answer(job, is_failure=is_failure)

    def _tell_first(self, seconds: float) -> None:
        if self._run == self._wellbeing.engine_run:
            self._wellbeing.firsts.add(seconds)
            self._wellbeing.loads.add(self._wellbeing.num_running)

    def _tell_pace(self) -> None:
        if self._run == self._wellbeing.engine_run:
            self._wellbeing.paces.add(self._waited_s / self._num_tokens)
            self._wellbeing.loads.add(self._wellbeing.num_running)
        self._waited_s, self._num_tokens = 0.0, 0


class Wellbeing:
    """Counts the last answers of the present engine run, and how fast they came.

    `num_served` are all that ended well or failed since the process began.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answers: deque[tuple[float, str, bool]] = deque(maxlen=_NUM_ANSWERS)
        self.paces = _Window(clock)
        self.firsts = _Window(clock)
        self.loads = _Window(clock)
        self.num_running = 0
        self.engine_run = 0
        self.num_served = 0

    def begin(self) -> Course:
        """A request goes to the engine; it runs until its `end`."""
        self.num_running += 1
        return Course(self)

    def note_answer(self, job: str, *, is_failure: bool) -> None:
        """A request ended well, or by the engine's fault.

        One that fails here again says nothing new: it may be the request that no engine can bear.
        """
        self.num_served += 1
        if not is_failure or (job, True) not in [(each, failed) for _, each, failed in self._answers]:
            self._answers.append((self._clock(), job, is_failure))

    def start_anew(self, engine_run: int) -> None:
        """The engine was started again: what was counted before says nothing of it."""
        self.engine_run = engine_run
        self._answers.clear()
        self.paces.clear()
        self.firsts.clear()
        self.loads.clear()

    def report(self, *, restarts: int = 0, last_restart: str = "", is_left_out: bool = False) -> WorkerHealth:
        """As the heartbeat has it."""
        oldest = self._clock() - _ANSWERS_FOR_S
        while self._answers and self._answers[0][0] < oldest:
            self._answers.popleft()
        num_failed = sum(is_failure for _, _, is_failure in self._answers)
        pace_s, num_paces = self.paces.median()
        first_s, num_firsts = self.firsts.median()
        return WorkerHealth(
            engine_run=self.engine_run,
            finished=len(self._answers) - num_failed,
            failed=num_failed,
            seconds_per_token=pace_s,
            num_paces=num_paces,
            ttft_s=first_s,
            num_firsts=num_firsts,
            load=self.loads.median()[0],
            restarts=restarts,
            last_restart=last_restart,
            is_left_out=is_left_out,
        )
