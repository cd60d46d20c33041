"""Credentials: an nkey of a user, whose seed is a file and never leaves it, and the certificates of a TLS connection.

The broker's configuration holds the public key alone; at each connect the client signs what the broker made up.
"""

import ssl
from pathlib import Path
from typing import Any, Final

from headrace.errors import ConfigError
from headrace.settings import Settings

__all__ = ["connect_options", "new_credential", "public_key", "read_credential"]

_MAX_FILE_BYTES: Final = 4096
_SEED_BYTES: Final = 32
_INSTALL: Final = "pip install 'headrace[secure]'"


def new_credential(entropy: bytes) -> tuple[str, str]:
    """The seed and the public key of a new user, from 32 random bytes. Raises ConfigError without the extra `secure`.

    The seed is a secret.
    """
    nkeys = _nkeys()
    if len(entropy) != _SEED_BYTES:
        raise ValueError(f"{_SEED_BYTES} random bytes are needed")
    seed = nkeys.encode_seed(entropy, nkeys.PREFIX_BYTE_USER).decode()
    return seed, public_key(seed)


def public_key(seed: str) -> str:
    """The public key that belongs to a seed. Raises ValueError for what is no user's seed."""
    nkeys = _nkeys()
    try:
        key = nkeys.from_seed(bytearray(seed.encode())).public_key.decode()
    except Exception:  # the library raises a family of its own, and binascii's, and more
        raise ValueError("not the seed of a user's nkey") from None
    if not key.startswith("U"):
        raise ValueError("not the seed of a user's nkey")
    return str(key)


def read_credential(path: str, *, setting: str) -> str:
    """The seed in a credentials file: its first line that is neither empty nor begins with `#`.

    Raises ConfigError naming the setting and the file, and nothing of what is in it.
    """
    try:
        with Path(path).open("rb") as file:
            text = file.read(_MAX_FILE_BYTES).decode("ascii")
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{setting}: {path} is no credentials file") from None
    lines = (line.strip() for line in text.splitlines())
    seed = next((line for line in lines if line and not line.startswith("#")), "")
    try:
        public_key(seed)
    except ValueError as error:
        raise ConfigError(f"{setting}: {path} is no credentials file: {error}") from None
    return seed


def connect_options(settings: Settings) -> dict[str, Any]:
    """What nats-py's `connect` is given beside the URL. Raises ConfigError for a file that cannot be used."""
    options: dict[str, Any] = {}
    if settings.nats_credentials is not None:
        options["nkeys_seed_str"] = read_credential(settings.nats_credentials, setting="HEADRACE_NATS_CREDENTIALS")
    if settings.nats_tls_ca is not None or settings.nats_tls_cert is not None:
        options["tls"] = _tls_context(settings)
    return options


def _tls_context(settings: Settings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.nats_tls_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"HEADRACE_NATS_TLS_CA: cannot use {settings.nats_tls_ca}: {_reason(error)}") from None
    if settings.nats_tls_cert is not None and settings.nats_tls_key is not None:
        try:
            # An encrypted key would ask on the terminal; a service has none.
            context.load_cert_chain(settings.nats_tls_cert, settings.nats_tls_key, password=lambda: b"")
        except (OSError, ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"HEADRACE_NATS_TLS_CERT and HEADRACE_NATS_TLS_KEY: cannot use {settings.nats_tls_cert} with "
                f"{settings.nats_tls_key}: {_reason(error)}"
            ) from None
    return context


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or getattr(error, "reason", None) or error)


def _nkeys() -> Any:
    try:
        import nkeys
    except ImportError:
        raise ConfigError(f"credentials need the extra `secure`: {_INSTALL}") from None
    return nkeys
