"""The gate under any order of arrivals, ends, capacity changes and looks: memory is never promised twice."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from headrace.schemas.subjects import LANES, Lane, QueueName
from headrace.worker.gate import Gate
from headrace.worker.ledger import Ledger

AGEING_S = 1000.0


@dataclass(eq=False)
class Request:
    """What the gate needs of a held message."""

    lane: Lane
    need_tokens: int
    is_waiting: bool = False
    delivery: SimpleNamespace = field(init=False)

    def __post_init__(self) -> None:
        self.delivery = SimpleNamespace(queue=QueueName("default", self.lane, "default"), sequence=1)


class GateMachine(RuleBasedStateMachine):
    """Requests come, are asked about again, end, and are handed back."""

    requests = Bundle("requests")

    @initialize(capacity=st.none() | st.integers(1, 100), max_concurrency=st.integers(1, 5))
    def start(self, capacity: int | None, max_concurrency: int) -> None:
        self.ledger = Ledger(capacity_tokens=capacity, max_concurrency=max_concurrency)
        self.gate = Gate(self.ledger, ageing_s=AGEING_S, on_change=lambda: None)
        self.here: list[Request] = []
        self.has_shrunk = False
        self.is_down = False

    def is_in(self, request: Request) -> bool:
        return request in self.gate  # type: ignore[operator]

    @rule(target=requests, lane=st.sampled_from(LANES), need=st.integers(1, 120), interrupted=st.booleans())
    def arrive(self, lane: Lane, need: int, interrupted: bool) -> Request:
        request = Request(lane, need)
        self.here.append(request)
        is_in = self.gate.enter(request, need, is_interrupted=interrupted)  # type: ignore[arg-type]
        assert is_in == self.is_in(request)
        assert not (is_in and self.is_down)
        return request

    @rule(request=requests)
    def ask_again(self, request: Request) -> None:
        if request in self.here:
            is_in = self.gate.enter(request, request.need_tokens, is_interrupted=False)  # type: ignore[arg-type]
            assert is_in == self.is_in(request)

    @rule(request=requests, times=st.integers(1, 2))
    def leave(self, request: Request, times: int) -> None:
        for _ in range(times):
            self.gate.leave(request)  # type: ignore[arg-type]
        if request in self.here:
            self.here.remove(request)

    @rule(capacity=st.integers(1, 100))
    def come_back_with_another_capacity(self, capacity: int) -> None:
        if self.ledger.capacity_tokens is not None:
            self.has_shrunk = self.has_shrunk or capacity < self.ledger.reserved_tokens
            self.ledger.capacity_tokens = capacity
            self.gate.look()

    @rule(ratio=st.floats(0, 1))
    def pass_a_mark(self, ratio: float) -> None:
        self.gate.marks.note(ratio)
        self.gate.look()

    @rule()
    def engine_goes_down(self) -> None:
        self.gate.pause()
        self.is_down = True

    @rule()
    def engine_comes_back(self) -> None:
        self.gate.resume()
        self.is_down = False

    @invariant()
    def needs_never_exceed_the_capacity(self) -> None:
        reserved = sum(request.need_tokens for request in self.here if self.is_in(request))
        assert self.ledger.reserved_tokens == reserved
        assert self.ledger.num_running <= self.ledger.max_concurrency
        if self.ledger.capacity_tokens is not None and not self.has_shrunk:
            assert reserved <= self.ledger.capacity_tokens

    @invariant()
    def everybody_is_in_or_waits(self) -> None:
        num_in = sum(self.is_in(request) for request in self.here)
        assert len(self.gate.waiters) == len(self.here) - num_in
        for request in self.here:
            assert request.is_waiting == (not self.is_in(request))

    @invariant()
    def nobody_waits_who_could_start_alone(self) -> None:
        if self.ledger.num_running == 0 and not self.gate.marks.is_above and not self.is_down:
            capacity = self.ledger.capacity_tokens
            assert not [waiter for waiter in self.gate.waiters if capacity is None or waiter.need_tokens <= capacity]


TestGate = GateMachine.TestCase
