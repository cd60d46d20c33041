"""What a part started on this machine needs of it: a state directory, disk, open files, secrets kept to itself."""

import os
import resource
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from headrace.doctor.facts import MachineFacts, OpenSecret
from headrace.settings import CONFIG_VARIABLE, Settings

__all__ = ["look_at_machine"]

_OTHERS: Final = 0o007
"""Bits of a file's mode that are about users who are neither its owner nor in its group."""

_SECRETS: Final = ("nats_credentials", "nats_system_credentials", "nats_tls_key")


def look_at_machine(settings: Settings, environ: Mapping[str, str]) -> MachineFacts:
    """Look, and make nothing."""
    state_dir = Path(os.path.abspath(settings.state_dir))
    free_bytes, total_bytes = _disk(_existing(state_dir))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MachineFacts(
        state_dir=str(state_dir),
        state_dir_trouble=_trouble(state_dir),
        has_own_broker=settings.nats_url is None,
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        max_open_files=hard if hard != resource.RLIM_INFINITY else None,
        open_secrets=tuple(_open_secrets(settings, environ)),
    )


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next((each for each in (path, *path.parents) if os.path.exists(each)), Path(path.anchor))


def _trouble(state_dir: Path) -> str:
    nearest = _existing(state_dir)
    if not nearest.is_dir():
        return f"{nearest} is no directory"
    return "" if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} cannot be written by this user"


def _disk(path: Path) -> tuple[int | None, int | None]:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None, None
    return usage.free, usage.total


def _open_secrets(settings: Settings, environ: Mapping[str, str]) -> Iterator[OpenSecret]:
    files = {key: path for key in _SECRETS if (path := getattr(settings, key)) is not None}
    if (path := environ.get(CONFIG_VARIABLE)) and _has_password(Path(path)):
        files["config"] = path
    for key, path in files.items():
        try:
            mode = os.stat(path).st_mode & 0o777
        except OSError:  # whoever uses it says so
            continue
        if mode & _OTHERS:
            yield OpenSecret(f"HEADRACE_{key.upper()}", path, mode)


def _has_password(path: Path) -> bool:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return any("@" in str(values.get(key, "")) for key in ("nats_url", "nats_system_url"))
