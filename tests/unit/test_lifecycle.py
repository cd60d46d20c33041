"""Children that are never orphaned, the one stop event, and pauses that grow."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.lifecycle import Backoff, ChildProcess, stop_event, unless_stopped, wait_first

WITHIN_S = 20.0
"""Deadline of everything waited for; nothing here takes a second on an idle machine."""

IGNORES_SIGTERM = r"""
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
os.write(1, b"%d\n" % os.getpid())
time.sleep(600)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def is_gone(pid: int) -> bool:
    """Whether the process has ended; a zombie whose parent does not reap has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.01)


class Lines:
    """Collects lines; `count` waits for that many."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)

    async def count(self, number: int) -> list[str]:
        await until(lambda: len(self.lines) >= number)
        return self.lines


async def test_output_comes_line_by_line_and_its_end_is_kept() -> None:
    lines = Lines()
    code = (
        "import sys; [print('line', n, flush=True) for n in range(100)]; print('oh no', file=sys.stderr); sys.exit(3)"
    )
    async with ChildProcess(python(code), name="printer", on_line=lines) as child:
        assert await asyncio.wait_for(child.wait(), WITHIN_S) == 3
        assert child.tail().splitlines()[-2:] == ["line 99", "oh no"]
        assert len(child.tail().splitlines()) == 60
        assert len(lines.lines) == 101
        assert child.returncode == 3


async def test_last_words_are_kept_when_it_is_stopped() -> None:
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(print('bye')));"
        "print('up', flush=True); time.sleep(60)"
    )
    lines = Lines()
    async with ChildProcess(python(code), name="polite", on_line=lines) as child:
        await lines.count(1)
        await child.stop()
        assert child.tail() == "up\nbye"
        assert child.returncode == 0


async def test_bytes_that_are_no_text_and_endless_lines_stop_nothing() -> None:
    code = r"import sys; w = sys.stdout.buffer.write; w(b'\xff\xfe\n'); w(b'x' * 300_000 + b'\n'); w(b'end\n')"
    async with ChildProcess(python(code), name="noise") as child:
        assert await asyncio.wait_for(child.wait(), WITHIN_S) == 0
        lines = child.tail().splitlines()
    assert lines[0] == "\ufffd\ufffd"
    assert lines[-1] == "end"


async def test_a_listener_that_fails_does_not_stop_the_reading() -> None:
    def listen(line: str) -> None:
        raise ValueError(line)

    code = "import sys; sys.stdout.write(('x' * 10_000 + '\\n') * 40)"  # several times what a pipe holds
    async with ChildProcess(python(code), name="heard", on_line=listen) as child:
        assert await asyncio.wait_for(child.wait(), WITHIN_S) == 0
        assert len(child.tail().splitlines()) == 40


async def test_stop_asks_with_the_stop_signal_and_may_come_twice() -> None:
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, lambda *_: sys.exit(7));"
        "print('up', flush=True); signal.pause()"
    )
    lines = Lines()
    async with ChildProcess(python(code), name="c", stop_signal=signal.SIGINT, on_line=lines) as child:
        await lines.count(1)
        await child.stop()
        assert child.returncode == 7
        await child.stop()
        child.send_signal(signal.SIGTERM)


async def test_a_group_that_ignores_sigterm_is_killed_whole() -> None:
    lines = Lines()
    async with ChildProcess(python(IGNORES_SIGTERM), name="deaf", stop_timeout_s=0.2, on_line=lines) as child:
        pids = {int(line) for line in await lines.count(2)}
        await child.stop()
        assert child.returncode == -signal.SIGKILL
    assert child.pid in pids
    await until(lambda: all(is_gone(pid) for pid in pids))


async def test_what_a_dead_child_left_in_its_group_is_killed_too() -> None:
    code = IGNORES_SIGTERM.replace("time.sleep(600)", "child == 0 and time.sleep(600)")
    lines = Lines()
    async with ChildProcess(python(code), name="parent", on_line=lines) as child:
        pids = {int(line) for line in await lines.count(2)}
        assert await asyncio.wait_for(child.wait(), WITHIN_S) == 0
        (orphan,) = pids - {child.pid}
        assert not is_gone(orphan)
    await until(lambda: is_gone(orphan))


async def test_wait_ends_with_the_child_though_its_child_keeps_the_pipe() -> None:
    """A descendant in a session of its own is out of reach; nobody may wait for its end."""
    code = (
        "import os, time\n"
        "child = os.fork()\n"
        "if child == 0: os.setsid(); print(os.getpid(), flush=True); time.sleep(600)\n"
        "time.sleep(0.05)\n"
    )
    lines = Lines()
    async with ChildProcess(python(code), name="daemon", on_line=lines) as child:
        assert await asyncio.wait_for(child.wait(), WITHIN_S) == 0
        escaped = int((await lines.count(1))[0])
        try:
            assert not is_gone(escaped)
            await asyncio.wait_for(child.stop(), WITHIN_S)
        finally:
            os.kill(escaped, signal.SIGKILL)


