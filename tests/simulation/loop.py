"""An event loop with virtual time, where each process is a group of tasks and a seeded choice says which goes next.

Callbacks of one process run in the order asyncio promises; processes, and the broker, interleave as the seed chooses.
"""

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final

__all__ = ["Process", "SimulatedLoop", "current_process"]

_STEP_S: Final = 20e-6
"""Virtual time one callback takes."""
_LOOK_EVERY_S: Final = 0.005


class Process:
    """What is scheduled, hung or killed as one. Whatever is created from within `context` belongs to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready: deque[asyncio.Handle] = deque()
        self.is_hung = False
        self.is_dead = False
        self.paused_until = 0.0
        self.context: Context = copy_context()
        self.context.run(_PROCESS.set, self)

    @property
    def is_out(self) -> bool:
        """Whether nothing of it may run. What it had to do is kept: destroyed, it would run its last lines."""
        return self.is_hung or self.is_dead


_PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


def current_process() -> Process | None:
    """The process that is running now; None outside of all."""
    return _PROCESS.get()


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs callbacks one at a time. `num_steps` counts them.

    Time passes a little with each, and leaps to the next timer when nothing can run. Before a leap `observe` is called,
    200 times a virtual second at most, with the moments between which things were as they are now.
    """

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self._now = 1_000_000.0
        self._num_created = 0
        self.num_steps = 0
        self.observe: Callable[[float, float], None] | None = None
        self._observed_until = self._now
        self.outside = Process("outside")
        self.processes: list[Process] = [self.outside]
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]

    def time(self) -> float:
        """Virtual monotonic seconds."""
        return self._now

    def add(self, process: Process) -> Process:
        """Let a process take part."""
        self.processes.append(process)
        return process

    def create_future(self) -> asyncio.Future[Any]:
        """A future whose place in a set does not depend on where it lies in memory."""
        self._num_created += 1
        return _Future(self._num_created, loop=self)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], context: Context | None = None
    ) -> asyncio.Task[Any]:
        self._num_created += 1
        return _Task(self._num_created, coro, loop=self, context=context)

    def _run_once(self) -> None:
        self._sort_in()
        runnable = [
            process
            for process in self.processes
            if process.ready and not process.is_out and process.paused_until <= self._now
        ]
        if runnable:
            process = runnable[0] if len(runnable) == 1 else self._rng.choice(runnable)
            handle = process.ready.popleft()
            if not handle.cancelled():
                self.num_steps += 1
                self._now += _STEP_S
                handle._run()
            return
        pauses = [process.paused_until for process in self.processes if process.ready and not process.is_out]
        times = pauses + ([self._scheduled[0].when()] if self._scheduled else [])
        if not times:
            raise RuntimeError("nothing can ever happen again")
        until = max(self._now, min(times))
        if self.observe is not None and until - self._observed_until >= _LOOK_EVERY_S:
            self.observe(self._observed_until, until)
            self._observed_until = until
        self._now = until

    def _sort_in(self) -> None:
        while self._ready:
            self._owner(self._ready.popleft())
        while self._scheduled and (self._scheduled[0].cancelled() or self._scheduled[0].when() <= self._now):
            timer = heapq.heappop(self._scheduled)
            timer._scheduled = False  # type: ignore[attr-defined]
            if not timer.cancelled():
                self._owner(timer)

    def _owner(self, handle: asyncio.Handle) -> None:
        process = handle._context.get(_PROCESS) or self.outside  # type: ignore[attr-defined]
        process.ready.append(handle)

    def _process_events(self, event_list: Any) -> None:
        raise NotImplementedError

    def _write_to_self(self) -> None:
        pass


class _Task(asyncio.Task[Any]):
    def __init__(self, number: int, coro: Coroutine[Any, Any, Any], **kwargs: Any) -> None:
        self._number = number
        super().__init__(coro, **kwargs)

    def __hash__(self) -> int:
        return self._number


class _Future(asyncio.Future[Any]):
    def __init__(self, number: int, **kwargs: Any) -> None:
        self._number = number
        super().__init__(**kwargs)

    def __hash__(self) -> int:
        return self._number
