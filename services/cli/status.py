"""`headrace status`: who works, what waits."""

import asyncio
import sys
from typing import Final

import click
import msgspec
from rich.console import Group
from rich.live import Live

from headrace.bus.connection import Bus
from headrace.bus.overview import overview
from headrace.cli.options import connected, with_settings
from headrace.cli.render import console, deployment, is_terminal
from headrace.schemas.overview import Overview
from headrace.settings import Settings

__all__ = ["status"]

_EVERY_S: Final = 1.0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object; with --watch one a line, each second.")
@click.option("--watch", is_flag=True, help="Keep showing, until Ctrl-C.")
@with_settings
def status(settings: Settings, as_json: bool, watch: bool) -> None:
    """Show the workers, what they hold, and what waits in the queues.

    \b
    headrace status
    headrace status --watch
    headrace status --json | jq '.queues[] | select(.queued > 0)'
    """  # noqa: D301  # click reads the backspaces
    asyncio.run(_status(settings, as_json=as_json, watch=watch))


async def _status(settings: Settings, *, as_json: bool, watch: bool) -> None:
    async with connected(settings) as bus:
        if not watch:
            _show(await overview(bus), as_json=as_json)
        elif as_json or not is_terminal(sys.stdout):
            while True:
                _show(await overview(bus), as_json=as_json)
                await asyncio.sleep(_EVERY_S)
        else:
            await _watch(bus)


async def _watch(bus: Bus) -> None:
    with Live(console=console(), auto_refresh=False, screen=False) as live:
        while True:
            live.update(Group(*deployment(await overview(bus))), refresh=True)
            await asyncio.sleep(_EVERY_S)


def _show(now: Overview, *, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(now).decode())
    else:
        console().print(Group(*deployment(now)))
