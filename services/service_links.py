"""Variables that Kubernetes gives every container for each Service of its namespace, and nobody wrote as a setting.

A Service called `headrace` or `headrace-gateway` makes such as `HEADRACE_PORT=tcp://10.0.0.11:4222` ("Services, Service
environment variables" in the Kubernetes documentation, `makeLinkVariables` in the kubelet).
"""

import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Final

__all__ = ["is_service_link"]

_SERVICE: Final = r"(?P<service>HEADRACE(?:_[A-Z0-9_]+?)?)"
_HOST: Final = "_SERVICE_HOST"
_PROTOCOLS: Final = ("tcp", "udp", "sctp")


def is_service_link(variable: str, text: str, environ: Mapping[str, str], *, is_setting: bool) -> bool:
    """Whether Kubernetes wrote this: its name is a link's, and its value is of the form such a link has.

    A link can have the name of a setting (a Service `headrace-monitor` makes `HEADRACE_MONITOR_PORT`). Then it counts
    as one only where `environ` has the Service's host too.
    """
    for form, has_form in _FORMS:
        if (found := form.fullmatch(variable)) and has_form(text):
            return not is_setting or _is_address(environ.get(found["service"] + _HOST, ""))
    return False


def _is_address(text: str) -> bool:
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return False


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) <= 65_535


def _is_url(text: str) -> bool:
    protocol, separator, rest = text.partition("://")
    host, _, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return bool(separator) and protocol in _PROTOCOLS and _is_address(host) and _is_port(port)


_FORMS: Final[tuple[tuple[re.Pattern[str], Callable[[str], bool]], ...]] = (
    (re.compile(_SERVICE + _HOST), _is_address),
    (re.compile(_SERVICE + r"_SERVICE_PORT(?:_[A-Z0-9_]+)?"), _is_port),
    (re.compile(_SERVICE + r"_PORT(?:_\d+_(?:TCP|UDP|SCTP))?"), _is_url),
    (re.compile(_SERVICE + r"_PORT_\d+_(?:TCP|UDP|SCTP)_PROTO"), _PROTOCOLS.__contains__),
    (re.compile(_SERVICE + r"_PORT_\d+_(?:TCP|UDP|SCTP)_PORT"), _is_port),
    (re.compile(_SERVICE + r"_PORT_\d+_(?:TCP|UDP|SCTP)_ADDR"), _is_address),
)
"""Forms of a link's name, and what its value is then."""
