"""One worker of our policy: what it fetches, holds, starts and hands back, by the discipline's own functions."""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from headrace.discipline.affinity import RecentPrefixes
from headrace.discipline.choice import charge, order
from headrace.discipline.placement import Placement, WorkerView, place
from headrace.discipline.room import Room, Waiter, fetchable_tokens, startable
from headrace.discipline.shares import Shares
from headrace.schemas.subjects import QueueName
from headrace.simulator.engine import Engine
from headrace.simulator.policy import Ground
from headrace.simulator.queues import Queues
from headrace.simulator.requests import Request

__all__ = ["PullWorker"]


class _Held(msgspec.Struct, frozen=True):
    """A fetched request that waits here for room."""

    request: Request
    since_s: float


class PullWorker:
    """Fetches one request at a time while its ledger has room, and submits to its engine only what fits to the end.

    `others` are the other workers by their last heartbeats; `wake` rings one of them.
    """

    def __init__(
        self,
        engine: Engine,
        ground: Ground,
        queues: Queues,
        *,
        others: Callable[[str], Sequence[WorkerView]],
        wake: Callable[[str], None],
    ) -> None:
        self.name: Final = engine.name
        self._engine = engine
        self._clock = ground.clock
        self._options = ground.options
        self._queues = queues
        self._others = others
        self._wake = wake
        self._needs: dict[int, int] = {}
        self._held: list[_Held] = []
        self._shares = Shares()
        self._recent = RecentPrefixes(size=ground.options.max_recent)
        self._is_fetching = False
        self._is_woken = False

    @property
    def room(self) -> Room:
        """By the ledger: the needs of what runs, whatever it uses so far."""
        return Room(
            capacity_tokens=self._engine.model.kv_tokens,
            reserved_tokens=sum(self._needs.values()),
            max_concurrency=self._engine.model.max_concurrency,
            num_running=len(self._needs),
        )

    @property
    def can_fetch(self) -> bool:
        """Whether it is a member of the wake group."""
        return (
            fetchable_tokens(
                self.room,
                self._waiters(),
                ageing_s=self._options.ageing_s,
                max_waiters=self._options.max_held,
            )
            > 0
        )

    def view(self) -> WorkerView:
        """What a heartbeat sent now would say."""
        return WorkerView(
            worker=self.name, room=self.room, num_waiting=len(self._held), prefixes=frozenset(self._recent)
        )

    def begin_round(self) -> None:
        """Choose a queue and fetch from it, if there is room and something waits; at most one fetch at a time."""
        if self._is_fetching:
            self._is_woken = True
            return
        if not self._queues.num_waiting or not self.can_fetch:
            return
        self._is_fetching = True
        views = self._queues.views(self._clock.now_s)
        names = order(views, self._shares, ageing_s=self._options.ageing_s)
        self._clock.after(self._options.dispatch_s / 2, lambda: self._fetched(names))

    def finished(self, request: Request) -> None:
        """It ended: its memory is free, its queue gets back what it did not use of what was charged."""
        del self._needs[request.index]
        arrival = request.arrival
        unused = request.need_tokens - arrival.prompt_tokens - arrival.output_tokens
        self._charge(request, -unused)
        self._start_held()
        self.begin_round()

    def _fetched(self, names: Sequence[QueueName]) -> None:
        self._is_fetching = False
        for name in names:
            views = self._queues.views(self._clock.now_s)
            request = self._queues.fetch(name)
            if request is not None:
                charge(views, self._shares, name, request.need_tokens, ageing_s=self._options.ageing_s)
                self._accept(request)
                break
        self._is_woken = False
        self.begin_round()

    def _accept(self, request: Request) -> None:
        self._held.append(_Held(request, self._clock.now_s))
        self._start_held()
        if self._held and self._held[-1].request is request:
            request.num_delivered += 1
            placement, target = place(
                request.need_tokens, self.room, self._others(self.name), num_delivered=request.num_delivered
            )
            if placement is not Placement.HOLD:
                self._held.pop()
                self._charge(request, -request.need_tokens)
                self._clock.after(self._options.dispatch_s / 2, lambda: self._hand_back(request, target))

    def _hand_back(self, request: Request, target: str | None) -> None:
        self._queues.put(request, at_head=True)
        if target is not None:
            self._wake(target)

    def _start_held(self) -> None:
        starting = startable(self.room, self._waiters(), ageing_s=self._options.ageing_s)
        chosen = [self._held[index].request for index in starting]
        self._held = [each for index, each in enumerate(self._held) if index not in set(starting)]
        for request in chosen:
            self._needs[request.index] = request.need_tokens
            self._recent.note(request.hashes)
            self._engine.submit(request)

    def _waiters(self) -> list[Waiter]:
        now_s = self._clock.now_s
        return [
            Waiter(need_tokens=each.request.need_tokens, waited_s=now_s - each.since_s) for each in self._held
        ]

    def _charge(self, request: Request, tokens: float) -> None:
        views = self._queues.views(self._clock.now_s)
        charge(views, self._shares, request.queue, tokens, ageing_s=self._options.ageing_s)
