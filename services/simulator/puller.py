"""One worker of our policy: what it fetches, holds, starts and hands back, by the discipline's own functions."""

import functools
from collections.abc import Callable, Sequence
from typing import Final

from headrace.discipline.affinity import RecentPrefixes, landmarks
from headrace.discipline.aside import aside_s
from headrace.discipline.choice import charge, order
from headrace.discipline.placement import Placement, WorkerView, place
from headrace.discipline.room import Room, Waiter, fetchable_tokens, startable
from headrace.discipline.shares import Shares
from headrace.schemas.subjects import LANES, QueueName
from headrace.simulator.engine import Engine
from headrace.simulator.policy import Ground
from headrace.simulator.queues import Queues
from headrace.simulator.requests import Request

__all__ = ["PullWorker"]


class PullWorker:
    """Fetches one request at a time while its ledger has room, and submits to its engine only what fits to the end.

    `others` are the other workers by their last heartbeats; `ring` wakes one of them. `changed` is told of each change
    that makes a heartbeat.
    """

    def __init__(
        self,
        engine: Engine,
        ground: Ground,
        queues: Queues,
        *,
        others: Callable[[str], Sequence[WorkerView]],
        ring: Callable[[str], None],
        changed: Callable[[str], None],
    ) -> None:
        self.name: Final = engine.name
        self._engine = engine
        self._clock = ground.clock
        self._options = ground.options
        self._queues = queues
        self._others = others
        self._ring = ring
        self._changed = changed
        self._shares = Shares()
        self._recent = RecentPrefixes(size=ground.options.max_recent)
        self._prefixes: frozenset[str] = frozenset()  # what it recalls
        self._held: list[Request] = []  # by lane, then as they came
        self._aside: list[Request] = []
        self._num_running = 0
        self._reserved_tokens = 0
        self._has_room: bool | None = None  # None: to be found out
        self._is_fetching = False
        self._is_behind = False
        self.is_draining = False

    @property
    def num_held(self) -> int:
        """Requests fetched that have not begun."""
        return len(self._held) + len(self._aside)

    @property
    def is_empty(self) -> bool:
        """Whether it has nothing to do and nothing on its way."""
        return not self.num_held and not self._num_running and not self._is_fetching

    @property
    def room(self) -> Room:
        """By the ledger: the needs of what runs, whatever it uses so far."""
        return Room(
            capacity_tokens=self._engine.model.kv_tokens,
            reserved_tokens=self._reserved_tokens,
            max_concurrency=self._engine.model.max_concurrency,
            num_running=self._num_running,
        )

    @property
    def can_fetch(self) -> bool:
        """Whether it is a member of the wake group."""
        if self.is_draining:
            return False
        if self._has_room is None or self._held:  # those that are held age
            tokens = fetchable_tokens(
                self.room, self._waiters(), ageing_s=self._options.ageing_s, max_waiters=self._options.max_held
            )
            self._has_room = tokens > 0
        return self._has_room

    def view(self) -> WorkerView:
        """What a heartbeat sent now would say."""
        return WorkerView(worker=self.name, room=self.room, num_waiting=len(self._held), prefixes=self._prefixes)

    def begin_round(self) -> None:
        """Choose a queue and fetch from it, if there is room and something waits; at most one fetch at a time.

        Each fetch is followed by another look, so a wake that comes during one is not lost.
        """
        if self._is_fetching or not self._queues.num_waiting or not self.can_fetch:
            return
        self._is_fetching = True
        names = order(self._queues.views(self._clock.now_s), self._shares, ageing_s=self._options.ageing_s)
        self._clock.after(self._options.dispatch_s / 2, lambda: self._fetched(names))

    def drain(self) -> None:
        """Fetch nothing more, and hand back what is held."""
        self.is_draining = True
        held, self._held, self._aside = [*self._held, *self._aside], [], []
        for request in held:
            self._give_back(request, None)

    def look(self) -> None:
        """A round without a wake: at once if what it fetched last had waited, else as if woken and not named.

        What was published a moment ago is about to be fetched by the worker that its hint names.
        """
        if self._is_behind:
            self.begin_round()
        elif self._queues.num_waiting:
            self._clock.after(self._options.hint_wait_s, self.begin_round)

    def place_held(self) -> None:
        """Hand back what another worker would start now, as far as heartbeats tell."""
        if not self._held:
            return
        others = self._others(self.name)
        for request in tuple(self._held):
            held_s = self._held_s(request)
            placement, target = place(
                request.need_tokens, self.room, others, num_delivered=request.num_delivered, held_s=held_s
            )
            if placement is Placement.HAND_BACK:
                self._held.remove(request)
                self._has_room = None
                self._give_back(request, target)

    def finished(self, request: Request) -> None:
        """It ended: its memory is free, and its queue gets back what it did not use of what was charged."""
        self._num_running -= 1
        self._reserved_tokens -= request.need_tokens
        self._changed(self.name)
        arrival = request.arrival
        self._refund(request, request.need_tokens - arrival.prompt_tokens - arrival.output_tokens)
        self._start_held()
        self.look()

    def _fetched(self, names: Sequence[QueueName]) -> None:
        self._is_fetching = False
        for name in () if self.is_draining else names:
            views = self._queues.views(self._clock.now_s)
            request = self._queues.fetch(name)
            if request is not None:
                self._is_behind = not self._is_fresh(request)
                charge(views, self._shares, name, request.need_tokens, ageing_s=self._options.ageing_s)
                self._accept(request)
                self.look()
                return
        self._is_behind = False

    def _accept(self, request: Request) -> None:
        request.num_delivered += 1
        request.fetched_s = self._clock.now_s
        if request.num_delivered == 1 and request.named not in (None, self.name) and self._is_fresh(request):
            self._give_back(request, request.named)
            return
        patience_s = 0.0
        if self.room.fits(request.need_tokens):
            patience_s = aside_s(
                request.hashes,
                self._prefixes,
                self._others(self.name),
                request.need_tokens,
                num_delivered=request.num_delivered,
                num_aside=len(self._aside),
            )
        if patience_s:
            self._aside.append(request)
            self._clock.after(patience_s, functools.partial(self._take_back, request, request.num_delivered))
        else:
            self._hold(request)

    def _take_back(self, request: Request, num_delivered: int) -> None:
        """It is not warm here; but it still is here, and starts here if there is room."""
        if request in self._aside and request.num_delivered == num_delivered:
            self._aside.remove(request)
            if self.room.fits(request.need_tokens):
                self._hold(request)
            else:
                self._give_back(request, None, is_undone=True)

    def _hold(self, request: Request) -> None:
        self._held.append(request)
        self._held.sort(key=lambda held: LANES.index(held.arrival.lane))
        self._start_held()
        self.place_held()

    def _is_fresh(self, request: Request) -> bool:
        """Whether the worker that its hint names is about to fetch it."""
        return self._clock.now_s - request.arrival.time_s <= self._options.dispatch_s + self._options.hint_wait_s

    def _give_back(self, request: Request, target: str | None, *, is_undone: bool = False) -> None:
        self._refund(request, request.need_tokens, is_undone=is_undone)

        def put() -> None:
            self._queues.put(request, is_handed_back=True)
            if target is not None:
                self._ring(target)

        self._clock.after(self._options.dispatch_s / 2, put)

    def _start_held(self) -> None:
        self._has_room = None
        if not self._held:
            return
        starting = startable(self.room, self._waiters(), ageing_s=self._options.ageing_s)
        chosen = [self._held[index] for index in starting]
        self._held = [each for index, each in enumerate(self._held) if index not in starting]
        for request in chosen:
            self._start(request)
        if not self.can_fetch:
            aside, self._aside = self._aside, []
            for request in aside:
                self._give_back(request, None, is_undone=True)

    def _start(self, request: Request) -> None:
        self._num_running += 1
        self._reserved_tokens += request.need_tokens
        if request.hashes:
            self._recent.note(landmarks(request.hashes))
            self._prefixes = frozenset(self._recent)
        self._changed(self.name)
        self._engine.submit(request)

    def _waiters(self) -> list[Waiter]:
        return [Waiter(need_tokens=each.need_tokens, waited_s=self._held_s(each)) for each in self._held]

    def _held_s(self, request: Request) -> float:
        assert request.fetched_s is not None
        return self._clock.now_s - request.fetched_s

    def _refund(self, request: Request, tokens: int, *, is_undone: bool = False) -> None:
        views = self._queues.views(self._clock.now_s)
        charge(views, self._shares, request.queue, -tokens, ageing_s=self._options.ageing_s, is_undone=is_undone)
