"""What `headrace provision --secure` does: users, credentials and the broker's accounts, written to a directory."""

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import click
import msgspec
from rich.text import Text

from headrace.bus.configuration import read_config
from headrace.bus.members import Member, Tls
from headrace.bus.securing import Secured, SecureDirectory
from headrace.bus.server import discover
from headrace.cli.options import connected
from headrace.cli.render import console, table
from headrace.errors import BrokerError, BrokerUnavailableError
from headrace.settings import Settings

__all__ = ["SECURE_DIR", "configured_tenants", "reload_embedded", "secure_directory", "show"]

SECURE_DIR: Final = "secure"
"""Where a secured embedded broker's directory is, in the state directory; also the default of `--dir`."""

_STYLES: Final = {"created": "green", "changed": "yellow", "kept": "dim", "removed": "red"}


def secure_directory(settings: Settings, path: str | None) -> SecureDirectory:
    """The directory that is meant."""
    return SecureDirectory(Path(path) if path is not None else Path(settings.state_dir) / SECURE_DIR)


async def configured_tenants(settings: Settings) -> list[Member]:
    """Tenants of the live configuration; none where no broker is reached, which the caller is told on stderr."""
    try:
        async with connected(settings) as bus:
            config = await read_config(bus)
    except BrokerError as error:
        if settings.nats_url is not None or not isinstance(error, BrokerUnavailableError):
            click.echo(f"headrace: configured tenants are not known, only named ones are added: {error}", err=True)
        return []
    return [Member(role="tenant", tenant=name) for name in config.tenants]


def reload_embedded(settings: Settings, directory: SecureDirectory) -> bool:
    """Have the embedded broker take the new accounts; False where none runs, or one by another directory."""
    info = discover(Path(settings.state_dir))
    if info is None or info.credentials is None or not Path(info.credentials).is_relative_to(directory.path):
        return False
    os.kill(info.pid, signal.SIGHUP)
    return True


def show(
    done: Iterable[Secured], directory: SecureDirectory, *, tls: Tls | None, is_reloaded: bool, as_json: bool
) -> None:
    """Print what was done and what to do next; no secret is among it."""
    if as_json:
        click.echo(msgspec.json.encode(list(done)).decode())
        return
    rows = [(each.name, Text(each.action, style=_STYLES[each.action]), each.file) for each in done]
    console().print(table("", ("user", "action", "credentials"), rows))
    click.echo(_next_steps(directory, tls=tls, is_reloaded=is_reloaded))


def _next_steps(directory: SecureDirectory, *, tls: Tls | None, is_reloaded: bool) -> str:
    if is_reloaded:
        return "\nThe broker has taken the new accounts."
    scheme = "tls" if tls is not None else "nats"
    lines = [
        "",
        f"Start the broker:   nats-server -c {directory.config}",
        f"or let it reload:   nats-server --signal reload={directory.path / 'nats-server.pid'}",
        "Then each part:     "
        f"HEADRACE_NATS_URL={scheme}://HOST:4222 HEADRACE_NATS_CREDENTIALS={directory.path}/credentials/ROLE.nk",
        f"A monitor also:     HEADRACE_NATS_SYSTEM_CREDENTIALS={directory.path}/credentials/monitor-system.nk",
    ]
    if tls is not None and tls.ca is not None:
        lines.append(f"and all of them:    HEADRACE_NATS_TLS_CA={tls.ca}")
    lines.append("Streams, once, as the operator: headrace provision --model MODEL")
    return "\n".join(lines)