async def test_is_stopped_when_the_block_fails_or_is_cancelled() -> None:
    entered = asyncio.Event()
    pids: list[int] = []

    async def run() -> None:
        async with ChildProcess(python("import time; time.sleep(600)"), name="sleeper") as child:
            pids.append(child.pid)
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await asyncio.wait_for(entered.wait(), WITHIN_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, WITHIN_S)
    assert is_gone(pids[0])


async def test_a_program_that_is_not_there_raises() -> None:
    with pytest.raises(FileNotFoundError):
        async with ChildProcess(["/nowhere/at/all"], name="ghost"):
            pass
    with pytest.raises(RuntimeError, match="not started"):
        _ = ChildProcess(["true"], name="new").pid


@pytest.mark.skipif(sys.platform != "linux", reason="a Linux kernel's promise")
async def test_a_child_dies_with_a_parent_that_was_killed() -> None:
    code = """
import asyncio
from headrace.lifecycle import ChildProcess
async def main():
    async with ChildProcess(["sleep", "600"], name="orphan") as child:
        print(child.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    lines = Lines()
    async with ChildProcess(python(code), name="parent", on_line=lines) as parent:
        pid = int((await lines.count(1))[0])
        assert not is_gone(pid)
        os.kill(parent.pid, signal.SIGKILL)
        await until(lambda: is_gone(pid))


STOPS = """
import asyncio
from headrace.lifecycle import stop_event
async def main():
    async with stop_event() as stop:
        print("up", flush=True)
        await stop.wait()
        print("stopping", flush=True)
        await asyncio.sleep({grace})
asyncio.run(main())
print("done", flush=True)
"""


async def test_the_first_signal_sets_the_stop_event() -> None:
    lines = Lines()
    async with ChildProcess(python(STOPS.format(grace=0)), name="service", on_line=lines) as child:
        await lines.count(1)
        child.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(child.wait(), WITHIN_S) == 0
        assert lines.lines == ["up", "stopping", "done"]


async def test_one_signal_that_arrives_twice_is_one() -> None:
    lines = Lines()
    async with ChildProcess(python(STOPS.format(grace=0.5)), name="service", on_line=lines) as child:
        await lines.count(1)
        for _ in range(3):
            child.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(child.wait(), WITHIN_S) == 0


async def test_a_later_second_signal_exits_at_once() -> None:
    lines = Lines()
    async with ChildProcess(python(STOPS.format(grace=600)), name="service", on_line=lines) as child:
        await lines.count(1)
        child.send_signal(signal.SIGTERM)
        await lines.count(2)
        async with asyncio.timeout(WITHIN_S):
            while child.returncode is None:
                child.send_signal(signal.SIGINT)
                await asyncio.sleep(0.1)
        assert child.returncode == 128 + signal.SIGINT


async def test_stop_event_leaves_no_handler_behind() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    async with stop_event((signal.SIGUSR1,)) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(stop.wait(), WITHIN_S)
    assert signal.getsignal(signal.SIGUSR1) == before


async def test_wait_first() -> None:
    one, other = asyncio.Event(), asyncio.Event()
    assert not await wait_first(one, other, timeout_s=0)
    asyncio.get_running_loop().call_soon(other.set)
    assert await wait_first(one, other, timeout_s=WITHIN_S)
    assert await wait_first(one, other)
    assert len(asyncio.all_tasks()) == 1


async def test_wait_first_leaves_no_task_when_cancelled() -> None:
    waiting = asyncio.create_task(wait_first(asyncio.Event(), asyncio.Event()))
    await asyncio.sleep(0)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    assert len(asyncio.all_tasks()) == 1


async def test_work_is_done_unless_stopped() -> None:
    stop, never = asyncio.Event(), asyncio.Event()
    cleaned: list[str] = []

    async def works(event: asyncio.Event) -> None:
        try:
            await event.wait()
        finally:
            await asyncio.sleep(0)  # what is undone at the end is waited for
            cleaned.append("up")

    async def fails() -> None:
        raise ValueError("wrong")

    done = asyncio.Event()
    done.set()
    assert await unless_stopped(works(done), stop)
    with pytest.raises(ValueError, match="wrong"):
        await unless_stopped(fails(), stop)
    asyncio.get_running_loop().call_soon(stop.set)
    assert not await unless_stopped(works(never), stop)
    assert not await unless_stopped(works(never), stop)  # told before it began
    assert cleaned == ["up"] * 2


async def test_work_ends_with_whoever_waits_for_it() -> None:
    before = asyncio.all_tasks()
    never = asyncio.Event()
    waiting = asyncio.create_task(unless_stopped(_forever(never), never))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert asyncio.all_tasks() == before


async def _forever(never: asyncio.Event) -> None:
    await never.wait()


async def test_backoff_doubles_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    backoff = Backoff(first_s=0.5, max_s=3)
    for _ in range(5):
        await backoff.pause()
    assert slept == [0.5, 1, 2, 3, 3]
    assert not backoff.is_over


def test_backoff_is_over_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    backoff = Backoff(first_s=1, max_s=1, for_s=2)
    assert not backoff.is_over
    now = 101.9
    assert not backoff.is_over
    now = 102.0
    assert backoff.is_over
