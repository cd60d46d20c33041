"""Listening on an address, and which names of it are this machine's: alike for every HTTP port of ours."""

import ipaddress
import socket
from typing import Any, Final
from urllib.parse import urlsplit

__all__ = ["host_of", "is_loopback", "is_loopback_name", "listen", "url_of"]

_LOCALHOST: Final = "localhost"


def listen(host: str, port: int, *, backlog: int, send_buffer_bytes: int | None = None) -> socket.socket:
    """A listening socket; port 0 is any free one. Each connection inherits the send buffer.

    Raises OSError with the reason as its `strerror` where the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay off only on connections of sockets that name TCP: without, 40 ms at each silence.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if send_buffer_bytes is not None:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        bound.bind((host, port))
        bound.listen(backlog)
    except (UnicodeError, TypeError):  # the latter for bytes of the environment that are no text
        bound.close()
        raise OSError(None, "no such host") from None
    except BaseException:
        bound.close()
        raise
    return bound


def url_of(bound: socket.socket) -> str:
    """Where a client on this machine finds it."""
    host, port = _address_of(bound)[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(bound: socket.socket) -> bool:
    """Whether nobody but this machine reaches it."""
    return _is_loopback_address(_address_of(bound)[0].partition("%")[0])


def host_of(header: str) -> str | None:
    """The name or address in a `Host` header, lower-case, without port and brackets; None where there is none."""
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None


def is_loopback_name(name: str) -> bool:
    """Whether the name can lead nowhere but to loopback: an address there, or one that resolvers ask nobody about.

    `localhost` and all below it are such names (RFC 6761, section 6.3). Any other name is somebody's, who may have it
    lead here (DNS rebinding); a browser then takes us for that somebody's server.
    """
    return name == _LOCALHOST or name.endswith(f".{_LOCALHOST}") or _is_loopback_address(name)


def _address_of(bound: socket.socket) -> Any:
    return bound.getsockname()


def _is_loopback_address(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False
