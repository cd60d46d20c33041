"""Which versions of vLLM are known to be understood."""

import logging
import re
from typing import Final

from headrace.errors import EngineStartError

__all__ = ["MIN_VERSION", "TESTED_VERSION", "check_version"]

log = logging.getLogger(__name__)

MIN_VERSION: Final = (0, 13)
"""The oldest whose source has every name and parameter that is used."""
TESTED_VERSION: Final = (0, 32)
"""The newest that was run."""

_VERSION: Final = re.compile(r"v?(\d+)\.(\d+)")


def check_version(version: str) -> None:
    """Raises `EngineStartError` for one too old. Newer ones, and such as cannot be read, are only warned of."""
    found = _VERSION.match(version)
    if found is None:
        log.warning("vLLM does not tell its version (%r); %s is needed", version[:40], _RANGE)
        return
    told = (int(found[1]), int(found[2]))
    if told < MIN_VERSION:
        raise EngineStartError(f"vLLM {version} is too old: {_RANGE} is needed")
    if told > TESTED_VERSION:
        log.warning("vLLM %s is newer than what was tested with it: %s", version, _RANGE)


_RANGE: Final = f"{MIN_VERSION[0]}.{MIN_VERSION[1]} or newer (tested up to {TESTED_VERSION[0]}.{TESTED_VERSION[1]})"
