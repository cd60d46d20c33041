"""`headrace provision`: streams and buckets, brought to the settings."""

import asyncio
from typing import Final

import click
import msgspec
from rich.text import Text

from headrace.bus.overview import list_models
from headrace.bus.provision import Provisioned
from headrace.bus.provision import provision as provision_streams
from headrace.cli.options import connected, with_settings
from headrace.cli.render import console, table
from headrace.schemas.subjects import is_model_name
from headrace.settings import Settings

__all__ = ["provision"]

_STYLES: Final = {"created": "green", "changed": "yellow", "unchanged": "dim"}


@click.command()
@click.option("--model", "models", multiple=True, metavar="NAME", help="Make this model's queue too; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="A JSON array of {stream, action, changes}.")
@with_settings
def provision(settings: Settings, models: tuple[str, ...], as_json: bool) -> None:
    """Create the streams and buckets of the deployment, and change those that differ from the settings.

    Safe to run at any time, any number of times: it drops nothing, and fails where something cannot be changed in
    place. Services make what is missing by themselves; this shows it, and applies changed settings.
    """
    for model in models:
        if not is_model_name(model):
            raise click.BadParameter("1 to 100 bytes without control characters", param_hint="--model")
    results = asyncio.run(_provision(settings, models))
    if as_json:
        click.echo(msgspec.json.encode(results).decode())
        return
    rows = [
        (result.stream, Text(result.action, style=_STYLES[result.action]), "; ".join(result.changes))
        for result in results
    ]
    console().print(table("", ("stream", "action", "changes"), rows))


async def _provision(settings: Settings, models: tuple[str, ...]) -> list[Provisioned]:
    async with connected(settings) as bus:
        known = await list_models(bus)
        return await provision_streams(bus, models=tuple(sorted({*known, *models})))
