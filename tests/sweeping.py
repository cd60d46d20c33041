"""Removes what a test's deployment left in a broker that the next test uses too."""

import json
import socket
from io import BufferedRWPair
from typing import Any
from urllib.parse import urlsplit

__all__ = ["remove_streams"]

_WITHIN_S = 30.0


def remove_streams(url: str, prefix: str) -> None:
    """Delete every stream of a deployment prefix, and of those that begin with it; blocks until the broker has.

    Speaks NATS by hand, since no event loop runs before and after a test.
    """
    address = urlsplit(url)
    connection = socket.create_connection((address.hostname, address.port or 4222), timeout=_WITHIN_S)
    with connection, connection.makefile("rwb") as wire:
        wire.write(b'CONNECT {"verbose":false}\r\nSUB swept 1\r\n')
        part = prefix.upper().replace(".", "_")
        names = _ask(wire, "STREAM.NAMES")["streams"] or ()
        for name in names:
            if part in name:
                _ask(wire, f"STREAM.DELETE.{name}")


def _ask(wire: BufferedRWPair, call: str) -> Any:
    """What JetStream's API answers to a call without a body."""
    wire.write(f"PUB $JS.API.{call} swept 0\r\n\r\n".encode())
    wire.flush()
    for line in wire:
        if line.startswith(b"MSG swept "):
            return json.loads(wire.read(int(line.split()[-1])))
        if line.startswith(b"PING"):
            wire.write(b"PONG\r\n")
            wire.flush()
    raise ConnectionError(f"the broker left before it answered {call}")
