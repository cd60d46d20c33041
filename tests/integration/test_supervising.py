"""A child that ended is started again, after a pause that grows only with failures."""

import asyncio
import os
import signal
import sys

import pytest

from headrace.cli.supervising import Supervised


@pytest.mark.parametrize(("code", "expected"), [(0, ["0.25 s"] * 3), (1, ["0.5 s", "1 s", "2 s"])])
async def test_only_failures_make_the_pauses_longer(
    code: int, expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    child = Supervised(
        "part",
        [sys.executable, "-c", f"raise SystemExit({code})"],
        env=os.environ,
        stop_timeout_s=5.0,
        death_signal=signal.SIGTERM,
        on_line=lambda name, line: None,
    )
    child.is_proven = True
    running = asyncio.create_task(child.run())

    def pauses() -> list[str]:
        return [record.getMessage().split(" again in ")[1] for record in caplog.records if " again in " in record.msg]

    async with asyncio.timeout(20):
        while len(pauses()) < 3:
            await asyncio.sleep(0.02)
        child.stop.set()
        await running
    assert pauses()[:3] == expected
