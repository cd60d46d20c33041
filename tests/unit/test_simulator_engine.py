"""The simulated engine against a model that takes every step by itself, and its cache."""

from collections import deque
from random import Random

import pytest

from headrace.simulator.clock import Clock
from headrace.simulator.engine import Engine
from headrace.simulator.kvcache import KvCache
from headrace.simulator.model import EngineModel
from headrace.simulator.requests import Request
from headrace.simulator.traces import Arrival

SMALL = EngineModel(
    kv_tokens=640, max_concurrency=4, max_step_tokens=64, weights_s=0.01, token_s=0.0005, context_token_s=1e-5
)


def ignore(engine: Engine, request: Request) -> None:
    pass


def run(model: EngineModel, arrivals: list[Arrival]) -> tuple[list[Request], Engine]:
    clock = Clock()
    engine = Engine("w0", model, clock, on_finished=ignore)
    requests = [Request(index, arrival, model.need_tokens(arrival)) for index, arrival in enumerate(arrivals)]
    for request in requests:
        clock.at(request.arrival.time_s, lambda request=request: engine.submit(request))  # type: ignore[misc]
    clock.run()
    return requests, engine


class Plain:
    """The same rules, one step at a time, without prefixes: (first token, end) of each request."""

    def __init__(self, model: EngineModel, arrivals: list[Arrival]) -> None:
        self.model = model
        self.coming = deque(enumerate(arrivals))
        self.waiting: deque[int] = deque()
        self.running: list[int] = []
        self.arrivals = arrivals
        self.generated = [0] * len(arrivals)
        self.stored = [0] * len(arrivals)
        self.left_to_read = [0] * len(arrivals)
        self.first_s = [0.0] * len(arrivals)
        self.end_s = [0.0] * len(arrivals)
        self.num_preemptions = 0
        self.now_s = 0.0

    def play(self) -> None:
        while self.coming or self.waiting or self.running:
            if not self.waiting and not self.running:
                self.now_s = max(self.now_s, self.coming[0][1].time_s)
            while self.coming and self.coming[0][1].time_s <= self.now_s:
                self.waiting.append(self.coming.popleft()[0])
            self.step()

    def step(self) -> None:
        capacity = self.model.kv_tokens
        has_preempted = False
        while len(self.decoding()) + self.used() > capacity:
            last = self.running.pop()
            self.waiting.appendleft(last)
            self.stored[last] = self.left_to_read[last] = 0
            self.num_preemptions += 1
            has_preempted = True
        decoding = self.decoding()
        budget = self.model.max_step_tokens - len(decoding)
        reading = [each for each in self.running if self.left_to_read[each]]
        while budget > sum(self.left_to_read[each] for each in reading) and self.waiting and not has_preempted:
            each = self.waiting[0]
            tokens = self.arrivals[each].prompt_tokens + self.generated[each]
            if len(self.running) == self.model.max_concurrency or self.used() + tokens + len(decoding) > capacity:
                break
            self.running.append(self.waiting.popleft())
            self.stored[each] = self.left_to_read[each] = tokens
            reading.append(each)
        context = sum(self.stored[each] for each in decoding)
        num_read = min(budget, sum(self.left_to_read[each] for each in reading))
        self.now_s += self.model.step_s(len(decoding), num_read, context)
        for each in decoding:
            self.stored[each] += 1
            self.generated[each] += 1
        for each in reading:
            number = min(num_read, self.left_to_read[each])
            num_read -= number
            self.left_to_read[each] -= number
            if not self.left_to_read[each] and number:
                self.first_s[each] = self.first_s[each] or self.now_s
                self.generated[each] += 1
        for each in list(self.running):
            if self.generated[each] == self.arrivals[each].output_tokens:
                self.running.remove(each)
                self.stored[each] = 0
                self.end_s[each] = self.now_s

    def decoding(self) -> list[int]:
        return [each for each in self.running if not self.left_to_read[each]]

    def used(self) -> int:
        return sum(self.stored)


