"""The measured capacity beside a model of a device: what it lets in always fits, whatever is seen late."""

import itertools
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.discipline.capacity import RISE_S, MeasuredCapacity, capacity_tokens

TOKEN_BYTES = 10


@dataclass(eq=False)
class Request:
    """One in the engine: tokens to the last one, of the prompt, allocated so far, and allocated as the worker saw."""

    need: int
    prompt: int
    allocated: int = 0
    seen: int = 0
    is_running: bool = True


class DeviceMachine(RuleBasedStateMachine):
    """The engine runs ahead of what the worker sees, and frees before or after the worker notes the end."""

    @initialize(
        tokens=st.integers(0, 300),
        reserve=st.integers(0, 50),
        block=st.sampled_from((1, 4, 16)),
        kept=st.booleans(),
    )
    def start(self, tokens: int, reserve: int, block: int, kept: bool) -> None:
        self.block, self.reserve_bytes, self.is_kept = block, reserve * TOKEN_BYTES, kept
        self.total_bytes = tokens * TOKEN_BYTES + self.reserve_bytes
        self.others_bytes = self.others_when_measured = 0
        self.now_s = 0.0
        self.here: list[Request] = []
        self.unfreed: list[Request] = []
        self.kept_tokens = 0
        self.capacity = MeasuredCapacity(
            bytes_per_token=TOKEN_BYTES, reserve_bytes=self.reserve_bytes, block_size=block, is_kept=kept
        )
        self.measure(0.0)

    @property
    def free_bytes(self) -> int:
        held = sum(each.allocated for each in self.here + self.unfreed)
        if self.is_kept:
            held = self.kept_tokens = max(self.kept_tokens, held)
        return max(0, self.total_bytes - self.others_bytes - held * TOKEN_BYTES)

    @rule(passed_s=st.floats(0.1, 3))
    def measure(self, passed_s: float) -> None:
        self.now_s += passed_s
        unread = [each for each in self.here if not each.seen]
        self.capacity.note(
            self.free_bytes,
            num_running=len(self.here),
            allocated_tokens=sum(each.seen for each in self.here),
            pending_tokens=sum(each.prompt for each in unread),
            now_s=self.now_s,
        )
        self.others_when_measured = self.others_bytes

    @rule(num_blocks=st.integers(1, 8), prompt_share=st.floats(0, 1))
    def ask_for_a_place(self, num_blocks: int, prompt_share: float) -> None:
        need = num_blocks * self.block
        if sum(each.need for each in self.here) + self.capacity.unseen_tokens + need > self.capacity.tokens:
            return
        prompt = max(self.block, int(prompt_share * num_blocks) * self.block)
        self.here.append(Request(need, prompt))
        promised = sum(each.need if each.is_running else 0 for each in self.here)
        unfreed = 0 if self.is_kept else sum(each.allocated for each in self.unfreed)
        memory = self.total_bytes - self.others_when_measured - self.reserve_bytes
        assert (promised + unfreed) * TOKEN_BYTES <= memory, "it would run out of memory"

    @precondition(lambda self: any(each.is_running for each in self.here))
    @rule(data=st.data(), blocks=st.integers(1, 8))
    def engine_goes_on(self, data: st.DataObject, blocks: int) -> None:
        request = data.draw(st.sampled_from([each for each in self.here if each.is_running]))
        request.allocated = min(request.need, request.allocated + blocks * self.block)
        assert self.free_bytes >= 0

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def worker_sees(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.here))
        if request.allocated >= request.prompt:
            request.seen = data.draw(st.integers(max(request.seen, request.prompt), request.allocated))

    @precondition(lambda self: any(each.is_running for each in self.here))
    @rule(data=st.data())
    def engine_frees_before_the_worker_knows(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from([each for each in self.here if each.is_running]))
        request.is_running, request.allocated = False, 0

    @precondition(lambda self: self.here)
    @rule(data=st.data(), late=st.booleans())
    def worker_releases(self, data: st.DataObject, late: bool) -> None:
        request = data.draw(st.sampled_from(self.here))
        self.here.remove(request)
        self.capacity.release(request.need)
        if late and request.is_running:
            self.unfreed.append(request)

    @precondition(lambda self: self.unfreed)
    @rule()
    def engine_frees_late(self) -> None:
        self.unfreed.clear()

    @rule(tokens=st.integers(0, 100))
    def others_have(self, tokens: int) -> None:
        """Where the engine keeps what ended, what is missing then is taken for its own: others do not take then."""
        if self.is_kept and self.capacity.unseen_tokens:
            return
        held = sum(each.allocated for each in self.here + self.unfreed)
        most_bytes = self.total_bytes - max(held, self.kept_tokens) * TOKEN_BYTES
        self.others_bytes = max(0, min(tokens * TOKEN_BYTES, most_bytes))
        if self.is_kept:
            self.measure(0.1)

    @invariant()
    def it_is_whole_blocks_and_never_negative(self) -> None:
        assert self.capacity.tokens >= 0
        assert self.capacity.tokens % self.block == 0
        assert self.capacity.tokens <= self.capacity.peak_tokens


