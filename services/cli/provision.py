"""`headrace provision`: streams and buckets, brought to the settings; with `--secure`, who may connect."""

import asyncio
from pathlib import Path
from typing import Final

import click
import msgspec
from rich.text import Text

from headrace.bus.members import Member, Tls
from headrace.bus.overview import list_models
from headrace.bus.provision import Provisioned
from headrace.bus.provision import provision as provision_streams
from headrace.cli import secure as securing
from headrace.cli.options import connected, with_settings
from headrace.cli.render import console, table
from headrace.schemas.subjects import Names, is_model_name
from headrace.settings import Settings

__all__ = ["provision"]

_FILE: Final = click.Path(exists=True, dir_okay=False, resolve_path=True, path_type=Path)

_STYLES: Final = {"created": "green", "changed": "yellow", "unchanged": "dim"}


@click.command()
@click.option("--model", "models", multiple=True, metavar="NAME", help="Make this model's queue too; repeatable.")
@click.option("--secure", is_flag=True, help="Write the broker's accounts and credentials instead; needs no broker.")
@click.option(
    "--dir", "directory", metavar="DIR", help="With --secure: where; default: secure/ in the state directory."
)
@click.option("--tenant", "tenants", multiple=True, metavar="NAME", help="With --secure: add a tenant; repeatable.")
@click.option("--worker", "workers", multiple=True, metavar="ID", help="With --secure: add a worker of --model.")
@click.option("--pool", "pools", multiple=True, metavar="NAME", help="Pool of the workers, and those it lends to.")
@click.option("--remove", "removed", multiple=True, metavar="USER", help="With --secure: a user that is none any more.")
@click.option("--tls-cert", type=_FILE, help="With --secure: the broker's certificate.")
@click.option("--tls-key", type=_FILE, help="With --secure: its key.")
@click.option("--tls-ca", type=_FILE, help="With --secure: who signed it, if clients do not know.")
@click.option("--tls-verify", is_flag=True, help="Clients must show a certificate of that CA too.")
@click.option(
    "--json", "as_json", is_flag=True, help="A JSON array of {stream, action, changes}, or {name, file, action}."
)
@with_settings
def provision(
    settings: Settings,
    models: tuple[str, ...],
    secure: bool,
    directory: str | None,
    tenants: tuple[str, ...],
    workers: tuple[str, ...],
    pools: tuple[str, ...],
    removed: tuple[str, ...],
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_ca: Path | None,
    tls_verify: bool,
    as_json: bool,
) -> None:
    """Create the streams and buckets of the deployment, and change those that differ from the settings.

    Safe to run at any time, any number of times: it drops nothing, and fails where something cannot be changed in
    place. Services make what is missing by themselves; this shows it, and applies changed settings.

    With --secure it writes the accounts of a broker that lets nobody in without a credential, and a credentials file
    for each part and tenant; run again it adds, and changes no secret that is there. Secrets are never printed.

    \b
    headrace provision --secure --tenant acme --worker w1 --worker w2 --model NAME
    headrace provision --secure --tls-cert cert.pem --tls-key key.pem --tls-ca ca.pem
    headrace provision --secure --remove tenant-acme
    """  # noqa: D301  # click reads the backspaces
    for model in models:
        if not is_model_name(model):
            raise click.BadParameter("1 to 100 bytes without control characters", param_hint="--model")
    if secure:
        members = [Member(role="tenant", tenant=name) for name in tenants]
        members += [Member(role="worker", worker=name, model=_only(models), pools=pools) for name in workers]
        tls = _tls(tls_cert, tls_key, tls_ca, must_verify=tls_verify)
        _secure(settings, directory, members, removed, tls, as_json=as_json)
        return
    if directory or tenants or workers or pools or removed or tls_cert or tls_key or tls_ca or tls_verify:
        raise click.UsageError("these options go with --secure")
    results = asyncio.run(_provision(settings, models))
    if as_json:
        click.echo(msgspec.json.encode(results).decode())
        return
    rows = [
        (result.stream, Text(result.action, style=_STYLES[result.action]), "; ".join(result.changes))
        for result in results
    ]
    console().print(table("", ("stream", "action", "changes"), rows))


def _secure(
    settings: Settings,
    path: str | None,
    members: list[Member],
    removed: tuple[str, ...],
    tls: Tls | None,
    *,
    as_json: bool,
) -> None:
    directory = securing.secure_directory(settings, path)
    configured = asyncio.run(securing.configured_tenants(settings))
    kept = [member for member in configured if member.name not in removed]
    done = directory.enrol(Names(settings.prefix), [*kept, *members], tls=tls, removed=removed)
    is_reloaded = securing.reload_embedded(settings, directory)
    securing.show(done, directory, tls=tls, is_reloaded=is_reloaded, as_json=as_json)


def _only(models: tuple[str, ...]) -> str:
    if len(models) != 1:
        raise click.UsageError("--worker needs one --model; run the command again for another model")
    return models[0]


def _tls(cert: Path | None, key: Path | None, ca: Path | None, *, must_verify: bool) -> Tls | None:
    if (cert is None) != (key is None) or (cert is None and ca is not None) or (ca is None and must_verify):
        raise click.UsageError("--tls-cert and --tls-key go together, --tls-ca with them, --tls-verify with --tls-ca")
    if cert is None or key is None:
        return None
    return Tls(cert=str(cert), key=str(key), ca=str(ca) if ca is not None else None, must_verify=must_verify)


async def _provision(settings: Settings, models: tuple[str, ...]) -> list[Provisioned]:
    async with connected(settings) as bus:
        known = await list_models(bus)
        return await provision_streams(bus, models=tuple(sorted({*known, *models})))
