"""`headrace models alias`: a name that leads to models, with weights, for a gradual switch from one to the next."""

import asyncio
import contextlib
from typing import Any, Final

import click
import msgspec
from rich.text import Text

from headrace.bus.connection import Bus
from headrace.cli.entries import write_entry
from headrace.cli.model_entries import KnownModels, near, read_known
from headrace.cli.options import connected, with_settings
from headrace.cli.render import console, safe
from headrace.errors import ConfigError, HeadraceError
from headrace.schemas.config import AliasConfig
from headrace.schemas.config_text import InvalidConfig, decode_entry, key_of
from headrace.schemas.subjects import is_model_name
from headrace.settings import Settings

__all__ = ["alias", "parse_target", "shares"]

_ROUNDING: Final = 4


class ShownAlias(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints: the share of each model, 0 to 1, as it was and as it is; None where there is no alias."""

    alias: str
    before: dict[str, float] | None
    after: dict[str, float] | None


@click.command()
@click.argument("alias", metavar="ALIAS")
@click.argument("targets", nargs=-1, metavar="[TARGET[=WEIGHT]]...")
@click.option("--remove", "is_removed", is_flag=True, help="Remove the alias; its requests are not known any more.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: shares before and after.")
@with_settings
def alias(settings: Settings, alias: str, targets: tuple[str, ...], is_removed: bool, as_json: bool) -> None:
    """Have ALIAS lead to models in proportion to their weights (1 where none is given); without targets, show it.

    The same request id always goes to the same model, and a change of weights moves only as many as it must. What is
    queued or running stays where it is.

    \b
    headrace models alias chat m@1            all to m@1
    headrace models alias chat m@1=9 m@2=1    a tenth to m@2
    headrace models alias chat m@2            all to m@2
    """  # noqa: D301  # click reads the backspaces
    if not is_model_name(alias):
        raise ConfigError(f"ALIAS is {alias[:80]!r}; allowed: 1 to 100 bytes without control characters")
    if is_removed and targets:
        raise click.UsageError("--remove takes no targets")
    wanted = _checked(alias, targets) if targets else None
    shown, remarks = asyncio.run(_apply(settings, alias, wanted, is_removed=is_removed))
    for remark in remarks:
        click.echo(f"headrace: {safe(remark)}", err=True)
    if as_json:
        click.echo(msgspec.json.encode(shown).decode())
    else:
        _print(shown)


async def _apply(
    settings: Settings, name: str, wanted: AliasConfig | None, *, is_removed: bool
) -> tuple[ShownAlias, list[str]]:
    async with connected(settings) as bus:
        known = await read_known(bus)
        before = known.aliases.get(name)
        if wanted is None and before is None and not (is_removed and _is_bad(known, name)):
            raise HeadraceError(f"there is no alias {name}; {near(name, known.aliases)}")
        if wanted is not None:
            _require_models(known, wanted)
        after = None if is_removed else wanted if wanted is not None else before
        remarks: list[str] = []
        if after != before or is_removed:
            await _write(bus, known, name, after)
            if after is not None and before is None and name in known.names:
                remarks.append(f"{name} is a model too: its requests follow the alias from now on")
        shown = ShownAlias(
            alias=name,
            before=shares(before) if before is not None else None,
            after=shares(after) if after is not None else None,
        )
        return shown, remarks


def _is_bad(known: KnownModels, name: str) -> bool:
    stored = known.stored.get(key_of("aliases", name))
    return stored is not None and bool(stored.problem)


async def _write(bus: Bus, known: KnownModels, name: str, entry: AliasConfig | None) -> None:
    stored = known.stored.get(key_of("aliases", name))
    revision = stored.revision if stored is not None else 0
    await write_entry(bus, key_of("aliases", name), entry, expected_revision=revision)


def _require_models(known: KnownModels, wanted: AliasConfig) -> None:
    """Raise HeadraceError for a target that no request could be sent to."""
    for target in wanted.targets:
        if target.name in known.aliases:
            raise HeadraceError(f"{target.name} is an alias itself; an alias leads to models")
        if target.name not in known.names:
            raise HeadraceError(f"no model {target.name} is known; {near(target.name, known.names)}")


def _checked(name: str, targets: tuple[str, ...]) -> AliasConfig:
    values = {"targets": [parse_target(text) for text in targets]}
    try:
        entry = decode_entry(key_of("aliases", name), msgspec.json.encode(values))
    except InvalidConfig as error:
        raise ConfigError(str(error)) from None
    assert isinstance(entry, AliasConfig)
    return entry


def parse_target(text: str) -> dict[str, Any]:
    """`model@version=weight` as a target's values; what follows the last `=` is a weight only if it is a number."""
    name, weight = text, None
    head, separator, tail = text.rpartition("=")
    if separator and head:
        with contextlib.suppress(ValueError):
            name, weight = head, float(tail)
    model, separator, version = name.rpartition("@")
    values: dict[str, Any] = (
        {"model": model, "version": version} if separator and model and version else {"model": name}
    )
    return values if weight is None else {**values, "weight": weight}


def shares(entry: AliasConfig) -> dict[str, float]:
    """The share of each target, 0 to 1."""
    total = sum(target.weight for target in entry.targets)
    return {target.name: round(target.weight / total, _ROUNDING) for target in entry.targets}


def _print(shown: ShownAlias) -> None:
    out = console()
    if shown.after is None:
        out.print(Text(f"alias {safe(shown.alias)} is removed"), soft_wrap=True)
        return
    before = shown.before or {}
    out.print(Text(f"alias {safe(shown.alias)}"), soft_wrap=True)
    for model in dict.fromkeys((*shown.after, *before)):
        was, now = before.get(model), shown.after.get(model, 0.0)
        note = "" if was == now or shown.before is None else " (new)" if was is None else f" (was {_per_cent(was)})"
        out.print(Text(f"    {safe(model)}  {_per_cent(now)}{note}"), soft_wrap=True)


def _per_cent(share: float) -> str:
    return f"{100 * share:.4g} %"
