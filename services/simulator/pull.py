"""Our policy: requests wait in one place, workers pull what fits, and the router's hint says who has the prefix."""

from collections.abc import Sequence
from typing import Final

from headrace.discipline.affinity import BLOCK_CHARS, MAX_BLOCKS, preferred
from headrace.discipline.placement import WorkerView
from headrace.simulator.engine import Engine
from headrace.simulator.policy import Ground
from headrace.simulator.puller import PullWorker
from headrace.simulator.queues import Queues
from headrace.simulator.requests import Request
from headrace.simulator.traces import Arrival

__all__ = ["Pull", "hashes_of"]

_TOKENS_PER_BLOCK: Final = BLOCK_CHARS // 4
"""A token of English text has about four characters."""


class Pull:
    """A request is queued, its wake rings the worker that the hint names and one member of the wake group at random.

    Who is woken and not named waits `hint_wait_s` first. A worker with room also looks every `resync_s` while
    something waits, and whenever one of its requests ended. The router and the workers know each other by heartbeats
    alone, which are up to `heartbeat_s` old.
    """

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._queues = Queues(ground.options.weights)
        self._workers = {
            engine.name: PullWorker(engine, ground, self._queues, others=self._others, wake=self._ring)
            for engine in ground.engines
        }
        self._beats = {name: worker.view() for name, worker in self._workers.items()}
        self._num_open = 0
        self._is_beating = False

    def arrive(self, request: Request) -> None:
        """It is queued, and the wakes go out."""
        options = self._ground.options
        self._num_open += 1
        request.hashes = hashes_of(request.index, request.arrival)
        request.preferred = preferred(request.hashes, list(self._beats.values()), request.need_tokens)
        self._queues.put(request)
        self._ground.clock.after(options.dispatch_s / 2, lambda: self._woken(request))
        if not self._is_beating:
            self._is_beating = True
            for number, name in enumerate(self._workers):
                phase_s = options.heartbeat_s * number / len(self._workers)
                self._ground.clock.after(phase_s, lambda name=name: self._beat(name))  # type: ignore[misc]
                self._ground.clock.after(options.resync_s, lambda name=name: self._resync(name))  # type: ignore[misc]

    def finished(self, engine: Engine, request: Request) -> None:
        """Its worker looks for the next one."""
        self._num_open -= 1
        self._workers[engine.name].finished(request)

    def _woken(self, request: Request) -> None:
        if request.preferred is not None:
            self._ring(request.preferred)
        members = [worker for worker in self._workers.values() if worker.can_fetch]
        if not members:
            return
        member = self._ground.random.choice(members)
        if request.preferred is None:
            member.begin_round()
        elif member.name != request.preferred:
            self._ground.clock.after(self._ground.options.hint_wait_s, member.begin_round)

    def _ring(self, name: str) -> None:
        self._workers[name].begin_round()

    def _others(self, name: str) -> Sequence[WorkerView]:
        return [view for view in self._beats.values() if view.worker != name]

    def _beat(self, name: str) -> None:
        self._beats[name] = self._workers[name].view()
        if self._num_open:
            self._ground.clock.after(self._ground.options.heartbeat_s, lambda: self._beat(name))
        else:
            self._is_beating = False

    def _resync(self, name: str) -> None:
        self._workers[name].begin_round()
        if self._num_open:
            self._ground.clock.after(self._ground.options.resync_s, lambda: self._resync(name))


def hashes_of(index: int, arrival: Arrival) -> tuple[str, ...]:
    """What the router's hashes would be: equal for the blocks of a shared prefix, unlike any other after it."""
    num_shared = min(MAX_BLOCKS, arrival.prefix_tokens // _TOKENS_PER_BLOCK)
    num_blocks = min(MAX_BLOCKS, arrival.prompt_tokens // _TOKENS_PER_BLOCK)
    return tuple(
        f"{arrival.prefix}/{block}" if block < num_shared else f"#{index}/{block}" for block in range(num_blocks)
    )
