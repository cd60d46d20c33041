"""Engine options, from the `key=value` strings of a command line to a checked Struct."""

from collections.abc import Mapping
from typing import Annotated, Final, TypeVar

import msgspec

from headrace.errors import ConfigError

__all__ = ["PositiveInt", "Seconds", "parse_options"]

PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]

_SECRET: Final = frozenset({"api_key"})
_T = TypeVar("_T", bound=msgspec.Struct)


def parse_options(engine: str, options: Mapping[str, str], type_: type[_T]) -> _T:
    """The options as `type_`. Raises `ConfigError` naming the key, its value and what is allowed."""
    known = {field.encode_name for field in msgspec.structs.fields(type_)}
    for key in options:
        if key not in known:
            raise ConfigError(f"engine {engine} has no option {key[:60]!r}; it has {', '.join(sorted(known))}")
    for field in msgspec.structs.fields(type_):
        if field.required and field.encode_name not in options:
            raise ConfigError(f"engine {engine} needs the option {field.encode_name}=…")
    try:
        return msgspec.convert(dict(options), type_, strict=False)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        key = path.rstrip("`").split("[")[0].split(".")[0]
        value = "…" if key in _SECRET else repr(options.get(key, "")[:60])
        raise ConfigError(f"engine {engine}: option {key}={value}: {reason}") from None
