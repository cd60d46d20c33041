"""`make soak`: many random fault schedules, one after another, with the seeds of those that failed at the end."""

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from pathlib import Path

from headrace.bus.server import EmbeddedBroker
from tests.faults.playing import play
from tests.faults.schedules import draw

_PER_BROKER = 50
"""Schedules that share a broker; its store stays small that way."""


async def soak(num_schedules: int, first_seed: int, *, is_in_process: bool) -> list[int]:
    """Play schedules of consecutive seeds; the seeds that failed."""
    failed: list[int] = []
    began = time.monotonic()
    for start in range(first_seed, first_seed + num_schedules, _PER_BROKER):
        with tempfile.TemporaryDirectory() as state_dir:
            async with EmbeddedBroker(Path(state_dir), port=0) as broker:
                for seed in range(start, min(start + _PER_BROKER, first_seed + num_schedules)):
                    schedule = draw(seed, has_processes=False if is_in_process else None)
                    try:
                        problems = await play(schedule, broker.info)
                    except Exception as error:  # noqa: BLE001  # a defect of the harness must not end the soak
                        problems = [f"{type(error).__name__}: {error}"]
                    if problems:
                        failed.append(seed)
                        print(schedule.describe(), *problems, sep="\n", flush=True)
                    done = seed - first_seed + 1
                    if done % 10 == 0 or done == num_schedules:
                        print(f"{done} of {num_schedules}, {len(failed)} failed, {time.monotonic() - began:.0f} s", flush=True)
    return failed


def main() -> None:
    """Read the command line, soak, exit 0 only if no schedule failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--in-process", action="store_true", help="no schedule with processes of its own")
    told = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    failed = asyncio.run(soak(told.schedules, told.first_seed, is_in_process=told.in_process))
    print(f"{told.schedules} schedules: {told.schedules - len(failed)} kept every promise, {len(failed)} did not", end="")
    print(f"; seeds: {failed}; replay one by `pytest tests/faults --fault-seed SEED`" if failed else "")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
