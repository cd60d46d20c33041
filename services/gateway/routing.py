"""Routes with all methods of a URL."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["route"]


def route(path: str, **answers: Callable[[Request], Awaitable[Response]]) -> Route:
    """One route for all methods of a URL, so that a refused method is told which there are."""

    async def answer(request: Request) -> Response:
        return await answers["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, answer, methods=list(answers))
