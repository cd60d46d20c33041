"""Models as the command line finds and writes them: by name, with what is near where the name is wrong."""

import difflib
from collections.abc import Collection
from typing import Any, Final

import msgspec

from headrace.bus.configuration import StoredEntry, read_entries
from headrace.bus.connection import Bus
from headrace.bus.overview import list_models
from headrace.bus.provision import ensure_jobs_stream
from headrace.cli.entries import write_entry
from headrace.errors import ConfigError, HeadraceError
from headrace.schemas.config import AliasConfig, ModelConfig
from headrace.schemas.config_text import InvalidConfig, decode_entry, key_of, parse_key
from headrace.schemas.replicas import ReplicaGroup
from headrace.schemas.subjects import is_model_name

__all__ = ["KnownModels", "check_model_name", "checked_model", "group_in", "near", "read_known", "write_model"]

_MAX_SHOWN: Final = 20


class KnownModels(msgspec.Struct, frozen=True):
    """Entries of the configuration, by key, and the models that have a job stream."""

    stored: dict[str, StoredEntry]
    streams: frozenset[str]

    @property
    def models(self) -> dict[str, ModelConfig]:
        """Models that are configured."""
        return {name: entry for name, entry in self._entries() if isinstance(entry, ModelConfig)}

    @property
    def aliases(self) -> dict[str, AliasConfig]:
        """Aliases, by name."""
        return {name: entry for name, entry in self._entries() if isinstance(entry, AliasConfig)}

    @property
    def names(self) -> set[str]:
        """Every model that is configured or has a job stream."""
        return {*self.models, *self.streams}

    def _entries(self) -> list[tuple[str, Any]]:
        pairs = ((parse_key(key), each.entry) for key, each in sorted(self.stored.items()))
        return [(parsed[1], entry) for parsed, entry in pairs if parsed is not None and entry is not None]

    def entry_of(self, model: str) -> ModelConfig:
        """A model's entry; the defaults where it has none. Raises HeadraceError where that cannot be read."""
        stored = self.stored.get(key_of("models", model))
        if stored is not None and stored.problem:
            raise HeadraceError(f"{stored.problem}; write it anew with `headrace config apply`")
        return stored.entry if stored is not None and isinstance(stored.entry, ModelConfig) else ModelConfig()

    def require(self, model: str) -> ModelConfig:
        """The entry of a model that is known. Raises HeadraceError, with the names that are near."""
        check_model_name(model)
        entry = self.entry_of(model)
        if model in self.names:
            return entry
        if model in self.aliases:
            targets = ", ".join(target.name for target in self.aliases[model].targets)
            raise HeadraceError(f"{model} is an alias: name the model that is meant ({targets})")
        raise HeadraceError(f"no model {model} is known; {near(model, self.names)}")


async def read_known(bus: Bus) -> KnownModels:
    """What is known now. Raises NotProvisionedError, BrokerUnavailableError."""
    return KnownModels(await read_entries(bus), frozenset(await list_models(bus)))


def near(name: str, names: Collection[str]) -> str:
    """What to try instead: the names that look like it, else all there are."""
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(close)}?"
    shown = sorted(names)[:_MAX_SHOWN]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"there are: {', '.join(shown) or 'none'}{more}"


def check_model_name(model: str) -> None:
    """Raise ConfigError for a name that cannot be."""
    if not is_model_name(model):
        raise ConfigError(f"NAME is {model[:80]!r}; allowed: 1 to 100 bytes without control characters")


def checked_model(model: str, values: dict[str, Any]) -> ModelConfig:
    """A model's entry of these values, as `msgspec.to_builtins` gives them. Raises ConfigError."""
    try:
        entry = decode_entry(key_of("models", model), msgspec.json.encode(values))
    except InvalidConfig as error:
        raise ConfigError(str(error)) from None
    assert isinstance(entry, ModelConfig)
    return entry


def group_in(model: str, entry: ModelConfig, pool: str) -> ReplicaGroup:
    """The workers that are declared for a pool. Raises HeadraceError where none are."""
    for group in entry.instances:
        if group.pool == pool:
            return group
    there = ", ".join(group.pool for group in entry.instances)
    what = f"its workers are declared for {there}: name one with --pool" if there else "none are declared at all"
    raise HeadraceError(f"model {model} has no workers declared for the pool {pool}; {what} (or `headrace models add`)")


async def write_model(bus: Bus, known: KnownModels, model: str, entry: ModelConfig | None) -> None:
    """Write a model's entry, or remove it, if nobody else did since `known` was read; its job stream is there then.

    Raises as `write_entry` does.
    """
    stored = known.stored.get(key_of("models", model))
    revision = stored.revision if stored is not None else 0
    await write_entry(bus, key_of("models", model), entry, expected_revision=revision)
    if entry is not None:
        await ensure_jobs_stream(bus, model)
