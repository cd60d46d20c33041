"""The deployment that is measured, and the machine it runs on."""

import asyncio
import contextlib
import os
import platform
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from rich.text import Text

from headrace.bus.server import BrokerInfo, discover
from headrace.cli.progress import Progress
from headrace.cli.render import console, safe
from headrace.cli.serving import run_until
from headrace.cli.stack import Plan, Stack, running_stack
from headrace.client import Client, connect
from headrace.errors import HeadraceError
from headrace.logs import configure_logging
from headrace.settings import Settings

__all__ = ["MODEL", "Ground", "Machine", "ground", "machine", "measure"]

MODEL: Final = "bench"
"""The model that the simulated engine serves."""

_NUM_KEPT_LINES: Final = 30

_T = TypeVar("_T")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where a measurement ran. `load` is the one-minute load average as it began: what else was running."""

    cpus: int
    load: float
    system: str
    python: str

    def __str__(self) -> str:
        """For people, on one line."""
        return f"{self.cpus} CPUs, load {self.load:.1f} at the start, {self.system}, Python {self.python}"


def machine() -> Machine:
    """This machine, now."""
    return Machine(
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        load=round(os.getloadavg()[0], 2),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
    )


class Ground:
    """A running deployment, its broker, and a client of it in this process."""

    def __init__(self, stack: Stack, broker: BrokerInfo, client: Client, settings: Settings) -> None:
        self.stack = stack
        self.broker = broker
        self.client = client
        self.settings = settings

    async def workers_ready(self, number: int) -> None:
        """Wait until so many workers would take a request."""
        await self.stack.wait_ready(asyncio.Event(), num_workers=number)

    def pid_of(self, name: str) -> int | None:
        """Process id of a part: `router`, `monitor` or `worker`."""
        parts = (*self.stack.services, *self.stack.workers)
        return next((part.pid for part in parts if part.name == name), None)


@contextlib.asynccontextmanager
async def ground(
    settings: Settings,
    progress: Progress,
    *,
    options: dict[str, str],
    engine: str = "sim",
    model: str = MODEL,
    num_workers: int = 1,
    max_concurrency: int | None = 64,
    has_notices: bool = True,
    http_port: int | None = None,
) -> AsyncIterator[Ground]:
    """A deployment on a broker and a directory of its own; all of it is gone at the end.

    With the simulated engine, unless another is named. With `http_port` it has a gateway there. Settings from the
    environment apply to its parts. Where it fails, the last lines of its parts are printed.
    """
    plan = Plan(
        model=model, engine=engine, num_workers=num_workers, max_concurrency=max_concurrency, options=options,
        has_notices=has_notices, http_port=http_port,
    )  # fmt: skip
    lines: deque[str] = deque(maxlen=_NUM_KEPT_LINES)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as state_dir:
        own = msgspec.structs.replace(
            settings, nats_url=None, nats_system_url=None, state_dir=state_dir, broker_port=0, worker_id=None,
            log_level="warning", http_host="127.0.0.1", monitor_port=0,
        )  # fmt: skip
        try:
            async with running_stack(
                own, plan, on_line=lambda name, line: lines.append(f"{name:<8} {line}"), on_step=progress.say
            ) as stack:
                await stack.wait_ready(asyncio.Event(), num_workers=num_workers)
                broker = discover(Path(state_dir))
                if broker is None:
                    raise HeadraceError("the broker of the measurement is gone")
                async with connect(stack.url, settings=own, name="headrace-bench") as client:
                    yield Ground(stack, broker, client, own)
        except Exception:
            for line in lines:
                console(stderr=True).print(Text(safe(line)), soft_wrap=True, style="dim")
            raise


def measure(body: Callable[[Progress], Awaitable[_T]]) -> _T:
    """Run a measurement to its end and return what it found; Ctrl-C or SIGTERM stop all of its processes first.

    Raises KeyboardInterrupt where it was stopped, and what the measurement raised.
    """
    configure_logging("bench", "error", json=False)
    found: list[_T] = []

    async def run(stop: asyncio.Event, started: asyncio.Event) -> None:  # never "started": a signal cancels it
        with Progress() as progress:
            found.append(await body(progress))

    if asyncio.run(run_until(run)):
        raise KeyboardInterrupt
    return found[0]
