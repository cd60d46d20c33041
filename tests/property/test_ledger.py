"""The ledger under any order of reservations and releases."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.worker.ledger import Ledger


class LedgerMachine(RuleBasedStateMachine):
    """Keeps beside the ledger what it should say."""

    @initialize(capacity=st.none() | st.integers(0, 200), max_concurrency=st.integers(1, 5))
    def start(self, capacity: int | None, max_concurrency: int) -> None:
        self.capacity, self.max_concurrency = capacity, max_concurrency
        self.ledger = Ledger(capacity_tokens=capacity, max_concurrency=max_concurrency)
        self.needs: dict[int, int] = {}

    @rule(sequence=st.integers(1, 8), need=st.integers(0, 250))
    def reserve(self, sequence: int, need: int) -> None:
        has_room = self.capacity is None or sum(self.needs.values()) + need <= self.capacity
        should = sequence not in self.needs and len(self.needs) < self.max_concurrency and has_room
        assert self.ledger.room().fits(need) == (len(self.needs) < self.max_concurrency and has_room)
        try:
            self.ledger.reserve(sequence, need)
        except ValueError:
            assert not should
        else:
            assert should
            self.needs[sequence] = need

    @rule(sequence=st.integers(1, 8), times=st.integers(1, 2))
    def release(self, sequence: int, times: int) -> None:
        for _ in range(times):
            self.ledger.release(sequence)
        self.needs.pop(sequence, None)

    @invariant()
    def holds_what_it_promised_and_no_more(self) -> None:
        assert self.ledger.reserved_tokens == sum(self.needs.values())
        assert self.ledger.num_running == len(self.needs) <= self.max_concurrency
        assert self.capacity is None or self.ledger.reserved_tokens <= self.capacity

    @invariant()
    def one_more_token_fits_where_a_slot_and_memory_are_left(self) -> None:
        is_memory_left = self.capacity is None or self.ledger.reserved_tokens < self.capacity
        assert self.ledger.room().fits(1) == (self.ledger.num_running < self.max_concurrency and is_memory_left)

    @invariant()
    def what_fits_now_could_always_fit(self) -> None:
        for need in (0, 1, 50, 200):
            assert self.ledger.room().fits(need) <= self.ledger.room().could_ever_fit(need)


TestLedger = LedgerMachine.TestCase
