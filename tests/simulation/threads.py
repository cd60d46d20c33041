"""The heartbeat's thread as one more group of tasks, interleaved with its worker's loop as the seed chooses."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from headrace.worker.pulse import Pulse
from tests.simulation.loop import Process, SimulatedLoop, current_process

__all__ = ["ModelPulse", "SimulatedAsyncio"]

_STOP_S: Final = 5.0


class LoopOf:
    """What one thread sees as its event loop, and what others call to get something done in it."""

    def __init__(self, loop: SimulatedLoop, process: Process) -> None:
        self._loop, self._process = loop, process

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> None:
        """Run it in this thread, soon."""
        self._loop.call_soon(callback, *args, context=self._process.context)

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """The same, from within it."""
        self.call_soon_threadsafe(callback, *args)

    def create_future(self) -> asyncio.Future[Any]:
        return self._loop.create_future()

    def is_closed(self) -> bool:
        return self._process.is_dead


class SimulatedAsyncio:
    """Stands for the module `asyncio` in the heartbeat's module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    def get_running_loop() -> LoopOf:
        process = current_process()
        loop = asyncio.get_running_loop()
        assert process is not None
        assert isinstance(loop, SimulatedLoop)
        return LoopOf(loop, process)

    @staticmethod
    def run_coroutine_threadsafe(coro: Coroutine[Any, Any, Any], loop: LoopOf) -> asyncio.Future[Any]:
        done = loop.create_future()

        def begin() -> None:
            task = asyncio.ensure_future(coro)
            task.add_done_callback(lambda _: _resolve(done))

        loop.call_soon_threadsafe(begin)
        return done

    @staticmethod
    def wrap_future(future: asyncio.Future[Any]) -> asyncio.Future[Any]:
        return future


class ModelPulse(Pulse):
    """The real `Pulse`, but for how its thread begins and ends. `new_thread` makes the process that stands for it."""

    new_thread: Callable[[Process], Process]
    _task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        process = current_process()
        assert process is not None
        self._main_loop = SimulatedAsyncio.get_running_loop()  # type: ignore[assignment]
        self.refresh()
        registered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        thread = ModelPulse.new_thread(process)
        loop = asyncio.get_running_loop()
        self._task = thread.context.run(lambda: loop.create_task(self._thread_main(registered), name="heart"))
        await registered

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is None:
            return
        if self._loop is not None and self._stopping is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
        await asyncio.wait([task], timeout=_STOP_S)

    async def _thread_main(self, registered: "asyncio.Future[None]") -> None:
        assert self._main_loop is not None
        try:
            await self._live(registered)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._main_loop.call_soon_threadsafe(self._fail, registered, error)


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
