"""One engine in virtual time: continuous batching, chunked prefill, and preemption when memory runs out."""

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Final

from headrace.simulator.clock import Clock
from headrace.simulator.kvcache import KvCache
from headrace.simulator.model import EngineModel
from headrace.simulator.requests import Request

__all__ = ["Engine"]


class Engine:
    """Runs requests in the order they were submitted; `on_finished` is called at each end.

    A step begins when the one before has ended. It decodes one token for each request that has its first, and reads
    prompts with what is left of `max_step_tokens`. A request is admitted when a slot is free and its prompt fits into
    the memory that is used at that moment; if the next tokens do not fit, the request admitted last is preempted: its
    memory is freed, it goes to the head of the queue and is computed again (as vLLM does). Who reserves what requests
    can come to hold, never sees that.

    Steps in which nothing joins or ends differ only by the growing context, so they are one event with the sum in
    closed form; a request that joins cuts it at the end of the step that runs.
    """

    def __init__(
        self,
        name: str,
        model: EngineModel,
        clock: Clock,
        *,
        on_finished: Callable[["Engine", Request], None],
    ) -> None:
        self.name: Final = name
        self.model: Final = model
        self.kv: Final = KvCache(capacity_tokens=model.kv_tokens, block_size=model.block_size)
        self.waiting: Final[deque[Request]] = deque()
        self.used_token_s = 0.0  # integral of the memory used over time
        self.num_preemptions = 0
        self._clock = clock
        self._on_finished = on_finished
        self._admitted: dict[int, Request] = {}
        self._reading: deque[Request] = deque()
        self._ends: list[tuple[int, int, Request]] = []  # heap of (finish step, index); stale ones are skipped
        self._num_decoding = 0
        self._context_tokens = 0
        self._step = 0
        self._is_stepping = False
        self._event = 0
        self._start_s = 0.0
        self._num_steps = 0
        self._first_s = 0.0
        self._growth_s = 0.0
        self._reads: list[tuple[Request, int]] = []

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._admitted)

    @property
    def used_tokens(self) -> int:
        """KV tokens held by running requests at this moment."""
        if not self._num_steps:
            return self.kv.used_tokens
        return self.kv.used_tokens + self._num_decoding * (self._steps_until(self._clock.now_s) - 1)

    def submit(self, request: Request) -> None:
        """Queue it; it joins at the end of the step that runs, if there is room."""
        request.worker = self.name
        self.waiting.append(request)
        if not self._is_stepping:
            self._begin()
        elif self._num_steps > 1 and len(self.waiting) == 1:
            steps = self._steps_until(self._clock.now_s)
            if steps < self._num_steps:
                self._schedule(steps)

    def _begin(self) -> None:
        """Decide what the next step computes, and schedule its end and that of the steps like it."""
        model, kv = self.model, self.kv
        has_preempted = False
        while self._num_decoding and kv.used_tokens + self._num_decoding > kv.capacity_tokens:
            self._preempt()
            has_preempted = True
        budget = model.max_step_tokens - self._num_decoding
        self._reads = []
        for request in self._reading:
            if budget <= 0:
                break
            budget -= self._read(request, budget)
        while self.waiting and budget > 0 and not has_preempted and len(self._admitted) < model.max_concurrency:
            if not self._admit(self.waiting[0]):
                break
            budget -= self._read(self.waiting.popleft(), budget)
        self._growth_s = 0.0
        num_steps = 1
        if not self._reads:
            if not self._num_decoding:
                self._is_stepping = False
                self._num_steps = 0
                return
            room = (kv.capacity_tokens - kv.used_tokens) // self._num_decoding
            num_steps = max(1, min(self._next_end() - self._step, room))
            self._growth_s = self._num_decoding * model.context_token_s
        self._is_stepping = True
        self._start_s = self._clock.now_s
        num_read = sum(number for _, number in self._reads)
        self._first_s = model.step_s(self._num_decoding, num_read, self._context_tokens)
        self._schedule(num_steps)

    def _schedule(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._event += 1
        event = self._event
        self._clock.at(self._start_s + self._elapsed_s(num_steps), lambda: self._end(event))

    def _elapsed_s(self, num_steps: int) -> float:
        """Duration of the first steps of this run of steps; each is `growth` longer than the one before."""
        return num_steps * self._first_s + self._growth_s * num_steps * (num_steps - 1) / 2

    def _steps_until(self, time_s: float) -> int:
        """Steps that have ended by then or are under way: 1 at the start, at most those planned."""
        elapsed_s = time_s - self._start_s
        half = self._growth_s / 2
        linear = self._first_s - half
        root = elapsed_s / linear if not half else (math.sqrt(linear**2 + 4 * half * elapsed_s) - linear) / (2 * half)
        steps = min(max(1, math.ceil(root)), self._num_steps)
        while steps < self._num_steps and self._elapsed_s(steps) < elapsed_s:
            steps += 1
        while steps > 1 and self._elapsed_s(steps - 1) >= elapsed_s:
            steps -= 1
        return steps

    def _end(self, event: int) -> None:
        if event != self._event:
            return
        num_steps, grown = self._num_steps, self._num_decoding * self._num_steps
        self.used_token_s += (self.kv.used_tokens + grown / 2) * self._elapsed_s(num_steps)
        self.kv.grow(grown)
        self._context_tokens += grown
        self._step += num_steps
        self._num_steps = 0
        finished = []
        for request, number in self._reads:
            request.num_to_read -= number
            if not request.num_to_read:
                self._reading.popleft()
                if request.first_token_s is None:
                    request.first_token_s = self._clock.now_s
                self._join(request)
        while self._ends and (self._is_stale(self._ends[0]) or self._ends[0][0] <= self._step):
            entry = heapq.heappop(self._ends)
            if not self._is_stale(entry):
                finished.append(entry[2])
                self._leave(entry[2])
        for request in finished:
            request.finished_s = self._clock.now_s
            self._on_finished(self, request)
        self._begin()

    def _admit(self, request: Request) -> bool:
        arrival = request.arrival
        num_tokens = arrival.prompt_tokens + request.num_generated
        if not self.kv.fits(arrival.prefix, arrival.prefix_tokens, num_tokens + self._num_decoding):
            return False
        cached = self.kv.cached_tokens(request.index, arrival.prefix, arrival.prefix_tokens, num_tokens)
        self.kv.take(request.index, arrival.prefix, arrival.prefix_tokens, num_tokens)
        request.num_to_read = num_tokens - cached
        if request.started_s is None:
            request.started_s = self._clock.now_s
            request.cached_tokens = min(cached, arrival.prefix_tokens)
        self._admitted[request.index] = request
        self._reading.append(request)
        return True

    def _read(self, request: Request, budget: int) -> int:
        number = min(budget, request.num_to_read)
        self._reads.append((request, number))
        return number

    def _join(self, request: Request) -> None:
        """Its prompt is read, so this step gave the next token; it decodes from now on."""
        request.num_generated += 1
        request.join_step = self._step
        request.finish_step = self._step + request.arrival.output_tokens - request.num_generated
        self._num_decoding += 1
        self._context_tokens += self._stored(request)
        heapq.heappush(self._ends, (request.finish_step, request.index, request))

    def _stored(self, request: Request) -> int:
        """KV tokens of a decoding request: all it has but the last, which the next step stores."""
        return request.arrival.prompt_tokens + request.num_generated - 1 + self._step - request.join_step

    def _leave(self, request: Request) -> None:
        stored = self._stored(request)
        request.num_generated += self._step - request.join_step
        self._num_decoding -= 1
        self._context_tokens -= stored
        del self._admitted[request.index]
        self.kv.release(request.index, request.arrival.prefix, request.arrival.prefix_tokens, stored)

    def _preempt(self) -> None:
        request = next(reversed(self._admitted.values()))
        if request.num_to_read:
            del self._admitted[request.index]
            self._reading.pop()
            stored = request.arrival.prompt_tokens + request.num_generated
            self.kv.release(request.index, request.arrival.prefix, request.arrival.prefix_tokens, stored)
            self.kv.forget(request.index)
        else:
            self._leave(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _next_end(self) -> int:
        while self._is_stale(self._ends[0]):
            heapq.heappop(self._ends)
        return self._ends[0][0]

    def _is_stale(self, entry: tuple[int, int, Request]) -> bool:
        step, index, request = entry
        return index not in self._admitted or request.num_to_read > 0 or request.finish_step != step
