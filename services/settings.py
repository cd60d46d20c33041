"""Settings, read once: a TOML file, then `HEADRACE_*` variables, then flags.

What is unknown or out of range stops the start.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from headrace.errors import ConfigError
from headrace.schemas.subjects import is_prefix, is_worker_id
from headrace.service_links import is_service_link

__all__ = ["CONFIG_VARIABLE", "ENV_PREFIX", "Settings", "default_state_dir", "describe", "load"]

ENV_PREFIX: Final = "HEADRACE_"
CONFIG_VARIABLE: Final = "HEADRACE_CONFIG"
_ORIGIN: Final = re.compile(r"https?://(?:[a-z0-9.-]+|\[[0-9a-f:]+\])(?::[0-9]{1,5})?")
_NEAR: Final = 0.75
"""How alike two names must be for the one to be taken for a slip of the other."""

_URL_SCHEMES: Final = ("nats://", "tls://", "ws://", "wss://")

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Count = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]


def default_state_dir() -> str:
    """The user's state directory for Headrace (XDG base directory rules)."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return str(Path(base) / "headrace")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting with its default; key `x_y` is the variable `HEADRACE_X_Y`. Durations are seconds.

    `nats_url` None means the embedded broker. `nats_credentials` is the file of this part's credential, which makes the
    deployment a secured one; `nats_system_credentials` the monitor's for the system account. `max_queue_timeout_s`
    bounds what a client may ask for and is the dedupe window of the job streams. Every `probe_s` an idle worker asks
    its own engine for a token (0: only at its start); one that is `slow_factor` times slower than its pool is taken out
    (0: never). `log_retention_s` is how long events
    outlive their job's deadline.
    """

    nats_url: str | None = None
    nats_system_url: str | None = None
    nats_credentials: str | None = None
    nats_system_credentials: str | None = None
    nats_tls_ca: str | None = None
    nats_tls_cert: str | None = None
    nats_tls_key: str | None = None
    prefix: str = "headrace.v1"
    state_dir: str = msgspec.field(default_factory=default_state_dir)
    worker_id: str | None = None
    replicas: Annotated[int, msgspec.Meta(ge=1, le=5)] = 1
    heartbeat_s: Annotated[float, msgspec.Meta(ge=0.05, le=60)] = 0.5
    worker_ttl_s: Annotated[float, msgspec.Meta(ge=1, le=600)] = 2.0
    ack_wait_s: Annotated[float, msgspec.Meta(ge=0.5, le=3600)] = 10.0
    max_attempts: Annotated[int, msgspec.Meta(ge=1, le=100)] = 3
    stall_s: Seconds = 30.0
    probe_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 30.0
    slow_factor: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 3.0
    ageing_s: Seconds = 10.0
    queue_timeout_s: Seconds = 60.0
    max_queue_timeout_s: Seconds = 600.0
    deadline_s: Seconds = 600.0
    max_deadline_s: Seconds = 86_400.0
    log_retention_s: Annotated[float, msgspec.Meta(ge=60, le=604_800)] = 3600.0
    queue_limit: Count = 10_000
    grace_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 30.0
    default_max_tokens: Count = 1024
    file_max_bytes: Annotated[int, msgspec.Meta(ge=1, le=4_000_000_000)] = 209_715_200
    file_limit: Count = 200
    file_ttl_s: Annotated[int, msgspec.Meta(ge=60, le=31_536_000)] = 2_592_000
    batch_limit: Count = 20
    batch_max_lines: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 50_000
    batch_window: Annotated[int, msgspec.Meta(ge=1, le=4_096)] = 128
    request_timeout_s: Annotated[float, msgspec.Meta(ge=0.1, le=60)] = 2.0
    retry_for_s: Annotated[float, msgspec.Meta(ge=0.1, le=300)] = 15.0
    broker_port: Port = 4222
    http_host: str = "127.0.0.1"
    http_port: Port = 8080
    http_origins: str = ""
    monitor_port: Port = 8081
    log_level: str = "info"

    @property
    def is_secured(self) -> bool:
        """Whether the broker tells who is who, so that nobody is believed to be a tenant whose inbox is not its own."""
        return self.nats_credentials is not None

    @property
    def system_url(self) -> str | None:
        """Where disconnect notices come from: by setting, else the broker if there is a credential for them."""
        if self.nats_system_url is not None or self.nats_system_credentials is None:
            return self.nats_system_url
        return self.nats_url

    def __post_init__(self) -> None:
        """Rules between keys. Raises ConfigError."""
        if not is_prefix(self.prefix):
            raise ConfigError(
                f"prefix is {self.prefix!r}; allowed: letters, digits, _ and -, in parts joined by dots, 64 in all"
            )
        for key in ("nats_url", "nats_system_url"):
            url = getattr(self, key)
            if url is not None and not url.startswith(_URL_SCHEMES):
                shown, schemes = _without_secrets(url)[:80], ", ".join(_URL_SCHEMES)
                raise ConfigError(f"{key} is {shown!r}; allowed: a URL that begins with {schemes}")
        if (self.nats_tls_cert is None) != (self.nats_tls_key is None):
            raise ConfigError("one of nats_tls_cert and nats_tls_key is not given; allowed: both or neither")
        if self.worker_id is not None and not is_worker_id(self.worker_id):
            raise ConfigError(f"worker_id is {self.worker_id!r}; allowed: 1 to 64 of A-Z a-z 0-9 _ -")
        if self.replicas not in (1, 3, 5):
            raise ConfigError(f"replicas is {self.replicas}; allowed: 1, 3 or 5")
        if self.worker_ttl_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"worker_ttl_s is {self.worker_ttl_s}; allowed: at least twice heartbeat_s ({self.heartbeat_s})"
            )
        for key, limit in (("queue_timeout_s", "max_queue_timeout_s"), ("deadline_s", "max_deadline_s")):
            if getattr(self, key) > getattr(self, limit):
                raise ConfigError(f"{key} is {getattr(self, key)}; allowed: at most {limit} ({getattr(self, limit)})")
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"http_origins has {origin[:80]!r}; allowed: origins as browsers send them, such as "
                    "https://chat.example.com, with commas between them, or * for every web page"
                )
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"log_level is {self.log_level!r}; allowed: debug, info, warning, error")

    @property
    def allowed_origins(self) -> frozenset[str]:
        """The origins of web pages that may use the gateway: `http_origins` taken apart."""
        return frozenset(origin for part in self.http_origins.split(",") if (origin := part.strip().lower()))


def _without_secrets(url: str) -> str:
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def load(flags: Mapping[str, Any] | None = None, *, environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of this process. `flags` are keyed like the fields; None values mean not given.

    Raises ConfigError naming key, value and allowed range.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    if path := environ.get(CONFIG_VARIABLE):
        values |= _from_file(Path(path))
    for variable, text in environ.items():
        if variable.startswith(ENV_PREFIX) and variable != CONFIG_VARIABLE and not _is_link(variable, text, environ):
            values[_key_of(variable)] = _parse(variable, text)
    values |= {key: value for key, value in (flags or {}).items() if value is not None}
    return _convert(values)


def describe() -> list[tuple[str, str, str]]:
    """(variable, default, allowed) of every setting, for help texts."""
    defaults = Settings(state_dir="user state dir")
    rows = []
    for field in msgspec.structs.fields(Settings):
        value = getattr(defaults, field.encode_name)
        rows.append((ENV_PREFIX + field.name.upper(), "" if value is None else str(value), _allowed(field.name)))
    return rows


def _is_link(variable: str, text: str, environ: Mapping[str, str]) -> bool:
    is_setting = variable.removeprefix(ENV_PREFIX).lower() in Settings.__struct_fields__
    return is_service_link(variable, text, environ, is_setting=is_setting)


def _key_of(variable: str) -> str:
    key = variable.removeprefix(ENV_PREFIX).lower()
    if key not in Settings.__struct_fields__:
        known = [ENV_PREFIX + name.upper() for name in Settings.__struct_fields__]
        raise ConfigError(f"unknown variable {variable}; {_hint(variable, known)}")
    return key


def _hint(name: str, known: Iterable[str]) -> str:
    """The known name that an unknown one is close to, else all of them."""
    names = {each.removeprefix(ENV_PREFIX).lower(): each for each in known}  # what all share says nothing
    near = difflib.get_close_matches(name.removeprefix(ENV_PREFIX).lower(), names, n=1, cutoff=_NEAR)
    return f"did you mean {names[near[0]]}?" if near else f"known: {', '.join(names.values())}"


def _parse(variable: str, text: str) -> Any:
    try:
        return msgspec.convert(text, _type_of(_key_of(variable)), strict=False)
    except msgspec.ValidationError:
        raise ConfigError(f"{variable} is {text[:80]!r}; allowed: {_allowed(_key_of(variable))}") from None


def _from_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{CONFIG_VARIABLE}: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    for key in values:
        if key not in Settings.__struct_fields__:
            raise ConfigError(f"{path}: unknown key {key!r}; {_hint(key, Settings.__struct_fields__)}")
    return values


def _convert(values: dict[str, Any]) -> Settings:
    converted: dict[str, Any] = {}
    for key, value in values.items():
        if key not in Settings.__struct_fields__:
            raise ConfigError(f"unknown key {key!r}; {_hint(key, Settings.__struct_fields__)}")
        try:
            converted[key] = msgspec.convert(value, _type_of(key))
        except msgspec.ValidationError:
            raise ConfigError(f"{key} is {value!r}; allowed: {_allowed(key)}") from None
    return Settings(**converted)


def _type_of(key: str) -> Any:
    return next(field.type for field in msgspec.structs.fields(Settings) if field.name == key)


def _allowed(key: str) -> str:
    info = msgspec.inspect.type_info(_type_of(key))
    if isinstance(info, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        kind = "a whole number" if isinstance(info, msgspec.inspect.IntType) else "a number"
        low = f"above {info.gt:.10g}" if info.gt is not None else f"from {info.ge:.10g}"
        return f"{kind} {low} to {info.le:.10g}"
    return "text"
