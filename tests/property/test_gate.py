"""The gate under any order of arrivals, ends, capacity changes and looks: memory is never promised twice, and nobody
stands beside one on probation who should not.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from headrace.discipline.company import NOBODY, Guest, Standing
from headrace.schemas.subjects import LANES, Lane, QueueName
from headrace.worker.gate import Gate
from headrace.worker.ledger import Ledger

AGEING_S = 1000.0
PATIENCE_S = 1000.0
GUESTS = [
    NOBODY,
    Guest(standing=Standing.CLEARED, patience_s=PATIENCE_S),
    Guest(standing=Standing.CLEARED, patience_s=PATIENCE_S, is_suspect=True),
    Guest(standing=Standing.UNPROVEN, patience_s=PATIENCE_S, proof_tokens=1, was_engine=True),
    Guest(standing=Standing.UNPROVEN, patience_s=PATIENCE_S, proof_tokens=2, is_suspect=True),
]


@dataclass(eq=False)
class Request:
    """What the gate needs of a held message."""

    lane: Lane
    need_tokens: int
    guest: Guest
    is_waiting: bool = False
    is_backing_off: bool = False
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
        self.is_stopped = False

    def is_in(self, request: Request) -> bool:
        return request in self.gate  # type: ignore[operator]

    @rule(
        target=requests,
        lane=st.sampled_from(LANES),
        need=st.integers(1, 120),
        interrupted=st.booleans(),
        guest=st.sampled_from(GUESTS),
    )
    def arrive(self, lane: Lane, need: int, interrupted: bool, guest: Guest) -> Request:
        request = Request(lane, need, guest)
        self.here.append(request)
        is_in = self.gate.enter(request, need, is_interrupted=interrupted, guest=guest)  # type: ignore[arg-type]
        assert is_in == self.is_in(request)
        assert not (is_in and (self.is_down or self.is_stopped))
        return request

    @rule(request=requests)
    def ask_again(self, request: Request) -> None:
        if request in self.here:
            is_in = self.gate.enter(request, request.need_tokens, is_interrupted=False)  # type: ignore[arg-type]
            assert is_in == self.is_in(request)

    @rule(request=requests, num_tokens=st.integers(0, 2))
    def make_tokens(self, request: Request, num_tokens: int) -> None:
        was_in = self.is_in(request)
        self.gate.note_progress(request, num_tokens)  # type: ignore[arg-type]
        if was_in:
            request.guest = request.guest.after(num_tokens)

    @rule()
    def look_later(self) -> None:
        """The time of grace passes for all at the gate."""
        self.wait(1.0)

    def wait(self, seconds: float) -> None:
        for waiting in self.gate._waiting.values():
            waiting.since -= seconds
        self.gate.look()

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
        self.gate.pause("engine")
        self.is_down = True

    @rule()
    def engine_comes_back(self) -> None:
        self.gate.resume("engine")
        self.is_down = False

    @rule()
    def somebody_pauses_the_model(self) -> None:
        self.gate.pause("operator")
        self.is_stopped = True

    @rule()
    def somebody_resumes_the_model(self) -> None:
        self.gate.resume("operator")
        self.is_stopped = False

    @invariant()
    def either_reason_is_enough(self) -> None:
        assert self.gate.is_paused == (self.is_down or self.is_stopped)

    @invariant()
    def needs_never_exceed_the_capacity(self) -> None:
        reserved = sum(request.need_tokens for request in self.here if self.is_in(request))
        assert self.ledger.reserved_tokens == reserved
        assert self.ledger.num_running <= self.ledger.max_concurrency
        if self.ledger.capacity_tokens is not None and not self.has_shrunk:
            assert reserved <= self.ledger.capacity_tokens

    @invariant()
    def everybody_is_in_or_waits(self) -> None:
        assert len(self.gate.waiters) == sum(request.is_waiting for request in self.here)
        for request in self.here:
            assert not (request.is_waiting and self.is_in(request))
            is_kept_out = not request.is_waiting and not self.is_in(request)
            assert not (is_kept_out and not request.guest.has_fault)
            assert not (request.is_backing_off and not is_kept_out)

    @invariant()
    def company_is_fit_and_counted(self) -> None:
        inside = [request.guest for request in self.here if self.is_in(request)]
        assert self.gate.num_unproven == sum(guest.is_unproven for guest in inside) <= 1
        assert sum(guest.is_suspect for guest in inside) <= 1
        assert self.gate.num_faulted == sum(request.guest.has_fault for request in self.here)
        assert not (self.gate.num_unproven and any(guest.standing is Standing.CLEARED for guest in inside))

    @invariant()
    def nobody_waits_who_could_start_alone(self) -> None:
        if self.ledger.num_running == 0 and not self.gate.marks.is_above and not self.gate.is_paused:
            capacity = self.ledger.capacity_tokens
            assert not [waiter for waiter in self.gate.waiters if capacity is None or waiter.need_tokens <= capacity]


TestGate = GateMachine.TestCase
