"""Configuration from text: decoded strictly, with errors that name the key, its value's place and what is allowed."""

import json
import re
import tomllib
from typing import Any, Final, Literal, TypeVar

import msgspec

from headrace.schemas.config import AliasConfig, Config, ModelConfig, TenantConfig
from headrace.schemas.subjects import is_model_name, is_name, model_to_token, token_to_model

__all__ = ["Entry", "InvalidConfig", "decode_entry", "decode_file", "encode_entry", "entries_of", "key_of", "parse_key"]

Section = Literal["tenants", "models", "aliases"]
Entry = TenantConfig | ModelConfig | AliasConfig

_TYPES: Final[dict[Section, type[Entry]]] = {"tenants": TenantConfig, "models": ModelConfig, "aliases": AliasConfig}
_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`")
_SECRET = re.compile(r"\.keys\b")
_STEP = re.compile(r"\.(?P<field>[A-Za-z_]\w*)|\[(?P<index>[^\]]*)\]")
_E = TypeVar("_E", bound=Entry)


class InvalidConfig(ValueError):
    """A configuration that cannot be; the message names the key and what is allowed."""


def key_of(section: Section, name: str) -> str:
    """The bucket's key of an entry."""
    return f"{section}.{name if section == 'tenants' else model_to_token(name)}"


def parse_key(key: str) -> tuple[Section, str] | None:
    """Section and name of a bucket's key; None for one that is none of ours."""
    head, _, token = key.partition(".")
    section = next((known for known in _TYPES if known == head), None)
    if section is None:
        return None
    if section == "tenants":
        return (section, token) if is_name(token) else None
    try:
        return section, token_to_model(token)
    except ValueError:
        return None


def decode_entry(key: str, data: bytes) -> Entry:
    """One value of the bucket. Raises InvalidConfig."""
    parsed = parse_key(key)
    if parsed is None:
        raise InvalidConfig(f"unknown key {key[:100]!r}; allowed: tenants.NAME, models.NAME, aliases.NAME")
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        raise InvalidConfig(f"{key} is not JSON") from None
    return _convert(value, _TYPES[parsed[0]], key)


def encode_entry(entry: Entry) -> bytes:
    """The bucket's value: JSON, without what is a default."""
    return msgspec.json.encode(entry)


def decode_file(text: str, *, is_json: bool) -> Config:
    """A whole file, TOML or JSON, with the tables tenants, models and aliases. Raises InvalidConfig."""
    try:
        values = json.loads(text) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # both libraries' errors are ValueErrors
        raise InvalidConfig(f"not {'JSON' if is_json else 'TOML'}: {error}") from None
    if not isinstance(values, dict):
        raise InvalidConfig(f"the file is not a table; allowed: a table with the keys {', '.join(_TYPES)}")
    for section in values:
        if section not in _TYPES:
            raise InvalidConfig(f"unknown key {str(section)[:100]!r}; allowed: {', '.join(_TYPES)}")
    config = Config(
        tenants=_section(values, "tenants", TenantConfig),
        models=_section(values, "models", ModelConfig),
        aliases=_section(values, "aliases", AliasConfig),
    )
    for name, alias in config.aliases.items():
        if chained := next((target.name for target in alias.targets if target.name in config.aliases), None):
            raise InvalidConfig(f"aliases.{name} has the target {chained!r}, an alias; allowed: models")
    for name, tenant in config.tenants.items():
        if shared := next((key for key in tenant.keys or () if key.sha256 not in config.key_owners), None):
            raise InvalidConfig(
                f"tenants.{name} has the key {shared.name!r} of another tenant; allowed: keys of its own"
            )
    return config


def entries_of(config: Config) -> dict[str, Entry]:
    """The bucket's keys and values of a configuration."""
    entries: dict[str, Entry] = {key_of("tenants", name): entry for name, entry in config.tenants.items()}
    entries |= {key_of("models", name): entry for name, entry in config.models.items()}
    return entries | {key_of("aliases", name): entry for name, entry in config.aliases.items()}


def _section(values: dict[str, Any], section: Section, type_: type[_E]) -> dict[str, _E]:
    table = values.get(section, {})
    if not isinstance(table, dict):
        raise InvalidConfig(f"{section} is not a table; allowed: one table for each name")
    for name in table:
        if section == "tenants" and not is_name(name):
            raise InvalidConfig(f"tenants.{name[:80]!r} is no tenant name; allowed: 1 to 40 of a-z 0-9 -")
        if section != "tenants" and not is_model_name(name):
            raise InvalidConfig(
                f"{section}.{name[:80]!r} is no model name; allowed: 1 to 100 bytes without control characters"
            )
    return {name: _convert(value, type_, f"{section}.{name}") for name, value in table.items()}


def _convert(value: Any, type_: type[_E], key: str) -> _E:
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise InvalidConfig(_explain(str(error), value, type_, key)) from None


def _explain(message: str, value: Any, type_: Any, key: str) -> str:
    """From msgspec's message, which names the place and one bound: key, value and the whole range."""
    found = _AT.match(message)
    what, path = (found["what"], found["path"] or "$") if found else (message, "$")
    place, info = key, msgspec.inspect.type_info(type_)
    for step in _STEP.finditer(path.removeprefix("$")):
        place += step[0]
        info, value = _descend(info, value, step["field"], step["index"])
    if unknown := _UNKNOWN.search(what):
        return f"{place}.{unknown['name'][:80]} is unknown; allowed: {_allowed(info)}"
    if "allowed:" in what:  # a rule of our own
        return f"{place}: {what}"
    if "missing required field" in what:
        return f"{place}: {what}; allowed: {_allowed(info)}"
    shown = "not that" if _SECRET.search(place) else _short(value)  # somebody may have written a key in its place
    return f"{place} is {shown}; allowed: {_allowed(info)}"


def _descend(info: Any, value: Any, field: str | None, index: str | None) -> tuple[Any, Any]:
    info = _bare(info)
    if field is not None:
        fields = getattr(info, "fields", ())
        inner = next((each.type for each in fields if each.encode_name == field), None)
        return inner, value.get(field) if isinstance(value, dict) else None
    item = getattr(info, "item_type", None)
    is_there = isinstance(value, list | tuple) and index is not None and index.isdigit() and int(index) < len(value)
    return item, value[int(index)] if is_there and index is not None else None


def _bare(info: Any) -> Any:
    """Without descriptions, and without the None of an optional value."""
    while True:
        if isinstance(info, msgspec.inspect.Metadata):
            info = info.type
        elif isinstance(info, msgspec.inspect.UnionType):
            info = next(kind for kind in info.types if not isinstance(kind, msgspec.inspect.NoneType))
        else:
            return info


def _allowed(info: Any) -> str:
    described = _description(info)
    info = _bare(info)
    if described:
        return described
    if isinstance(info, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        kind = "a whole number" if isinstance(info, msgspec.inspect.IntType) else "a number"
        return f"{kind} from {info.ge:.10g} to {info.le:.10g}" if info.ge is not None and info.le is not None else kind
    if isinstance(info, msgspec.inspect.LiteralType):
        return ", ".join(str(value) for value in info.values)
    if isinstance(info, msgspec.inspect.BoolType):
        return "true or false"
    if isinstance(info, msgspec.inspect.StructType):
        return f"a table with the keys {', '.join(field.encode_name for field in info.fields)}"
    if isinstance(info, msgspec.inspect.VarTupleType):
        return f"a list of {info.min_length or 0} to {info.max_length} entries"
    return "text"


def _description(info: Any) -> str:
    while isinstance(info, msgspec.inspect.Metadata | msgspec.inspect.UnionType):
        if isinstance(info, msgspec.inspect.Metadata):
            return str((info.extra_json_schema or {}).get("description", ""))
        info = next(kind for kind in info.types if not isinstance(kind, msgspec.inspect.NoneType))
    return ""


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:79]}…"
