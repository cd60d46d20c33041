"""A worker of a slot as a child process: its command line and its environment."""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final, Protocol, Self

import msgspec

from headrace.bus.connection import Bus
from headrace.lifecycle import ChildProcess
from headrace.schemas.replicas import ReplicaGroup
from headrace.settings import Settings

__all__ = ["Child", "Launch", "Order", "command_of", "environment_of", "process_launcher"]

_COMMAND: Final = (sys.executable, "-P", "-m", "headrace.cli")
"""This program again; -P, so that no folder of the current directory is taken for it."""
_STOP_MARGIN_S: Final = 5.0
"""What a worker gets beyond its grace period to hand back and leave."""
_OURS_ALONE: Final = frozenset({"--nats-url", "--prefix", "--state-dir"})
"""With one of these a worker would show our credential to another broker, or work where we never hear of it."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One worker to start: its id, what it serves, how, and the device whose memory it was promised."""

    worker: str
    model: str
    group: ReplicaGroup
    device: str


class Child(Protocol):
    """A worker while it runs: entering starts it; leaving tells it to drain, waits its grace period, and kills it."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    async def wait(self) -> int:
        """Its exit code, once it ended."""
        ...

    def tail(self) -> str:
        """The last lines it printed."""
        ...


Launch = Callable[[Order], Child]
"""Makes the child of an order, not yet started."""


def process_launcher(bus: Bus, *, log_format: str) -> Launch:
    """Launches `headrace serve worker`; its lines go to our stderr.

    It shows the broker our credential. Where we are killed, the kernel tells it to drain (Linux).
    """

    def launch(order: Order) -> Child:
        return ChildProcess(
            command_of(order, log_format=log_format),
            name=f"worker {order.worker}",
            env=environment_of(order, bus.url, bus.settings, inherited=os.environ),
            stop_timeout_s=bus.settings.grace_s + _STOP_MARGIN_S,
            death_signal=signal.SIGTERM,
            on_line=_show,
        )

    return launch


def command_of(order: Order, *, log_format: str) -> list[str]:
    """The command line. What the agent says comes last, and so before what the group's arguments say of the same.

    Raises ValueError for arguments that say whose worker it is.
    """
    for word in order.group.args:
        if (flag := word.partition("=")[0]) in _OURS_ALONE:
            raise ValueError(f"its args have {flag}, which the host agent alone decides")
    identity = [f"--model={order.model}", f"--pool={order.group.pool}", f"--worker-id={order.worker}"]
    return [
        *_COMMAND, "serve", "worker", *order.group.args,
        "--engine", order.group.engine, *identity, "--log-format", log_format,
    ]  # fmt: skip


def environment_of(order: Order, url: str, settings: Settings, *, inherited: Mapping[str, str]) -> dict[str, str]:
    """Ours, with this deployment's settings, and one GPU visible, or none to a worker that uses the host's memory."""
    return {
        **{name: value for name, value in inherited.items() if name != "HEADRACE_WORKER_ID"},
        "HEADRACE_NATS_URL": url,
        "HEADRACE_PREFIX": settings.prefix,
        "HEADRACE_STATE_DIR": settings.state_dir,
        "HEADRACE_LOG_LEVEL": settings.log_level,
        **({} if settings.nats_credentials is None else {"HEADRACE_NATS_CREDENTIALS": settings.nats_credentials}),
        "CUDA_VISIBLE_DEVICES": order.device if order.group.uses == "gpu" else "",
    }


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
