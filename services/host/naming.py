"""Ids of the workers that a host starts: which host, which run of its agent, which worker; pure."""

import hashlib
import re
from collections.abc import Iterable
from typing import Final

__all__ = ["earlier_workers", "worker_id"]

_MAX_HOST_CHARS: Final = 40
"""Of a host's name in the ids of its workers, which have 64."""
_HASH_CHARS: Final = 8


def worker_id(host: str, epoch: str, number: int) -> str:
    """The id of a worker; another host's, or another run's, is never the same."""
    return f"{_prefix(host)}-{epoch}-{number}"


def earlier_workers(host: str, epoch: str, workers: Iterable[str]) -> list[str]:
    """Those of the workers that earlier runs of this host's agent started, in order; epochs are 8 hex digits."""
    ours = re.compile(rf"{re.escape(_prefix(host))}-([0-9a-f]{{8}})-[0-9]+")
    return sorted(worker for worker in workers if (match := ours.fullmatch(worker)) and match[1] != epoch)


def _prefix(host: str) -> str:
    """A name that is too long is cut, and told from others that begin alike by a hash of all of it."""
    if len(host) <= _MAX_HOST_CHARS:
        return host
    return f"{host[: _MAX_HOST_CHARS - 1 - _HASH_CHARS]}-{hashlib.sha256(host.encode()).hexdigest()[:_HASH_CHARS]}"
