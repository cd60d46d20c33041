"""The engine's own usage corrects the ledger, with a gap between the marks so that it does not flutter."""

import pytest

from headrace.discipline.room import Room
from headrace.worker.watermarks import Watermarks, effective_concurrency


def test_above_the_high_mark_nothing_starts_until_below_the_low_one() -> None:
    marks = Watermarks()
    assert [marks.note(ratio) for ratio in (0.5, 0.94, 0.95, 0.99, 0.9, 0.86, 0.85, 0.9)] == [
        False, False, True, False, False, False, True, False,
    ]  # fmt: skip
    assert not marks.is_above


def test_an_engine_that_stops_telling_is_not_above() -> None:
    marks = Watermarks()
    assert marks.note(1.0)
    assert marks.note(None)
    assert not marks.is_above


@pytest.mark.parametrize(
    ("capacity", "usual", "expected"), [(1000, 400, 2), (1000, 100, 4), (1000, 5000, 1), (None, 400, 4)]
)
def test_memory_bounds_what_concurrency_asks_for(capacity: int | None, usual: float, expected: int) -> None:
    """MEM-8: configured 4, memory allows fewer."""
    room = Room(capacity_tokens=capacity, max_concurrency=4)
    assert effective_concurrency(room, usual_need_tokens=usual) == expected


def test_above_the_high_mark_it_is_what_runs() -> None:
    room = Room(capacity_tokens=1000, max_concurrency=4, num_running=2, is_above_high_water=True)
    assert effective_concurrency(room, usual_need_tokens=1) == 2
