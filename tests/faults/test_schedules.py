"""Random fault schedules: each accepted job ends once, and every reader sees every token once and in order."""

import pytest

from headrace.bus.server import BrokerInfo
from tests.faults.schedules import draw
from tests.faults.soak import play_all, report

IN_PROCESS = [range(6), range(6, 12)]
WITH_PROCESSES = range(12, 15)
AT_ONCE = 3


async def _check(seeds: range, broker: BrokerInfo, *, has_processes: bool | None) -> None:
    found = await play_all(seeds, broker, at_once=AT_ONCE, has_processes=has_processes)
    assert not found, "\n".join(report(seed, found[seed], has_processes=has_processes) for seed in found)


@pytest.mark.parametrize("seeds", IN_PROCESS, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
async def test_nothing_is_lost_or_doubled(broker: BrokerInfo, seeds: range, fault_seed: int | None) -> None:
    if fault_seed is not None:
        pytest.skip("one schedule is replayed alone")
    await _check(seeds, broker, has_processes=False)


async def test_nothing_is_lost_or_doubled_by_processes(broker: BrokerInfo, fault_seed: int | None) -> None:
    if fault_seed is not None:
        pytest.skip("one schedule is replayed alone")
    await _check(WITH_PROCESSES, broker, has_processes=True)


async def test_one_schedule(broker: BrokerInfo, fault_seed: int | None) -> None:
    if fault_seed is None:
        pytest.skip("no --fault-seed")
    await _check(range(fault_seed, fault_seed + 1), broker, has_processes=None)


def test_a_seed_gives_the_same_schedule_each_time() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert len({draw(seed).describe() for seed in range(50)}) == 50
