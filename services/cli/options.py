"""Options that every command has, and the settings and the broker they lead to."""

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import msgspec

from headrace.bus.connection import Bus, connect
from headrace.bus.server import discover
from headrace.errors import BrokerUnavailableError, ConfigError
from headrace.schemas.subjects import is_job_id, is_model_name, is_name, service_inbox
from headrace.settings import Settings, load

__all__ = [
    "check_job",
    "connected",
    "group_options",
    "located",
    "model_option",
    "parse_assignments",
    "tenant_option",
    "with_flags",
    "with_settings",
]

_ONE_SHOT_RETRY_S: Final = 3.0
"""How long a command that answers at once tries to reach the broker; services try for `retry_for_s`."""

_F = TypeVar("_F", bound=Callable[..., Any])

_OPTIONS: Final = (
    click.option("--nats-url", metavar="URL", help="Broker to use; default: the one `headrace up` started."),
    click.option("--prefix", metavar="PREFIX", help="Deployment prefix; default headrace.v1."),
    click.option("--state-dir", metavar="DIR", help="Where the embedded broker keeps its store."),
    click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Default info."),
)
_KEYS: Final = ("nats_url", "prefix", "state_dir", "log_level")


tenant_option: Final = click.option(
    "--tenant", default="default", show_default=True, metavar="NAME", help="Whose job it is."
)
"""The tenant of the job that a command is about."""


def group_options(function: _F) -> Callable[..., Any]:
    """Take the options before the command's name too: `headrace --nats-url URL status`."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        click.get_current_context().obj = {key: kwargs.pop(key) for key in _KEYS}
        return function(*args, **kwargs)

    return _with_options(wrapper)


def with_settings(function: _F) -> Callable[..., Any]:
    """Give the command its `Settings` as first argument, with the options on both sides of its name applied.

    The option nearest to the arguments wins. Raises ConfigError.
    """

    @functools.wraps(function)
    def wrapper(flags: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return function(load(flags), *args, **kwargs)

    return with_flags(wrapper)


def with_flags(function: _F) -> Callable[..., Any]:
    """Give the command those options as first argument, by their settings' names, and leave the loading to it."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        flags = dict(click.get_current_context().find_root().obj or {})
        flags |= {key: value for key in _KEYS if (value := kwargs.pop(key)) is not None}
        return function(flags, *args, **kwargs)

    return _with_options(wrapper)


def located(settings: Settings) -> tuple[str, Settings]:
    """The broker's URL, by setting or the embedded broker of the state directory, and the settings to connect with.

    A secured embedded broker brings the operator's credential, which only its owner can read; a credential that is set
    goes before it. Raises BrokerUnavailableError where neither broker is there.
    """
    if settings.nats_url is not None:
        return settings.nats_url, settings
    info = discover(Path(settings.state_dir))
    if info is None:
        raise BrokerUnavailableError(
            f"no broker: none runs on {settings.state_dir}. Start one with `headrace up`, "
            "or name one with HEADRACE_NATS_URL or --nats-url"
        )
    if settings.nats_credentials is None and info.credentials is not None:
        settings = msgspec.structs.replace(settings, nats_credentials=info.credentials)
    return info.url, settings


@contextlib.asynccontextmanager
async def connected(settings: Settings, *, name: str = "headrace-cli") -> AsyncIterator[Bus]:
    """A connection for a command that answers at once; gives up on a silent broker after a few seconds."""
    hasty = msgspec.structs.replace(settings, retry_for_s=min(settings.retry_for_s, _ONE_SHOT_RETRY_S))
    url, hasty = located(hasty)
    async with connect(url, hasty, name=name, inbox_prefix=service_inbox("operator")) as bus:
        yield bus


def parse_assignments(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """`key=value` strings as a mapping; a callback for click. The last of equal keys wins."""
    parsed: dict[str, str] = {}
    for text in values:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise click.BadParameter(f"{text[:60]!r} is not key=value", ctx=ctx, param=param)
        parsed[key.strip().replace("-", "_")] = value
    return parsed


def check_job(job: str, tenant: str) -> None:
    """Raise ConfigError for a job id or a tenant that cannot be."""
    if not is_job_id(job):
        raise ConfigError(f"JOB is {job[:80]!r}; allowed: 1 to 64 of A-Z a-z 0-9 _ -")
    if not is_name(tenant):
        raise ConfigError(f"--tenant is {tenant[:80]!r}; allowed: 1 to 40 of a-z 0-9 -")


def _checked_model(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and not is_model_name(value):
        raise click.BadParameter("1 to 100 bytes without control characters", ctx=ctx, param=param)
    return value


model_option: Final = click.option("--model", metavar="NAME", callback=_checked_model, help="Only this model's.")
"""The model that a listing is narrowed to."""


def _with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