TestDevice = DeviceMachine.TestCase


@given(
    total=st.integers(0, 10**6),
    reserve=st.integers(0, 10**5),
    block=st.integers(1, 64),
    shares=st.lists(st.floats(0, 1), max_size=5),
)
def test_our_own_requests_do_not_change_it(total: int, reserve: int, block: int, shares: list[float]) -> None:
    def tokens(allocated: int) -> int:
        return capacity_tokens(
            free_bytes=total - allocated * TOKEN_BYTES,
            reserve_bytes=reserve,
            bytes_per_token=TOKEN_BYTES,
            allocated_tokens=allocated,
            block_size=block,
        )

    empty = tokens(0)
    assert {tokens(int(share * empty)) for share in shares} <= {empty}


@given(
    taken=st.lists(st.integers(0, 1000), min_size=1, max_size=20),
    every_s=st.floats(0.1, 1.0),
    is_busy=st.booleans(),
)
def test_what_others_take_is_gone_at_once_and_back_after_a_while(
    taken: list[int], every_s: float, is_busy: bool
) -> None:
    capacity = MeasuredCapacity(bytes_per_token=TOKEN_BYTES, reserve_bytes=0)
    now_s = 0.0
    for tokens in taken:
        capacity.note((1000 - tokens) * TOKEN_BYTES, num_running=is_busy, allocated_tokens=0, now_s=now_s)
        assert capacity.tokens <= 1000 - tokens
        now_s += every_s
    for _ in range(int(RISE_S / every_s) + 2):
        capacity.note(1000 * TOKEN_BYTES, num_running=is_busy, allocated_tokens=0, now_s=now_s)
        now_s += every_s
    assert capacity.tokens >= (1000 - 1000 // 64 if is_busy else 1000)
    capacity.note(1000 * TOKEN_BYTES, num_running=0, allocated_tokens=0, now_s=now_s)
    assert capacity.tokens == 1000


@given(noise=st.lists(st.integers(-50, 50), min_size=2, max_size=50))
def test_noise_does_not_make_it_flutter_beside_running_requests(noise: list[int]) -> None:
    capacity = MeasuredCapacity(bytes_per_token=TOKEN_BYTES, reserve_bytes=0)
    seen = []
    for number, tokens in enumerate(noise):
        capacity.note((10_000 + tokens) * TOKEN_BYTES, num_running=1, allocated_tokens=0, now_s=number / 2)
        seen.append(capacity.tokens)
    assert all(later <= earlier for earlier, later in itertools.pairwise(seen))


@given(st.lists(st.tuples(st.integers(1, 1000), st.booleans()), max_size=30))
def test_it_stands_still_while_requests_fill_their_memory_and_end(ends: list[tuple[int, bool]]) -> None:
    """No wait of `RISE_S` for what was free before, nothing lost for good; a release is room once it is seen."""
    capacity = MeasuredCapacity(bytes_per_token=TOKEN_BYTES, reserve_bytes=0)
    capacity.note(1000 * TOKEN_BYTES, num_running=0, allocated_tokens=0, now_s=0.0)
    for number, (tokens, is_seen) in enumerate(ends, start=1):
        free_bytes, now_s = (1000 - tokens) * TOKEN_BYTES, 2.0 * number
        capacity.note(free_bytes, num_running=1, allocated_tokens=0, pending_tokens=tokens, now_s=now_s)
        assert capacity.tokens == 1000 - tokens, "its prompt may be all of it, or somebody else's"
        capacity.note(free_bytes, num_running=1, allocated_tokens=tokens, now_s=now_s + 0.5)
        assert capacity.tokens == 1000
        capacity.release(tokens)
        assert (capacity.tokens, capacity.unseen_tokens) == (1000, tokens)
        if is_seen:
            capacity.note(1000 * TOKEN_BYTES, num_running=0, allocated_tokens=0, now_s=now_s + 0.6)
            assert (capacity.tokens, capacity.unseen_tokens) == (1000, 0)