@pytest.mark.parametrize("seed", range(30))
def test_closed_forms_are_what_single_steps_come_to(seed: int) -> None:
    random = Random(seed)
    time_s, arrivals = 0.0, []
    for _ in range(40):
        time_s += random.expovariate(3)
        arrivals.append(
            Arrival(time_s=time_s, prompt_tokens=random.randint(16, 200), output_tokens=random.randint(1, 150))
        )
    # Prompts are read anew after a preemption: there is nothing to cache in a whole block of so many tokens.
    plain = Plain(SMALL, arrivals)
    plain.play()
    model = EngineModel(**{**{name: getattr(SMALL, name) for name in SMALL.__struct_fields__}, "block_size": 1024})
    requests, engine = run(model, arrivals)
    assert engine.num_preemptions == plain.num_preemptions
    assert [request.first_token_s for request in requests] == pytest.approx(plain.first_s)
    assert [request.finished_s for request in requests] == pytest.approx(plain.end_s)


def test_one_request_takes_its_steps() -> None:
    (request,), engine = run(SMALL, [Arrival(time_s=2.0, prompt_tokens=100, output_tokens=3)])
    assert request.started_s == 2.0
    assert request.first_token_s is not None
    assert request.first_token_s == pytest.approx(2.0 + 64 * 0.0005 + 36 * 0.0005)
    assert request.finished_s == pytest.approx(request.first_token_s + 0.01 + 100e-5 + 0.01 + 101e-5)
    assert engine.kv.used_tokens == 0


def test_without_reserve_the_last_one_is_preempted_and_still_ends() -> None:
    arrivals = [Arrival(time_s=0.0, prompt_tokens=250, output_tokens=200) for _ in range(2)]
    requests, engine = run(SMALL, arrivals)
    assert [request.num_preemptions for request in requests] == [0, engine.num_preemptions]
    assert engine.num_preemptions >= 1
    assert requests[0].finished_s is not None
    assert requests[1].finished_s is not None
    assert requests[0].finished_s < requests[1].finished_s


def test_a_shared_prefix_is_read_once() -> None:
    arrivals = [
        Arrival(time_s=each, prompt_tokens=320, output_tokens=2, prefix="a", prefix_tokens=256) for each in (0.0, 5.0)
    ]
    (first, second), _ = run(SMALL, arrivals)
    assert (first.cached_tokens, second.cached_tokens) == (0, 256)
    assert second.first_token_s == pytest.approx(5.0 + 64 * 0.0005)


def test_the_cache_gives_way_from_the_end_of_what_was_used_first() -> None:
    cache = KvCache(capacity_tokens=160, block_size=16)
    for index, prefix in enumerate(("a", "b")):
        cache.take(index, prefix, 64, 70)
        cache.release(index, prefix, 64, 70)
    assert cache.cached_tokens(7, "a", 64, 100) == cache.cached_tokens(7, "b", 64, 100) == 64
    cache.take(2, "", 0, 60)
    assert cache.cached_tokens(7, "a", 64, 100) == 32
    assert cache.cached_tokens(7, "b", 64, 100) == 64
    assert not cache.fits("c", 64, 101)
    assert cache.fits("c", 64, 100)


def test_a_prefix_in_use_is_stored_once_and_stays() -> None:
    cache = KvCache(capacity_tokens=160, block_size=16)
    cache.take(0, "a", 64, 70)
    assert cache.fits("a", 64, 64 + 90)
    cache.take(1, "a", 64, 80)
    assert cache.used_tokens == 64 + 6 + 16
    cache.release(0, "a", 64, 70)
    cache.grow(74)
    assert cache.cached_tokens(7, "a", 64, 100) == 64
    assert cache.used_tokens == 64 + 16 + 74
    cache.release(1, "a", 64, 154)
    assert cache.used_tokens == 0


def test_what_a_preempted_request_left_is_found_again_unless_it_was_never_computed() -> None:
    cache = KvCache(capacity_tokens=160, block_size=16)
    cache.take(0, "", 0, 100)
    cache.release(0, "", 0, 100)
    assert cache.cached_tokens(0, "", 0, 100) == 96
    cache.forget(0)
    assert cache.cached_tokens(0, "", 0, 100) == 0


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    cache = KvCache(capacity_tokens=160, block_size=16)
    cache.take(0, "a", 64, 64)
    assert cache.cached_tokens(1, "a", 64, 64) == 63
