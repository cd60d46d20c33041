"""`make soak`: many random fault schedules, with the seeds of those that failed at the end."""

import argparse
import asyncio
import logging
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.bus.server import BrokerInfo, EmbeddedBroker
from tests.faults.lossy import lossy_bus
from tests.faults.playing import play
from tests.faults.schedules import draw

__all__ = ["play_all", "report"]

_PER_BROKER = 60
"""Schedules that share a broker; its store stays small that way."""


async def play_all(
    seeds: Sequence[int],
    broker: BrokerInfo,
    *,
    at_once: int,
    has_processes: bool | None = None,
    on_played: Callable[[int, list[str]], None] | None = None,
) -> dict[int, list[str]]:
    """Play the schedules of some seeds, several at once; what was wrong, by seed of those where anything was."""
    slots = asyncio.Semaphore(at_once)
    found: dict[int, list[str]] = {}

    async def one(seed: int) -> None:
        async with slots:
            try:
                problems = await play(draw(seed, has_processes=has_processes), broker)
            except Exception:  # a defect of the harness is a failure of this schedule alone
                problems = [traceback.format_exc()]
        if problems:
            found[seed] = problems
        if on_played is not None:
            on_played(seed, problems)

    with lossy_bus():
        async with asyncio.TaskGroup() as group:
            for seed in seeds:
                group.create_task(one(seed))
    return found


def report(seed: int, problems: list[str], *, has_processes: bool | None = None) -> str:
    """For a person: the seed, the schedule, and what was wrong."""
    return "\n".join(
        [
            f"seed {seed} failed; replay it by `pytest tests/faults --fault-seed {seed}`",
            draw(seed, has_processes=has_processes).describe(),
            *problems,
        ]
    )


async def soak(num_schedules: int, first_seed: int, *, at_once: int) -> list[int]:
    """Play schedules of consecutive seeds and say how it goes; the seeds that failed."""
    began = time.monotonic()
    played: list[int] = []
    failed: list[int] = []

    def on_played(seed: int, problems: list[str]) -> None:
        played.append(seed)
        if problems:
            failed.append(seed)
            print(report(seed, problems), flush=True)
        if len(played) % 10 == 0 or len(played) == num_schedules:
            print(
                f"{len(played)} of {num_schedules} played, {len(failed)} failed, {time.monotonic() - began:.0f} s",
                flush=True,
            )

    seeds = range(first_seed, first_seed + num_schedules)
    for start in range(0, num_schedules, _PER_BROKER):
        with tempfile.TemporaryDirectory() as state_dir:
            async with EmbeddedBroker(Path(state_dir), port=0) as broker:
                await play_all(seeds[start : start + _PER_BROKER], broker.info, at_once=at_once, on_played=on_played)
    return failed


def main() -> None:
    """Read the command line, soak, exit 0 only if no schedule failed."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=4)
    told = parser.parse_args()
    logging.getLogger().addHandler(logging.NullHandler())  # what is logged is looked at, not shown
    failed = asyncio.run(soak(told.schedules, told.first_seed, at_once=told.at_once))
    print(f"{told.schedules} schedules: {told.schedules - len(failed)} kept every promise, {len(failed)} did not")
    if failed:
        print(f"seeds that failed: {failed}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
