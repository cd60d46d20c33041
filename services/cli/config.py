"""`headrace config`: tenants, models and aliases, read and written as a whole."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any, Final, Literal

import click
import msgspec
from rich.text import Text

from headrace.bus.configuration import StoredEntry, read_entries
from headrace.bus.connection import Bus
from headrace.bus.provision import ensure_jobs_stream
from headrace.cli.entries import warn_if_opened, with_kept_keys, write_entry
from headrace.cli.options import connected, with_settings
from headrace.cli.render import console, safe
from headrace.errors import ConfigError
from headrace.schemas.config_text import Entry, InvalidConfig, decode_file, entries_of, parse_key
from headrace.settings import Settings

__all__ = ["config"]

_STYLES: Final = {"added": "green", "changed": "yellow", "removed": "red", "unchanged": "dim"}

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+\Z")
"""Keys that TOML takes without quotes."""

Action = Literal["added", "changed", "removed", "unchanged"]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One key of `config apply --json`; `before` and `after` are its values, None where there is none."""

    key: str
    action: Action
    before: Any = None
    after: Any = None


@click.group()
def config() -> None:
    """Tenants, models and aliases of a running deployment: limits, weights, pools, fallbacks."""


@config.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object, which `config apply` takes too.")
@with_settings
def get(settings: Settings, as_json: bool) -> None:
    """Print the configuration, as a file that `headrace config apply` takes."""
    stored = asyncio.run(_get(settings))
    for entry in stored:
        if entry.problem:
            click.echo(f"headrace: {safe(entry.problem)}; it is left out", err=True)
    shown = _shown(stored)
    click.echo(json.dumps(shown) if as_json else _toml_file(shown), nl=as_json or bool(shown))


@config.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--prune", is_flag=True, help="Remove what FILE does not name.")
@click.option("--dry-run", is_flag=True, help="Only print what would change.")
@click.option("--json", "as_json", is_flag=True, help="A JSON array of {key, action, before, after}.")
@with_settings
def apply(settings: Settings, file: Path, prune: bool, dry_run: bool, as_json: bool) -> None:
    """Apply FILE, in TOML or (named *.json) JSON, and print what changed. Services follow within a second.

    The whole file is checked before anything is written. Each tenant, model and alias in it replaces the one of that
    name; others stay as they are, and so do the API keys of a tenant for which the file has no `keys`. If somebody else
    changes one of them meanwhile, the command stops and says so.
    """
    try:
        wanted = decode_file(file.read_text(encoding="utf-8"), is_json=file.suffix == ".json")
    except (InvalidConfig, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from None
    changes = asyncio.run(_apply(settings, entries_of(wanted), prune=prune, dry_run=dry_run))
    if as_json:
        click.echo(msgspec.json.encode(changes).decode())
        return
    for change in changes:
        _print(change)
    if all(change.action == "unchanged" for change in changes):
        click.echo("nothing changed" if changes else "nothing to do")


async def _get(settings: Settings) -> list[StoredEntry]:
    async with connected(settings) as bus:
        return [entry for _, entry in sorted((await read_entries(bus)).items())]


async def _apply(settings: Settings, wanted: dict[str, Entry], *, prune: bool, dry_run: bool) -> list[Change]:
    async with connected(settings) as bus:
        stored = await read_entries(bus)
        wanted = {key: with_kept_keys(entry, stored.get(key)) for key, entry in wanted.items()}
        changes = _diff(stored, wanted, prune=prune)
        if not dry_run:
            for change in changes:
                await _write(bus, change, stored.get(change.key), wanted.get(change.key))
            await warn_if_opened(bus, stored)
        return changes


async def _write(bus: Bus, change: Change, known: StoredEntry | None, entry: Entry | None) -> None:
    if change.action != "unchanged":
        await write_entry(bus, change.key, entry, expected_revision=known.revision if known is not None else 0)
    parsed = parse_key(change.key)
    if entry is not None and parsed is not None and parsed[0] == "models":
        await ensure_jobs_stream(bus, parsed[1])


def _diff(stored: dict[str, StoredEntry], wanted: dict[str, Entry], *, prune: bool) -> list[Change]:
    changes = []
    for key, entry in sorted(wanted.items()):
        known = stored.get(key)
        before = _builtin(known.entry) if known is not None and known.entry is not None else None
        after = _builtin(entry)
        action: Action = "added" if before is None else "unchanged" if before == after else "changed"
        changes.append(Change(key=key, action=action, before=before, after=after))
    for key, known in sorted(stored.items()):
        if prune and key not in wanted and (known.entry is not None or known.problem):
            before = _builtin(known.entry) if known.entry is not None else None
            changes.append(Change(key=key, action="removed", before=before))
    return changes


def _builtin(entry: Entry) -> dict[str, Any]:
    value = msgspec.to_builtins(entry)
    assert isinstance(value, dict)
    return value


def _shown(stored: list[StoredEntry]) -> dict[str, dict[str, Any]]:
    shown: dict[str, dict[str, Any]] = {}
    for entry in stored:
        parsed = parse_key(entry.key)
        if entry.entry is not None and parsed is not None:
            shown.setdefault(parsed[0], {})[parsed[1]] = _builtin(entry.entry)
    return shown


def _print(change: Change) -> None:
    out = console()
    out.print(
        Text.assemble((f"{change.action:<10}", _STYLES[change.action]), safe(_as_table(change.key))), soft_wrap=True
    )
    before, after = change.before or {}, change.after or {}
    for name in sorted({*before, *after}):
        if before.get(name) == after.get(name):
            continue
        for sign, value in (("-", before.get(name)), ("+", after.get(name))):
            if value is not None:
                style = "red" if sign == "-" else "green"
                out.print(Text(f"    {sign} {name} = {safe(_toml(value))}", style=style), soft_wrap=True)


def _as_table(key: str) -> str:
    """A key of the bucket as the table's name in a file."""
    section, name = parse_key(key) or key.split(".", 1)
    return f"{section}.{name if _BARE.match(name) else json.dumps(name, ensure_ascii=False)}"


def _toml_file(shown: dict[str, dict[str, Any]]) -> str:
    blocks = []
    for section, entries in shown.items():
        for name, values in entries.items():
            lines = [f"[{section}.{json.dumps(name, ensure_ascii=False)}]"]
            blocks.append("\n".join(lines + [f"{key} = {_toml(value)}" for key, value in values.items()]))
    return "\n\n".join(blocks) + "\n" if blocks else ""


def _toml(value: Any) -> str:
    """A value in TOML's inline form; JSON's strings, numbers and booleans are TOML's too."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(inner) for inner in value) + "]"
    return json.dumps(value, ensure_ascii=False)
