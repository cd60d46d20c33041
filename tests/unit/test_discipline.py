"""Which queue a free worker takes from next."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.subjects import LANES, QueueName
from headrace.worker.discipline import order

queues = st.builds(
    QueueName, st.sampled_from(["default", "batch"]), st.sampled_from(LANES), st.sampled_from(["a", "b", "c"])
)


def named(lane: str, queue: str) -> QueueName:
    return QueueName("default", lane, queue)  # type: ignore[arg-type]


def test_lanes_are_strict() -> None:
    waiting = {named("low", "a"): 9, named("normal", "a"): 9, named("high", "z"): 1}
    served = {named("high", "z"): 99}
    assert [queue.lane for queue in order(waiting, last_served=served)] == ["high", "normal", "low"]


def test_queues_of_a_lane_take_turns() -> None:
    """50 jobs of one tenant and 5 of another: the last of the 5 starts tenth at the latest (case QUE-3)."""
    waiting = {named("normal", "a"): 50, named("normal", "b"): 5}
    served: dict[QueueName, int] = {}
    starts = []
    for turn in range(12):
        queue = order(waiting, last_served=served)[0]
        served[queue] = turn
        waiting[queue] -= 1
        starts.append(queue.queue)
    assert starts[:10].count("b") == 5


@given(st.dictionaries(queues, st.integers(0, 3)), st.dictionaries(queues, st.integers(0, 9)))
def test_order_holds_every_queue_with_something_once(
    waiting: dict[QueueName, int], served: dict[QueueName, int]
) -> None:
    ordered = order(waiting, last_served=served)
    assert sorted(ordered) == sorted(queue for queue, number in waiting.items() if number)
    ranks = [LANES.index(queue.lane) for queue in ordered]
    assert ranks == sorted(ranks)
    for before, after in pairwise(ordered):
        if before.lane == after.lane:
            assert served.get(before, -1) <= served.get(after, -1)
