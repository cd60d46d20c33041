"""What commands need to know of the gateway, whose packages may not be installed."""

import asyncio
import contextlib
import importlib.util
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

from headrace.errors import HeadraceError

__all__ = ["INSTALL", "answers", "free_port", "is_installed", "load_gateway"]

INSTALL: Final = "pip install 'headrace[gateway]'"
"""What installs the gateway's packages."""

_PACKAGES: Final = ("httptools", "starlette", "uvicorn")
_CONNECT_S: Final = 1.0


def is_installed() -> bool:
    """Whether the packages of the extra `gateway` are there."""
    return all(importlib.util.find_spec(package) is not None for package in _PACKAGES)


def load_gateway() -> Callable[..., Awaitable[None]]:
    """`run_gateway`. Raises HeadraceError where its packages are missing."""
    if not is_installed():
        raise HeadraceError(f"the gateway needs packages that are not installed: {INSTALL}")
    from headrace.gateway import run_gateway

    return run_gateway


def free_port(host: str, port: int) -> int | None:
    """The port, if it can be listened on now; for port 0 any that can; None where it cannot."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except (OSError, UnicodeError):
            return None
        bound: Any = trial.getsockname()
        return int(bound[1])


async def answers(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
        return True
    return False


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
