"""The engine's own usage corrects the ledger, with a gap between the marks so that it does not flutter."""

import asyncio
from typing import cast

import pytest

from headrace.discipline.room import Room
from headrace.errors import EngineError
from headrace.worker import watermarks
from headrace.worker.engines.base import Engine, EngineUsage
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


class _FullThenSilent:
    """Says once that its memory is full, and then nothing any more."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def usage(self) -> EngineUsage:
        self.num_asked += 1
        if self.num_asked == 1:
            return EngineUsage(kv_usage_ratio=1.0)
        raise EngineError("the metrics are gone")


async def test_an_engine_whose_usage_cannot_be_read_any_more_is_not_above_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watermarks, "_EVERY_S", 0.0)
    marks, engine, said = Watermarks(), _FullThenSilent(), []
    is_open = asyncio.Event()

    def changed() -> None:
        said.append((engine.num_asked, marks.is_above))
        if not marks.is_above:
            is_open.set()

    following = asyncio.create_task(marks.follow(cast(Engine, engine), is_up=lambda: True, changed=changed))
    async with asyncio.timeout(5):
        await is_open.wait()
    following.cancel()
    assert said == [(1, True), (21, False)]


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
