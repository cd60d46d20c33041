"""The router: takes requests in, or says at once why not. Stateless; any number of them are equal."""

from headrace.router.router import run_router

__all__ = ["run_router"]
