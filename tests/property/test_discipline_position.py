"""Position is what the discipline would really start first, and costs one look at each queue."""

from collections.abc import Iterator, Mapping

from hypothesis import given
from hypothesis import strategies as st

from headrace.discipline.choice import QueueView, charge, order
from headrace.discipline.position import position
from headrace.discipline.shares import Shares
from headrace.schemas.subjects import LANES, QueueName

TOKENS = 1000
AGEING_S = 10.0

names = st.builds(QueueName, lane=st.sampled_from(LANES), queue=st.sampled_from(["a", "b", "c", "d"]))
backlogs = st.dictionaries(names, st.tuples(st.integers(1, 12), st.sampled_from([1.0, 2.0, 3.0, 5.0])), min_size=1)


def started_before(
    waiting: Mapping[QueueName, int], weights: Mapping[QueueName, float], queue: QueueName, num_ahead: int
) -> int:
    """By playing it: one request after another, all of one size, until the one in question starts."""
    left = dict(waiting)
    shares = Shares()
    num_own = 0
    for number in range(sum(waiting.values())):
        snapshot = [QueueView(name=name, num_waiting=count, weight=weights[name]) for name, count in left.items()]
        turn = order(snapshot, shares, ageing_s=AGEING_S)[0]
        if turn == queue and num_own == num_ahead:
            return number
        num_own += turn == queue
        charge(snapshot, shares, turn, TOKENS, ageing_s=AGEING_S)
        left[turn] -= 1
    raise AssertionError("it never started")


@given(backlogs, st.data())
def test_position_is_what_would_start_first(backlog: dict[QueueName, tuple[int, float]], data: st.DataObject) -> None:
    waiting = {name: number for name, (number, _) in backlog.items()}
    weights = {name: weight for name, (_, weight) in backlog.items()}
    queue = data.draw(st.sampled_from(sorted(waiting)))
    num_ahead = data.draw(st.integers(0, waiting[queue] - 1))
    expected = started_before(waiting, weights, queue, num_ahead)
    assert position(waiting, queue, num_ahead=num_ahead, weights=weights) == expected


class Counted(dict[QueueName, int]):
    """Counts how often somebody looks at an entry."""

    num_looks = 0

    def __getitem__(self, queue: QueueName) -> int:
        self.num_looks += 1
        return super().__getitem__(queue)

    def __iter__(self) -> Iterator[QueueName]:
        for queue in super().__iter__():
            self.num_looks += 1
            yield queue

    def items(self) -> Iterator[tuple[QueueName, int]]:  # type: ignore[override]
        for pair in super().items():
            self.num_looks += 1
            yield pair


def test_a_position_among_50_000_costs_one_look_at_each_queue() -> None:
    waiting = Counted({QueueName(queue=f"q{number}"): 782 for number in range(64)})
    assert sum(waiting.values()) >= 50_000
    last = QueueName(queue="q9")
    assert position(waiting, last, num_ahead=781) == 64 * 782 - 1
    assert waiting.num_looks <= 64


@given(st.integers(0, 781))
def test_a_heavier_queue_waits_less(num_ahead: int) -> None:
    mine, other = QueueName(queue="mine"), QueueName(queue="other")
    waiting = {mine: 782, other: 10_000}
    fair = position(waiting, mine, num_ahead=num_ahead)
    heavy = position(waiting, mine, num_ahead=num_ahead, weights={mine: 3.0})
    assert fair == 2 * num_ahead
    assert heavy == num_ahead + -(-num_ahead // 3)
