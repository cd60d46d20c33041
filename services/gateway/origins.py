"""Which web pages may use this gateway: none but those of the origins that are configured.

A page of any site can have its visitor's browser send requests to loopback. The browser names the page's origin with
each that could do something; after DNS rebinding it takes the gateway for the page's own server, and then only `Host`
still has the page's name. Programs that are no browsers send no `Origin`.
"""

from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.gateway.errors import ORIGIN_NOT_ALLOWED, edge_error
from headrace.listening import host_of, is_loopback_name

__all__ = ["Origins"]

_ANY: Final = "*"
_PREFLIGHT_AGE_S: Final = 600
_READABLE: Final = "x-request-id, x-headrace-job, retry-after, x-should-retry"
"""What a page's script may read of an answer's headers."""


class Origins:
    """Refuses with 403 what comes from a page of another origin than `allowed`, and answers the pages of those (CORS).

    With `is_loopback`, requests whose `Host` names neither loopback nor the host of an allowed origin are refused too.
    `*` in `allowed` lets every page in.
    """

    def __init__(self, app: ASGIApp, *, allowed: frozenset[str], is_loopback: bool) -> None:
        self._app = app
        self._allowed = allowed
        self._hosts = {urlsplit(origin).hostname for origin in allowed}
        self._is_loopback = is_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or hand it on."""
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        is_from_page = origin is not None and (origin.lower() in self._allowed or _ANY in self._allowed)
        if (origin is not None and not is_from_page) or not self._is_own_name(headers.get("host")):
            await edge_error(ORIGIN_NOT_ALLOWED)(scope, receive, send)
            return
        if origin is None:
            await self._app(scope, receive, send)
            return
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(origin, headers)(scope, receive, send)
            return

        async def send_readable(message: Message) -> None:
            if message["type"] == "http.response.start":
                readable = MutableHeaders(scope=message)
                readable["access-control-allow-origin"] = origin
                readable["access-control-expose-headers"] = _READABLE
                readable.add_vary_header("Origin")
            await send(message)

        await self._app(scope, receive, send_readable)

    def _is_own_name(self, host: str | None) -> bool:
        if host is None or not self._is_loopback or _ANY in self._allowed:
            return True
        name = host_of(host) or ""
        return name in self._hosts or is_loopback_name(name)


def _preflight(origin: str, headers: Headers) -> Response:
    return Response(
        status_code=204,
        headers={
            "access-control-allow-origin": origin,
            "access-control-allow-methods": "GET, POST, DELETE",
            "access-control-allow-headers": headers.get("access-control-request-headers", "*"),
            "access-control-max-age": str(_PREFLIGHT_AGE_S),
            "vary": "Origin, Access-Control-Request-Headers",
        },
    )
