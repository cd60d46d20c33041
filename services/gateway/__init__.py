"""The gateway: OpenAI's API over HTTP. It keeps open responses and nothing else; any number of them are equal."""

from headrace.gateway.gateway import run_gateway

__all__ = ["run_gateway"]
