"""`headrace serve host`: the agent of a machine that runs workers."""

import asyncio
import re
import socket
from typing import Final

import click

from headrace.bus.connection import Bus
from headrace.cli.memory_options import parse_size
from headrace.cli.options import with_settings
from headrace.cli.serving import LogFormat, log_format_option, run_part
from headrace.errors import ConfigError
from headrace.schemas.subjects import is_worker_id
from headrace.settings import Settings

__all__ = ["host"]

_MAX_ID_CHARS: Final = 64


@click.command()
@click.option("--host-id", metavar="ID", help="Name of this machine, no other's; default: its host name.")
@click.option(
    "--memory", callback=parse_size, metavar="SIZE",
    help="The machine's memory for workers that use the host's, such as 8GiB; default: all but a reserve.",
)  # fmt: skip
@log_format_option
@with_settings
def host(settings: Settings, host_id: str | None, memory: int | None, log_format: LogFormat) -> None:
    """Run this machine's share of the replicas that the configuration wants (`instances` of a model).

    Agents agree by leases: a replica goes to a host whose GPUs, or memory, have room for it; those of a host that is
    gone go elsewhere. Its workers show its credential. SIGTERM gives the leases back, and lets the workers finish
    within HEADRACE_GRACE_S.

    \b
    headrace serve host
    headrace serve host --host-id gpu-7 --memory 32GiB
    """  # noqa: D301  # click reads the backspaces
    from headrace.host import HostOptions, run_host
    from headrace.host.devices import find_devices
    from headrace.host.launching import process_launcher

    identity = host_id if host_id is not None else _host_name()
    if not is_worker_id(identity):
        raise ConfigError(f"--host-id is {identity[:80]!r}; allowed: 1 to 64 of A-Z a-z 0-9 _ -")

    async def part(bus: Bus, stop: asyncio.Event) -> None:
        options = HostOptions(host=identity, devices=await asyncio.to_thread(find_devices, memory))
        await run_host(bus, options, process_launcher(bus, log_format=log_format), stop=stop)

    run_part("host", settings, part, log_format=log_format)


def _host_name() -> str:
    """This machine's name with what no id may have replaced by `-`."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:_MAX_ID_CHARS] or "host"
